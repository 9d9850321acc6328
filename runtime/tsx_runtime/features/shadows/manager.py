"""The shadows of all models, which the traffic policies start and stop.

Responses are compared without blocking the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from datetime import datetime, timezone

from tsx_runtime.core.comparison.comparison import ComparisonResult, compare, tolerance_of
from tsx_runtime.core.concurrency.daemon_threads import DaemonThreads
from tsx_runtime.core.models.model import Model
from tsx_runtime.core.traffic.manager import TrafficManager
from tsx_runtime.core.traffic.routing import resolve_label, serving_versions
from tsx_runtime.errors import BadRequest, Conflict, TsxError, Unavailable
from tsx_runtime.features.shadows.mirror import Mirror, ResponsePair
from tsx_runtime.features.shadows.report import Example, excerpt_of, side_of, without_secrets
from tsx_runtime.plugins import Comparison
from tsx_runtime.settings.traffic_policy import Compare, Shadow, Traffic
from tsx_runtime.shared.suggestions import suggestion
from tsx_runtime.wire import Parts, parse_header_block, parse_request_meta

MAX_COMPARISONS = 4  # limit of comparisons in threads at a time, for all models
MAX_INLINE_BYTES = 4096  # Comparing smaller responses takes less time than starting a thread.
PLUGIN_TIMEOUT_S = 1.0  # default limit for a plugin
BUILTIN_TIMEOUT_S = 30.0  # limit for a built-in comparison, whose responses have a limited size

logger = logging.getLogger("tsx.shadow")


class ShadowManager:
    """The shadows by model.

    Results stay readable after a shadow has stopped, until another one starts or the model is
    removed.
    """

    def __init__(self, traffic: TrafficManager, plugins: Mapping[str, Comparison]) -> None:
        self._models = traffic.models
        self._traffic = traffic
        self._plugins = plugins
        self._by_model: dict[str, Mirror] = {}
        self._threads = DaemonThreads(MAX_COMPARISONS, "comparisons")
        self._thread_slots = asyncio.Semaphore(MAX_COMPARISONS)
        traffic.checks.append(self._check)
        traffic.on_traffic.append(self._update)

    def get(self, name: str) -> Mirror | None:
        return self._by_model.get(name)

    def all(self) -> list[Mirror]:
        return list(self._by_model.values())

    def close(self) -> None:
        for mirror in self.all():
            self._stop(mirror)

    def _check(self, model: Model, traffic: Traffic, current: Traffic) -> None:
        """Check that a model can have the shadow of its new traffic.

        Raises:
            BadRequest: The shadow serves all requests itself, or its plugin is missing.
            Conflict: The model is stateful.
        """
        if traffic.shadow is None or traffic.shadow == current.shadow:
            return
        problem = self._problem(model, traffic.shadow)
        if problem is None and (reason := only_server_text(model, traffic)):
            other_versions = [
                number
                for number in model.versions
                if number != resolve_label(traffic.shadow.to, model.versions, traffic.labels)
            ]
            advice = (
                f"Name another version, such as {other_versions[0]}."
                if other_versions
                else "Register the version to test first."
            )
            problem = BadRequest(f"{reason} {advice}")
        if problem is not None:
            raise problem

    def _problem(self, model: Model, config: Shadow) -> TsxError | None:
        """Return why the model cannot have this shadow, or None."""
        stateful = next(
            (
                version
                for version in model.versions.values()
                if version.plan.strategy.sequences is not None
            ),
            None,
        )
        if stateful is not None:
            reason = (
                f"version {stateful.version} is stateful (sequenceBatching), and copies of some"
                " requests would form other sequences"
            )
            return Conflict(f"Model {model.name} cannot have a shadow: {reason}.")
        plugin = config.compare.name
        if plugin is not None and plugin not in self._plugins:
            known = (
                f"; loaded are {', '.join(self._plugins)}"
                if self._plugins
                else "; the setting 'plugins' names none of this kind"
            )
            return BadRequest(
                f"shadow.compare.name: no plugin '{plugin}'"
                f" compares{suggestion(plugin, [*self._plugins]) or known}."
            )
        return None

    def _update(self, name: str) -> None:
        """Start, change or stop the shadow of a model as its current traffic says."""
        model, mirror = self._models.get(name), self._by_model.get(name)
        config = None if model is None else self._traffic.traffic(name).shadow
        if mirror is not None and (model is None or config is None):
            self._stop(mirror)
            if model is None:
                del self._by_model[name]
        if model is None or config is None:
            return
        number = resolve_label(config.to, model.versions, self._traffic.traffic(name).labels)
        if mirror is None or (mirror.number, mirror.config.compare) != (number, config.compare):
            if mirror is not None:
                self._stop(mirror)
                if mirror.number != number:
                    logger.info(
                        "the shadow of %s is now version %s instead of %s; its counters are reset",
                        name,
                        number,
                        mirror.number,
                    )
            mirror = self._by_model[name] = Mirror(name, number, config, self._compare_pair)
        mirror.change(config)
        mirror.set_target(model.versions.get(number))
        self._set_problem(mirror, self._problem(model, config))

    def _set_problem(self, mirror: Mirror, problem: TsxError | None) -> None:
        text = None if problem is None else problem.message
        if text is not None and text != mirror.problem:
            logger.warning("%s Nothing is copied.", text)
        mirror.problem = text
        if text is not None:
            self._stop(mirror)
        elif not mirror.is_observed:
            mirror.is_observed = True
            self._traffic.observe(mirror.name, mirror)

    def _stop(self, mirror: Mirror) -> None:
        mirror.withdraw()
        if mirror.is_observed:
            mirror.is_observed = False
            self._traffic.unobserve(mirror.name, mirror)

    async def _compare_pair(self, pair: ResponsePair) -> None:
        report, config = pair.copy.report, pair.mirror.config.compare
        primary, shadow = (
            side_of(pair.copy.version, pair.copy.primary_answer, pair.copy.seconds),
            side_of(pair.mirror.number, pair.shadow_answer, pair.seconds),
        )
        try:
            difference, largest = await self._compare(config, pair)
        except (TimeoutError, asyncio.TimeoutError):
            problem = f"{_comparison_name(config)} took more than {_timeout_s(config):g} s"
        except Unavailable:
            problem = (
                f"{MAX_COMPARISONS} comparisons that exceeded their time limit are still running,"
                " so no more are started"
            )
        except Exception as error:  # A plugin may raise anything.
            problem = f"{_comparison_name(config)} failed: {type(error).__name__}: {error}"[:1000]
            if not report.last_problem:
                logger.exception(
                    "model %s: %s; further failures are not logged", pair.mirror.name, problem
                )
        else:
            report.add_pair(primary, shadow, largest)
            if difference is None:
                report.agreed += 1
            else:
                report.disagreed += 1
                id, _, headers = parse_request_meta(pair.copy.original.meta)
                request_headers = without_secrets(dict(parse_header_block(headers)))
                reason = difference.between("primary", "shadow")[:1000]
                report.add_example(
                    Example(
                        datetime.now(timezone.utc),
                        reason,
                        id,
                        request_headers,
                        excerpt_of(pair.copy.body),
                        primary,
                        shadow,
                    )
                )
            return
        report.uncompared += 1
        report.last_problem = problem

    async def _compare(self, config: Compare, pair: ResponsePair) -> ComparisonResult:
        primary_answer, shadow_answer = pair.copy.primary_answer, pair.shadow_answer
        plugin = None if config.name is None else self._plugins[config.name]
        precisions = self._precisions(pair.mirror.name, pair.copy.version, pair.mirror.number)
        is_quick = (
            primary_answer.status != shadow_answer.status
            or primary_answer.body == shadow_answer.body
            or len(primary_answer.body) + len(shadow_answer.body) <= MAX_INLINE_BYTES
        )
        if plugin is None and is_quick:
            return compare(config, b"", primary_answer, shadow_answer, precisions=precisions)

        def compare_in_thread() -> ComparisonResult:
            body = pair.copy.body
            request = (
                b""
                if plugin is None
                else b"".join(body.pieces)
                if isinstance(body, Parts)
                else bytes(body)
            )
            return compare(config, request, primary_answer, shadow_answer, plugin, precisions)

        async with self._thread_slots:
            return await asyncio.wait_for(self._threads.call(compare_in_thread), _timeout_s(config))

    def tolerance(self, mirror: Mirror) -> tuple[float, float]:
        """Return rtol and atol for a numeric comparison with the default version."""
        model = self._models.get(mirror.name)
        return tolerance_of(
            mirror.config.compare,
            *self._precisions(mirror.name, *([model.default] if model else []), mirror.number),
        )

    def _precisions(self, name: str, *numbers: str) -> list[str | None]:
        versions = self._models[name].versions if name in self._models else {}
        return [versions[number].precision for number in numbers if number in versions]


def only_server_text(model: Model, traffic: Traffic) -> str:
    """Return why a shadow that serves all requests itself gets no copies, or an empty string."""
    if traffic.shadow is None:
        return ""
    number = resolve_label(traffic.shadow.to, model.versions, traffic.labels)
    if serving_versions(traffic, model.versions, model.default) != {number}:
        return ""
    return (
        f"Version {number} of model {model.name} already answers all requests, so no requests can"
        " be copied to it."
    )


def _comparison_name(config: Compare) -> str:
    return f"the comparison {config.kind}" if config.name is None else f"the plugin '{config.name}'"


def _timeout_s(config: Compare) -> float:
    if config.name is None:
        return BUILTIN_TIMEOUT_S
    return PLUGIN_TIMEOUT_S if config.timeout is None else config.timeout
