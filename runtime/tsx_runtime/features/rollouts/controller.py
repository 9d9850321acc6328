"""Runs rollouts: at intervals, it reads the counters and applies the decision of `policy.decide`.

A rollout continues after a restart of the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from tsx_runtime.core.comparison.quality import QualitySource
from tsx_runtime.core.models.model import Model, ModelVersion
from tsx_runtime.core.persistence import StateStore
from tsx_runtime.core.telemetry.histogram import quantile
from tsx_runtime.core.traffic.manager import TrafficManager, TrafficState
from tsx_runtime.core.traffic.routing import resolve_label, weighted_versions
from tsx_runtime.core.workers.worker import WorkerState
from tsx_runtime.errors import BadRequest, Conflict, TsxError
from tsx_runtime.features.rollouts.decision_log import DecisionLog
from tsx_runtime.features.rollouts.policy import (
    Action,
    Counts,
    Decision,
    RolloutPlan,
    RolloutState,
    Status,
    StepObservation,
    decide,
)
from tsx_runtime.features.rollouts.quality import compare_metric
from tsx_runtime.settings.traffic_policy import Traffic, parse_traffic

OBSERVATIONS_PER_STEP = 20
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 5.0  # time between two observations
SAVE_INTERVAL_S = 30.0  # A killed server loses at most the counts of this time.

logger = logging.getLogger("tsx.rollout")


class RolloutController:
    """The rollouts of all models, at most one per model; used only in the event loop."""

    def __init__(
        self,
        traffic: TrafficManager,
        state: StateStore,
        is_stopping: Callable[[], bool],
        quality_source: Callable[[], QualitySource | None] = lambda: None,
    ) -> None:
        """Resume each saved rollout when its model is registered.

        Args:
            traffic: The traffic of the models.
            state: The saved state.
            is_stopping: Returns whether the server is stopping. The next server then continues the
                rollouts.
            quality_source: Returns the feature that knows the quality of versions, if there is one.
        """
        self._traffic = traffic
        self._quality_source = quality_source
        self._models = traffic.models
        self._state = state
        self._is_stopping = is_stopping
        self._running: dict[str, _ActiveRollout] = {}
        self._closed = False
        self.logs = DecisionLog(state.directory)
        traffic.checks.append(self._check_traffic)
        traffic.on_traffic.append(self._on_traffic)

    def start(self, name: str, plan: RolloutPlan) -> RolloutState:
        """Start a rollout.

        Raises:
            ModelNotFound: No model has this name.
            ModelVersionNotFound: The model has no such version.
            BadRequest: The version already gets all requests.
            Conflict: Another rollout runs, the version cannot serve, the traffic forbids it, or
                the model is not monitored, as a metric or a guard needs.
        """
        new_version = self._traffic.find(name, plan.version)
        # A label in the plan may refer to another version later.
        plan = plan.model_copy(update={"version": new_version.version})
        last_rollout = self.find(name)
        if last_rollout is not None and last_rollout.status == "running":
            text = f"Model {name} has a rollout of version {last_rollout.plan.version} under way"
            raise Conflict(
                f"{text}. Wait for it, or end it: DELETE /models/{name}/rollout, or `tsx models"
                f" rollout {name} --stop`"
            )
        old_traffic = self._traffic.traffic(name)
        old_version = self._old_version(name, old_traffic, new_version)
        shadow = old_traffic.shadow and resolve_label(
            old_traffic.shadow.to, self._models[name].versions, old_traffic.labels
        )
        if shadow in (old_version.version, new_version.version):
            text = (
                f"Version {shadow} of model {name} is its shadow, and the copied requests would"
                " distort what the rollout measures"
            )
            advice = (
                f'PATCH /models/{name}/traffic with {{"shadow": null}}, or `tsx models shadow'
                f" {name} --off`"
            )
            raise Conflict(f"{text}. End it first: {advice}")
        if failure := _failure(new_version):
            text = (
                f"Version {new_version.version} of model {name} cannot answer requests: {failure}"
            )
            command = f"`tsx models scale {name} 1 --version {new_version.version}`"
            advice = f"PUT /models/{name}/{new_version.version}?min_worker=1, or {command}"
            raise Conflict(f"{text}. Start a worker first: {advice}")
        if (plan.metric or plan.guards) and (problem := self._quality_problem(name)):
            raise Conflict(f"A rollout with a metric or a guard cannot start: {problem}")
        now = time.time()
        old_counts = self._counts(name, old_version.version)
        default = self._models[name].default
        state = RolloutState(
            plan=plan,
            old=old_version.version,
            default=default,
            before=old_traffic.as_json(),
            began=now,
            changed=now,
            old_last=old_counts,
        )
        requirement = f"each step needs {plan.min_requests} of its answers"
        self._run(
            name, state, "start", f"from version {state.old} to {plan.version}; {requirement}"
        )
        return state

    def find(self, name: str) -> RolloutState | None:
        """Return the active rollout or the last one, or None if there was none."""
        running = self._running.get(name)
        if running is not None:
            return running.state
        state = self._load(name)
        if (
            state is not None
            and state.status == "running"
            and (missing := self._missing_versions(name, state))
        ):
            state.reason = f"after a restart it waits until {missing} is registered"
        return state

    def stop(self, name: str, *, back: bool) -> RolloutState:
        """End a rollout on request.

        Args:
            name: The name of the model.
            back: Whether all requests go to the old version again. If not, the weights stay.

        Raises:
            Conflict: No rollout is active.
        """
        running = self._running.get(name) or self._interrupted(name)
        if running is None:
            raise Conflict(f"Model {name} has no rollout under way.")
        self._running[name] = running
        if back:
            self._roll_back(name, running, "it was asked for")
        else:
            self._end(name, running, "stopped", "it was asked for; the shares stay as they are")
        return running.state

    def close(self) -> None:
        """Save all rollouts for the next server; `logs.close` waits for the log."""
        self._closed = True
        for name, running in self._running.items():
            running.cancel()
            self._read_counters(name, running)
            self._save(name, running)
        self._running.clear()

    def _on_traffic(self, name: str) -> None:
        """Resume the rollout of a new model, or react to traffic that a client has changed."""
        running = self._running.get(name)
        if self._closed:
            return
        if running is not None:
            if not running.changes_traffic:
                self._follow(name, running)
            return
        if name not in self._models:
            return
        interrupted = self._interrupted(name)
        if interrupted is None:
            return
        state = interrupted.state
        if self._traffic.traffic(name).weights not in state.weights_after_a_restart:
            self._end(name, interrupted, "stopped", self._change_reason(name, state))
        elif not self._missing_versions(name, state):
            self._resume(name, state)

    def _interrupted(self, name: str) -> _ActiveRollout | None:
        """Return the rollout that was active when the server ended, unless it is resumed already.

        After it, labels, rules and shadows stay as they are in the current traffic.
        """
        state = self._load(name)
        if state is None or state.status != "running":
            return None
        state.before = {
            **self._traffic.traffic(name).as_json(),
            "weights": state.before.get("weights", {}),
        }
        return _ActiveRollout(state)

    def _missing_versions(self, name: str, state: RolloutState) -> str:
        """Return the versions that a rollout waits for as a text, or an empty string."""
        versions = self._models[name].versions if name in self._models else {}
        return " and ".join(
            f"version {number}"
            for number in (state.old, state.plan.version)
            if number not in versions
        )

    def _resume(self, name: str, state: RolloutState) -> None:
        try:
            self._run(name, state, "resume", "the server was started again")
        except (TsxError, ValueError) as error:
            state.status, state.reason = "stopped", f"it could not go on after a restart: {error}"
            logger.warning("rollout of %s: %s", name, state.reason)
            self._state.save(name, rollout=state.model_dump(mode="json"))

    def _check_traffic(self, model: Model, traffic: Traffic, current: Traffic) -> None:
        """Check that a shadow does not copy requests to a version that a rollout measures.

        Raises:
            Conflict: The rollout would count the copies.
        """
        if traffic.shadow is None or traffic.shadow == current.shadow:
            return
        state = self.find(model.name)
        if state is None or state.status != "running":
            return
        if resolve_label(traffic.shadow.to, model.versions, traffic.labels) in (
            state.old,
            state.plan.version,
        ):
            raise Conflict(
                f"Model {model.name} has a rollout in progress, which copies to version"
                f" {traffic.shadow.to} would mislead. Wait for it."
            )

    def _follow(self, name: str, running: _ActiveRollout) -> None:
        """Adopt changed labels, rules and shadows; changed weights end the rollout."""
        current, state = self._traffic.traffic(name), running.state
        if current.weights == running.traffic.weights:
            running.traffic, state.before = (
                current,
                {**current.as_json(), "weights": state.before.get("weights", {})},
            )
            self._set_rollback_point(name, state)
            self._save(name, running)
        else:
            self._end(name, running, "stopped", self._change_reason(name, state))

    def _change_reason(self, name: str, state: RolloutState) -> str:
        """Return why the weights are not those that this rollout has set."""
        versions = self._models[name].versions
        for version in versions.values():
            if version.replaced_version in {state.old, state.plan.version} - set(versions):
                return (
                    f"version {version.replaced_version} was replaced by version {version.version},"
                    " which has its share now"
                )
        return "the weights of the model were changed by hand"

    def _old_version(self, name: str, traffic: Traffic, new_version: ModelVersion) -> ModelVersion:
        """Return the version whose requests will go to the new one."""
        model = self._models[name]
        old_versions = weighted_versions(traffic, model.versions, model.default) - {
            new_version.version
        }
        if not old_versions:
            raise BadRequest(
                f"Version {new_version.version} of model {name} already gets all requests"
            )
        if len(old_versions) > 1:
            text = (
                f"The requests of model {name} are shared by the versions"
                f" {' and '.join(sorted(old_versions))}"
            )
            advice = (
                f"PUT /models/{name}/traffic, or `tsx models traffic {name} {min(old_versions)}=1`"
            )
            raise Conflict(f"{text}. Leave them to one of these first: {advice}")
        (old,) = old_versions
        return self._traffic.find(name, old)

    def _run(self, name: str, state: RolloutState, event: str, reason: str) -> None:
        running = self._running[name] = _ActiveRollout(state)
        state.reason = reason
        try:
            self._begin_step(name, running)
        except (TsxError, ValueError):
            del self._running[name]
            raise
        self._set_rollback_point(name, state)
        self._log(name, running, event)
        self._schedule_observation(name, running)

    def _begin_step(self, name: str, running: _ActiveRollout) -> None:
        """Set the weights of the current step, and count from now on."""
        state = running.state
        weights = state.weights(state.step)
        self._set_traffic(name, running, parse_traffic({**state.before, "weights": weights}))
        running.counts = {number: self._counts(name, number) for number in weights}
        versions = self._models[name].versions
        running.versions = {number: versions[number] for number in weights if number in versions}
        self._save(name, running)

    def _schedule_observation(self, name: str, running: _ActiveRollout) -> None:
        seconds = min(
            max(running.state.plan.bake / OBSERVATIONS_PER_STEP, MIN_INTERVAL_S), MAX_INTERVAL_S
        )
        running.timer = asyncio.get_running_loop().call_later(seconds, self._observe, name, running)

    def _observe(self, name: str, running: _ActiveRollout) -> None:
        if self._running.get(name) is not running or self._is_stopping():
            return  # The next server continues the rollout.
        state = running.state
        try:
            self._read_counters(name, running)
            self._apply(name, running, decide(state.plan, self._observation(name, state)))
        except (TsxError, ValueError) as error:  # The old version may have been unregistered.
            self._end(name, running, "stopped", str(error))
        if self._running.get(name) is running:
            if time.monotonic() - running.saved_at > SAVE_INTERVAL_S:
                self._save(name, running)
            self._schedule_observation(name, running)

    def _apply(self, name: str, running: _ActiveRollout, decision: Decision) -> None:
        state = running.state
        state.reason = decision.reason
        if decision.action is Action.BACK:
            self._roll_back(name, running, decision.reason)
        elif decision.action is Action.FINISH:
            # The new version becomes the default one, and the weights are removed.
            with running:
                self._traffic.set_default(name, state.plan.version, undoable=False)
            self._set_traffic(name, running, parse_traffic({**state.before, "weights": {}}))
            self._end(name, running, "finished", state.reason)
        elif decision.action is Action.ADVANCE:
            self._log(name, running, "advance")
            state.old_last = self._baseline(state)
            state.step, state.seconds, state.new, state.old_now, state.changed = (
                state.step + 1,
                0.0,
                Counts(),
                Counts(),
                time.time(),
            )
            self._begin_step(name, running)

    def _roll_back(self, name: str, running: _ActiveRollout, reason: str) -> None:
        self._set_traffic(name, running, parse_traffic(running.state.before), checked=False)
        self._end(name, running, "went back", reason)

    def _end(self, name: str, running: _ActiveRollout, status: Status, reason: str) -> None:
        state = running.state
        running.cancel()
        self._running.pop(name, None)
        state.status, state.reason, state.changed = status, reason, time.time()
        self._log(name, running, status)
        self._save(name, running)

    def _set_rollback_point(self, name: str, state: RolloutState) -> None:
        """Let one rollback undo the whole rollout, but not later changes of labels and rules."""
        default = state.default or self._models[name].default
        self._traffic.set_rollback_point(
            name, TrafficState(parse_traffic(state.before), default), state.began
        )

    def _set_traffic(
        self, name: str, running: _ActiveRollout, traffic: Traffic, *, checked: bool = True
    ) -> None:
        running.traffic = traffic
        with running:
            self._traffic.set_traffic(name, traffic, undoable=False, checked=checked)

    def _observation(self, name: str, state: RolloutState) -> StepObservation:
        versions = self._models[name].versions if name in self._models else {}
        new_version = versions.get(state.plan.version)
        failure = "it was unregistered" if new_version is None else _failure(new_version)
        observation = StepObservation(
            state.step,
            state.seconds,
            state.new,
            self._baseline(state),
            new_version is not None and new_version.ready,
            failure,
        )
        return self._with_quality(name, state, observation)

    def _with_quality(
        self, name: str, state: RolloutState, observation: StepObservation
    ) -> StepObservation:
        """Add the quality of both versions since the rollout began, if the plan needs it."""
        plan, source = state.plan, self._quality_source()
        if not plan.metric and not plan.guards:
            return observation
        problem = self._quality_problem(name)
        if source is None or problem:
            return replace(observation, quality_problem=problem)
        since = state.quality_since or state.began
        new, old = (source.quality_of(name, number, since) for number in (plan.version, state.old))
        if plan.metric and new is not None and old is not None:
            is_accuracy = plan.metric == "accuracy"
            state.metric = compare_metric(
                plan.metric,
                plan.margin,
                (plan.version, new.accuracy if is_accuracy else new.error),
                (state.old, old.accuracy if is_accuracy else old.error),
                old_grows=state.share < 100,
            )
        drift = new.drift if new is not None and new.windows else None
        return replace(observation, metric=state.metric, drift=drift)

    def _quality_problem(self, name: str) -> str:
        """Return why the quality of a model's versions is not known, or an empty string."""
        source = self._quality_source()
        if source is not None and source.is_monitored(name):
            return ""
        return (
            f"model {name} is not monitored: PUT /models/{name}/monitor, or `tsx models"
            f" monitor {name} --share 5%`"
        )

    def _baseline(self, state: RolloutState) -> Counts:
        """Return the old version's counts, to which the new version's are compared.

        They are from this step, or from the last one if this step has too few requests.
        """
        return (
            state.old_now
            if state.share < 100 and state.old_now.requests >= state.plan.min_requests
            else state.old_last
        )

    def _read_counters(self, name: str, running: _ActiveRollout) -> None:
        """Add what was counted since the last call."""
        state, now = running.state, time.monotonic()
        state.seconds += now - running.read_at
        running.read_at = now
        model = self._models.get(name)
        for number, last_counts in running.counts.items():
            version = model.versions.get(number) if model else None
            if (
                version is not None
                and running.versions.setdefault(number, version) is not version
                and number == state.plan.version
            ):
                # The counts start again, since the version was replaced by another one.
                running.versions[number] = version
                running.counts[number], state.new, state.seconds = (
                    self._counts(name, number),
                    Counts(),
                    0.0,
                )
                state.quality_since, state.metric = time.time(), None
                continue
            counts = self._counts(name, number)
            running.counts[number] = counts
            if number == state.old:
                state.old_now = state.old_now.plus(counts.since(last_counts))
            else:
                state.new = state.new.plus(counts.since(last_counts))

    def _counts(self, name: str, number: str) -> Counts:
        model = self._models.get(name)
        version = model.versions.get(number) if model else None
        if version is None:
            return Counts()
        stats = version.stats
        return Counts(
            sum(stats.answers.values()) + stats.failed_refusals,
            stats.errors,
            stats.latency.counts(),
        )

    def _load(self, name: str) -> RolloutState | None:
        saved_state = self._state.load(name).get("rollout")
        try:
            return None if saved_state is None else RolloutState.model_validate(saved_state)
        except ValidationError as error:
            logger.warning("model %s: its saved rollout cannot be used: %s", name, error)
            return None

    def _save(self, name: str, running: _ActiveRollout) -> None:
        running.saved_at = time.monotonic()
        if name not in self._models:
            return  # The model and all its settings were removed.
        self._state.save(name, rollout=running.state.model_dump(mode="json"))

    def _log(self, name: str, running: _ActiveRollout, event: str) -> None:
        state = running.state
        logger.info(
            "rollout of %s, version %s: %s at %g %%: %s",
            name,
            state.plan.version,
            event,
            state.share,
            state.reason,
        )
        self.logs.add(
            name,
            {
                "at": time.time(),
                "event": event,
                "from": state.old,
                "to": state.plan.version,
                "step": state.step + 1,
                "share": state.share,
                "seconds": round(state.seconds, 1),
                "reason": state.reason,
                "new": describe_counts(state.new),
                "old": describe_counts(state.old_now),
            },
        )


