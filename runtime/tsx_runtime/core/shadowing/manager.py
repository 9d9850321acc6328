"""The shadows of all models: starts and stops them by the traffic policies, and compares answers
without blocking the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from datetime import datetime, timezone

from tsx_runtime.core.concurrency.daemon_threads import DaemonThreads
from tsx_runtime.core.models.model import Model
from tsx_runtime.core.shadowing.comparison import ComparisonResult, compare, tolerance_of
from tsx_runtime.core.shadowing.mirror import Mirror, ResponsePair
from tsx_runtime.core.shadowing.report import Example, excerpt_of, side_of, without_secrets
from tsx_runtime.core.traffic.manager import TrafficManager
from tsx_runtime.core.traffic.routing import resolve_label, serving_versions
from tsx_runtime.errors import BadRequest, Conflict, TsxError, Unavailable
from tsx_runtime.plugins import Comparison
from tsx_runtime.settings.traffic_policy import Compare, Shadow, Traffic
from tsx_runtime.shared.suggestions import suggestion
from tsx_runtime.wire import Parts, parse_header_block, parse_request_meta

MOST_COMPARISONS = 4  # in threads at a time, of all models
# bytes of two answers that are compared where they are: that is quicker than a thread is begun
SMALL = 4096
PATIENCE = 1.0  # seconds for a plugin, where nothing else is said
OWN_PATIENCE = 30.0  # seconds for the server's own comparisons, whose answers are of a bounded size

logger = logging.getLogger("tsx.shadow")


class ShadowManager:
    """The shadows by model.

    Results stay readable after a shadow is stopped, until another one starts or the model is
    removed.
    """

    def __init__(self, traffic: TrafficManager, plugins: Mapping[str, Comparison]) -> None:
        self._models = traffic.models
        self._traffic = traffic
        self._plugins = plugins
        self._by_model: dict[str, Mirror] = {}
        self._threads = DaemonThreads(MOST_COMPARISONS, "comparisons")
        self._turns = asyncio.Semaphore(MOST_COMPARISONS)
        traffic.checks.append(self._check)
        traffic.on_traffic.append(self._arrange)

    def get(self, name: str) -> Mirror | None:
        return self._by_model.get(name)

    def all(self) -> list[Mirror]:
        return list(self._by_model.values())

    def close(self) -> None:
        for mirror in self.all():
            self._stop(mirror)

    def _check(self, model: Model, traffic: Traffic, said: Traffic) -> None:
        """Raises BadRequest, Conflict."""
        if traffic.shadow is None or traffic.shadow == said.shadow:
            return
        problem = self._problem(model, traffic.shadow)
        if problem is None and (alone := answers_alone(model, traffic)):
            others = [
                number
                for number in model.versions
                if number != resolve_label(traffic.shadow.to, model.versions, traffic.labels)
            ]
            named = (
                f"Name another version, such as {others[0]}."
                if others
                else "Register the version to test first."
            )
            problem = BadRequest(f"{alone} {named}")
        if problem is not None:
            raise problem

    def _problem(self, model: Model, said: Shadow) -> TsxError | None:
        """Why the model cannot have this shadow."""
        stateful = next(
            (
                version
                for version in model.versions.values()
                if version.plan.strategy.sequences is not None
            ),
            None,
        )
        if stateful is not None:
            why = (
                f"version {stateful.version} is stateful (sequenceBatching), and copies of some"
                " requests would form other sequences"
            )
            return Conflict(f"Model {model.name} cannot have a shadow: {why}.")
        plugin = said.compare.name
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

    def _arrange(self, name: str) -> None:
        """As the traffic of the model says now."""
        model, old = self._models.get(name), self._by_model.get(name)
        said = None if model is None else self._traffic.traffic(name).shadow
        if old is not None and (model is None or said is None):
            self._stop(old)
            if model is None:
                del self._by_model[name]
        if model is None or said is None:
            return
        number = resolve_label(said.to, model.versions, self._traffic.traffic(name).labels)
        if old is None or (old.number, old.said.compare) != (number, said.compare):
            if old is not None:
                self._stop(old)
                if old.number != number:
                    logger.info(
                        "the shadow of %s is now version %s instead of %s; its counters are reset",
                        name,
                        number,
                        old.number,
                    )
            old = self._by_model[name] = Mirror(name, number, said, self._judge)
        old.change(said)
        old.aim(model.versions.get(number))
        self._set_problem(old, self._problem(model, said))

    def _set_problem(self, mirror: Mirror, problem: TsxError | None) -> None:
        text = None if problem is None else problem.message
        if text is not None and text != mirror.problem:
            logger.warning("%s Nothing is copied.", text)
        mirror.problem = text
        if text is not None:
            self._stop(mirror)
        elif not mirror.observed:
            mirror.observed = True
            self._traffic.observe(mirror.name, mirror)

    def _stop(self, mirror: Mirror) -> None:
        mirror.let_go()
        if mirror.observed:
            mirror.observed = False
            self._traffic.unobserve(mirror.name, mirror)

    async def _judge(self, pair: ResponsePair) -> None:
        report, how = pair.copy.report, pair.mirror.said.compare
        primary, shadow = (
            side_of(pair.copy.version, pair.copy.first, pair.copy.seconds),
            side_of(pair.mirror.number, pair.second, pair.seconds),
        )
        try:
            difference, largest = await self._compare(how, pair)
        except (TimeoutError, asyncio.TimeoutError):
            problem = f"{_named(how)} took more than {_patience(how):g} s"
        except Unavailable:
            problem = (
                f"{MOST_COMPARISONS} comparisons that exceeded their time limit are still running,"
                " so no more are started"
            )
        except Exception as error:  # the boundary to a plugin's code
            problem = f"{_named(how)} failed: {type(error).__name__}: {error}"[:1000]
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
                id, _, headers = parse_request_meta(pair.copy.of.meta)
                shown = without_secrets(dict(parse_header_block(headers)))
                why = difference.between("primary", "shadow")[:1000]
                report.add_example(
                    Example(
                        datetime.now(timezone.utc),
                        why,
                        id,
                        shown,
                        excerpt_of(pair.copy.body),
                        primary,
                        shadow,
                    )
                )
            return
        report.uncompared += 1
        report.last_problem = problem

    async def _compare(self, how: Compare, pair: ResponsePair) -> ComparisonResult:
        first, second = pair.copy.first, pair.second
        plugin = None if how.name is None else self._plugins[how.name]
        precisions = self._precisions(pair.mirror.name, pair.copy.version, pair.mirror.number)
        quick = (
            first.status != second.status
            or first.body == second.body
            or len(first.body) + len(second.body) <= SMALL
        )
        if plugin is None and quick:
            return compare(how, b"", first, second, precisions=precisions)

        def work() -> ComparisonResult:  # in a thread
            body = pair.copy.body
            request = (
                b""
                if plugin is None
                else b"".join(body.pieces)
                if isinstance(body, Parts)
                else bytes(body)
            )
            return compare(how, request, first, second, plugin, precisions)

        async with self._turns:
            return await asyncio.wait_for(self._threads.call(work), _patience(how))

    def tolerance(self, mirror: Mirror) -> tuple[float, float]:
        """rtol and atol of a numeric comparison with the default version."""
        model = self._models.get(mirror.name)
        return tolerance_of(
            mirror.said.compare,
            *self._precisions(mirror.name, *([model.default] if model else []), mirror.number),
        )

    def _precisions(self, name: str, *numbers: str) -> list[str | None]:
        versions = self._models[name].versions if name in self._models else {}
        return [versions[number].precision for number in numbers if number in versions]


def answers_alone(model: Model, traffic: Traffic) -> str:
    """Why the shadow gets nothing, where it is the only version that answers the requests of which
    it is to get copies; else empty.
    """
    if traffic.shadow is None:
        return ""
    number = resolve_label(traffic.shadow.to, model.versions, traffic.labels)
    if serving_versions(traffic, model.versions, model.default) != {number}:
        return ""
    return (
        f"Version {number} of model {model.name} already answers all requests, so no requests can"
        " be copied to it."
    )


def _named(how: Compare) -> str:
    return f"the comparison {how.kind}" if how.name is None else f"the plugin '{how.name}'"


def _patience(how: Compare) -> float:
    if how.name is None:
        return OWN_PATIENCE
    return PATIENCE if how.timeout is None else how.timeout
