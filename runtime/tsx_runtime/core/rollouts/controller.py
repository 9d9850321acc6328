"""Runs rollouts: reads the counters at intervals, applies the decision of `policy.decide`, and
continues after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from tsx_runtime.core.models.model import Model, ModelVersion
from tsx_runtime.core.persistence import StateStore
from tsx_runtime.core.rollouts.decision_log import DecisionLog
from tsx_runtime.core.rollouts.policy import (
    Action,
    Counts,
    Decision,
    RolloutPlan,
    RolloutState,
    Status,
    StepObservation,
    decide,
)
from tsx_runtime.core.telemetry.histogram import quantile
from tsx_runtime.core.traffic.manager import TrafficManager, TrafficState
from tsx_runtime.core.traffic.routing import resolve_label, weighted_versions
from tsx_runtime.core.workers.worker import WorkerState
from tsx_runtime.errors import BadRequest, Conflict, TsxError
from tsx_runtime.settings.traffic_policy import Traffic, parse_traffic

LOOKS = 20  # in one bake
SHORTEST, LONGEST = 0.1, 5.0  # seconds between two looks
# seconds between two times that mere counts are kept: so much is lost with a server that is killed
SAVE_APART = 30.0

logger = logging.getLogger("tsx.rollout")


class RolloutController:
    """At most one rollout per model. For the event loop."""

    def __init__(
        self, traffic: TrafficManager, state: StateStore, stopping: Callable[[], bool]
    ) -> None:
        """`stopping`: whether a stop of the server was asked for.

        Then its rollouts are left to the next one.
        """
        self._traffic = traffic
        self._models = traffic.models
        self._state = state
        self._stopping = stopping
        self._running: dict[str, _ActiveRollout] = {}
        self._closed = False
        self.logs = DecisionLog(state.directory)
        traffic.checks.append(self._check)
        traffic.on_traffic.append(self._on_traffic)

    def start(self, name: str, plan: RolloutPlan) -> RolloutState:
        """Raises ModelNotFound, ModelVersionNotFound, BadRequest, Conflict."""
        new = self._traffic.find(name, plan.version)
        plan = plan.model_copy(
            update={"version": new.version}
        )  # a label may come to mean another version meanwhile
        under_way = self.find(name)
        if under_way is not None and under_way.status == "running":
            text = f"Model {name} has a rollout of version {under_way.plan.version} under way"
            raise Conflict(
                f"{text}. Wait for it, or end it: DELETE /models/{name}/rollout, or `tsx models"
                f" rollout {name} --stop`"
            )
        before = self._traffic.traffic(name)
        old = self._old(name, before, new)
        shadow = before.shadow and resolve_label(
            before.shadow.to, self._models[name].versions, before.labels
        )
        if shadow in (old.version, new.version):
            text = (
                f"Version {shadow} of model {name} is its shadow, and the copied requests would"
                " distort what the rollout measures"
            )
            how = (
                f'PATCH /models/{name}/traffic with {{"shadow": null}}, or `tsx models shadow'
                f" {name} --off`"
            )
            raise Conflict(f"{text}. End it first: {how}")
        if failed := _failure(new):
            text = f"Version {new.version} of model {name} cannot answer requests: {failed}"
            command = f"`tsx models scale {name} 1 --version {new.version}`"
            how = f"PUT /models/{name}/{new.version}?min_worker=1, or {command}"
            raise Conflict(f"{text}. Start a worker first: {how}")
        now = time.time()
        so_far = self._counts(name, old.version)
        default = self._models[name].default
        state = RolloutState(
            plan=plan,
            old=old.version,
            default=default,
            before=before.as_json(),
            began=now,
            changed=now,
            old_last=so_far,
        )
        need = f"each step needs {plan.min_requests} of its answers"
        self._run(name, state, "start", f"from version {state.old} to {plan.version}; {need}")
        return state

    def find(self, name: str) -> RolloutState | None:
        """The one under way, or the last one; None where there was none."""
        running = self._running.get(name)
        if running is not None:
            return running.state
        state = self._load(name)
        if (
            state is not None
            and state.status == "running"
            and (missing := self._missing(name, state))
        ):
            state.reason = f"after a restart it waits until {missing} is registered"
        return state

    def stop(self, name: str, *, back: bool) -> RolloutState:
        """End it by hand: `back` to the old version, or stay at the shares of now. Raises Conflict
        where none is under way.
        """
        running = self._running.get(name) or self._waiting(name)
        if running is None:
            raise Conflict(f"Model {name} has no rollout under way.")
        self._running[name] = running
        if back:
            self._back(name, running, "it was asked for")
        else:
            self._end(name, running, "stopped", "it was asked for; the shares stay as they are")
        return running.state

    def close(self) -> None:
        """The server ends; the next one goes on.

        What its log has to write is written by `logs.close`, which may take its time.
        """
        self._closed = True
        for name, running in self._running.items():
            running.cancel()
            self._read(name, running)
            self._save(name, running)
        self._running.clear()

    def _on_traffic(self, name: str) -> None:
        """A model came, so that what was under way when the server ended goes on; or its traffic
        was changed from outside.
        """
        running = self._running.get(name)
        if self._closed:
            return
        if running is not None:
            if not running.own:
                self._follow(name, running)
            return
        if name not in self._models:
            return
        waiting = self._waiting(name)
        if waiting is None:
            return
        state = waiting.state
        if self._traffic.traffic(name).weights not in state.weights_after_a_restart:
            self._end(name, waiting, "stopped", self._why_changed(name, state))
        elif not self._missing(name, state):
            self._resume(name, state)

    def _waiting(self, name: str) -> _ActiveRollout | None:
        """One that was under way when the server ended, and is not again.

        What else is said of the traffic holds as it is now.
        """
        state = self._load(name)
        if state is None or state.status != "running":
            return None
        state.before = {
            **self._traffic.traffic(name).as_json(),
            "weights": state.before.get("weights", {}),
        }
        return _ActiveRollout(state)

    def _missing(self, name: str, state: RolloutState) -> str:
        """The versions that it waits for, in words; empty where there are none."""
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

    def _check(self, model: Model, traffic: Traffic, said: Traffic) -> None:
        """Raises Conflict for a shadow on a version that is measured: its copies would count."""
        if traffic.shadow is None or traffic.shadow == said.shadow:
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
        """Labels, rules and the shadow may be changed meanwhile, and stay so afterwards; a change
        of the weights ends the rollout.
        """
        now, state = self._traffic.traffic(name), running.state
        if now.weights == running.set.weights:
            running.set, state.before = (
                now,
                {**now.as_json(), "weights": state.before.get("weights", {})},
            )
            self._keep_way_back(name, state)
            self._save(name, running)
        else:
            self._end(name, running, "stopped", self._why_changed(name, state))

    def _why_changed(self, name: str, state: RolloutState) -> str:
        """The weights, and not by this rollout."""
        versions = self._models[name].versions
        for version in versions.values():
            if version.replaced in {state.old, state.plan.version} - set(versions):
                return (
                    f"version {version.replaced} was replaced by version {version.version}, which"
                    " has its share now"
                )
        return "the weights of the model were changed by hand"

    def _old(self, name: str, before: Traffic, new: ModelVersion) -> ModelVersion:
        """The version whose requests the new one is to get."""
        model = self._models[name]
        others = weighted_versions(before, model.versions, model.default) - {new.version}
        if not others:
            raise BadRequest(f"Version {new.version} of model {name} already gets all requests")
        if len(others) > 1:
            text = (
                f"The requests of model {name} are shared by the versions"
                f" {' and '.join(sorted(others))}"
            )
            how = f"PUT /models/{name}/traffic, or `tsx models traffic {name} {min(others)}=1`"
            raise Conflict(f"{text}. Leave them to one of these first: {how}")
        (old,) = others
        return self._traffic.find(name, old)

    def _run(self, name: str, state: RolloutState, event: str, reason: str) -> None:
        running = self._running[name] = _ActiveRollout(state)
        state.reason = reason
        try:
            self._step(name, running)
        except (TsxError, ValueError):
            del self._running[name]
            raise
        self._keep_way_back(name, state)
        self._note(name, running, event)
        self._look_later(name, running)

    def _step(self, name: str, running: _ActiveRollout) -> None:
        """Give the versions their shares of this step, and count from here."""
        state = running.state
        weights = state.weights(state.step)
        self._set(name, running, parse_traffic({**state.before, "weights": weights}))
        running.seen = {number: self._counts(name, number) for number in weights}
        versions = self._models[name].versions
        running.versions = {number: versions[number] for number in weights if number in versions}
        self._save(name, running)

    def _look_later(self, name: str, running: _ActiveRollout) -> None:
        seconds = min(max(running.state.plan.bake / LOOKS, SHORTEST), LONGEST)
        running.timer = asyncio.get_running_loop().call_later(seconds, self._look, name, running)

    def _look(self, name: str, running: _ActiveRollout) -> None:
        if self._running.get(name) is not running or self._stopping():
            return  # the next server goes on
        state = running.state
        try:
            self._read(name, running)
            self._act(name, running, decide(state.plan, self._seen(name, state)))
        except (TsxError, ValueError) as error:  # the old version, say, is not registered any more
            self._end(name, running, "stopped", str(error))
        if self._running.get(name) is running:
            if time.monotonic() - running.saved > SAVE_APART:
                self._save(name, running)
            self._look_later(name, running)

    def _act(self, name: str, running: _ActiveRollout, decision: Decision) -> None:
        state = running.state
        state.reason = decision.reason
        if decision.action is Action.BACK:
            self._back(name, running, decision.reason)
        elif decision.action is Action.FINISH:
            with running:  # the new version is the default one, and there are no weights any more
                self._traffic.set_default(name, state.plan.version, undoable=False)
            self._set(name, running, parse_traffic({**state.before, "weights": {}}))
            self._end(name, running, "finished", state.reason)
        elif decision.action is Action.ADVANCE:
            self._note(name, running, "advance")
            state.old_last = self._baseline(state)
            state.step, state.seconds, state.new, state.old_now, state.changed = (
                state.step + 1,
                0.0,
                Counts(),
                Counts(),
                time.time(),
            )
            self._step(name, running)

    def _back(self, name: str, running: _ActiveRollout, reason: str) -> None:
        self._set(name, running, parse_traffic(running.state.before), checked=False)
        self._end(name, running, "went back", reason)

    def _end(self, name: str, running: _ActiveRollout, status: Status, reason: str) -> None:
        state = running.state
        running.cancel()
        self._running.pop(name, None)
        state.status, state.reason, state.changed = status, reason, time.time()
        self._note(name, running, status)
        self._save(name, running)

    def _keep_way_back(self, name: str, state: RolloutState) -> None:
        """One rollback undoes the whole of a rollout, also where labels or rules were changed
        meanwhile, which stay.
        """
        default = state.default or self._models[name].default
        self._traffic.set_rollback_point(
            name, TrafficState(parse_traffic(state.before), default), state.began
        )

    def _set(
        self, name: str, running: _ActiveRollout, traffic: Traffic, *, checked: bool = True
    ) -> None:
        running.set = traffic
        with running:
            self._traffic.set_traffic(name, traffic, undoable=False, checked=checked)

    def _seen(self, name: str, state: RolloutState) -> StepObservation:
        versions = self._models[name].versions if name in self._models else {}
        new = versions.get(state.plan.version)
        failed = "it was unregistered" if new is None else _failure(new)
        return StepObservation(
            state.step,
            state.seconds,
            state.new,
            self._baseline(state),
            new is not None and new.ready,
            failed,
        )

    def _baseline(self, state: RolloutState) -> Counts:
        """What the new version is compared with: the old one at this step, if it had enough
        requests, else before.
        """
        return (
            state.old_now
            if state.share < 100 and state.old_now.requests >= state.plan.min_requests
            else state.old_last
        )

    def _read(self, name: str, running: _ActiveRollout) -> None:
        """Add what was counted since it was last looked at."""
        state, now = running.state, time.monotonic()
        state.seconds += now - running.looked
        running.looked = now
        model = self._models.get(name)
        for number, before in running.seen.items():
            version = model.versions.get(number) if model else None
            if (
                version is not None
                and running.versions.setdefault(number, version) is not version
                and number == state.plan.version
            ):
                running.versions[number] = (
                    version  # it was replaced: what the one before did is not its fault
                )
                running.seen[number], state.new, state.seconds = (
                    self._counts(name, number),
                    Counts(),
                    0.0,
                )
                continue
            counts = self._counts(name, number)
            running.seen[number] = counts
            if number == state.old:
                state.old_now = state.old_now.plus(counts.since(before))
            else:
                state.new = state.new.plus(counts.since(before))

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
        kept = self._state.load(name).get("rollout")
        try:
            return None if kept is None else RolloutState.model_validate(kept)
        except ValidationError as error:
            logger.warning("model %s: its saved rollout cannot be used: %s", name, error)
            return None

    def _save(self, name: str, running: _ActiveRollout) -> None:
        running.saved = time.monotonic()
        if name not in self._models:
            return  # all that was said of it is forgotten
        self._state.save(name, rollout=running.state.model_dump(mode="json"))

    def _note(self, name: str, running: _ActiveRollout, event: str) -> None:
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
                "new": numbers_of(state.new),
                "old": numbers_of(state.old_now),
            },
        )


class _ActiveRollout:
    """One that is under way. Within a `with`, the traffic is changed by the rollout itself."""

    set: Traffic

    def __init__(self, state: RolloutState) -> None:
        self.state = state
        self.versions: dict[str, ModelVersion] = {}  # that were counted
        self.seen: dict[
            str, Counts
        ] = {}  # by version: all that its counters had when they were last read
        self.looked = self.saved = time.monotonic()
        self.own = False
        self.timer: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def __enter__(self) -> None:
        self.own = True

    def __exit__(self, *_: object) -> None:
        self.own = False


def numbers_of(counts: Counts) -> dict[str, Any]:
    """As people and programs read it."""
    p50, p99 = (quantile(counts.latencies, q) for q in (0.5, 0.99))
    return {
        "requests": counts.requests,
        "errors": counts.errors,
        "error_rate": round(counts.error_rate, 6),
        "p50_ms": None if p50 is None else round(1000 * p50, 3),
        "p99_ms": None if p99 is None else round(1000 * p99, 3),
    }


def _failure(version: ModelVersion) -> str:
    """Why none of its workers will ever serve again, if so."""
    workers = version.workers
    if not workers:
        return "" if version.asleep else "it has no workers"
    if all(worker.state is WorkerState.FAILED for worker in workers):
        return (
            "its workers failed:"
            f" {(version.last_error or 'no reason is known').strip().splitlines()[-1]}"
        )
    return ""