class _ActiveRollout:
    """An active rollout. Inside its `with` block, changes of the traffic are its own."""

    traffic: Traffic

    def __init__(self, state: RolloutState) -> None:
        self.state = state
        self.versions: dict[str, ModelVersion] = {}  # versions whose requests are counted
        self.counts: dict[str, Counts] = {}  # counters by version at the last reading
        self.read_at = self.saved_at = time.monotonic()
        self.changes_traffic = False
        self.timer: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def __enter__(self) -> None:
        self.changes_traffic = True

    def __exit__(self, *_: object) -> None:
        self.changes_traffic = False


def describe_counts(counts: Counts) -> dict[str, Any]:
    """Return the counts for the API and the log."""
    p50, p99 = (quantile(counts.latencies, q) for q in (0.5, 0.99))
    return {
        "requests": counts.requests,
        "errors": counts.errors,
        "error_rate": round(counts.error_rate, 6),
        "p50_ms": None if p50 is None else round(1000 * p50, 3),
        "p99_ms": None if p99 is None else round(1000 * p99, 3),
    }


def _failure(version: ModelVersion) -> str:
    """Return why no worker of a version will ever serve again, or an empty string."""
    workers = version.workers
    if not workers:
        return "" if version.asleep else "it has no workers"
    if all(worker.state is WorkerState.FAILED for worker in workers):
        return (
            "its workers failed:"
            f" {(version.last_error or 'no reason is known').strip().splitlines()[-1]}"
        )
    return ""
