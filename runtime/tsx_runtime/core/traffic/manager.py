"""The traffic policies, labels and default versions of all models, and their previous state for a
rollback.

A change is kept across restarts (`state.py`), and so is what `rollback` undoes. What `tsx.toml`
says of a model holds until the management API changes it, and again once the file itself has
changed since.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tsx_runtime.core.models.model import Model, ModelVersion
from tsx_runtime.core.persistence import StateStore
from tsx_runtime.core.scheduling.job import Headers, Route
from tsx_runtime.core.traffic.routing import choose, make_table, resolve_label, unknown_versions
from tsx_runtime.core.traffic.splitter import Observer, Splitter
from tsx_runtime.errors import BadRequest, Conflict, ModelNotFound, ModelVersionNotFound
from tsx_runtime.settings.traffic_policy import NOTHING, Traffic, parse_traffic
from tsx_runtime.shared.suggestions import suggestion, suggestion_among_many

MOST_UNDONE = 100  # changes of a model that can be undone

logger = logging.getLogger("tsx.registry")


class TrafficState(NamedTuple):
    """The state that a rollback restores."""

    traffic: Traffic
    default: str

    def as_json(self) -> dict[str, Any]:
        return {"traffic": self.traffic.as_json(), "default": self.default}

    def renamed(self, old: str, new: str) -> TrafficState:
        return TrafficState(
            self.traffic.renamed(old, new), new if self.default == old else self.default
        )


class UndoPoint(NamedTuple):
    """The state before a change."""

    state: TrafficState
    at: float  # seconds since 1970 of the change
    rollout: float | None = None  # the start of the rollout that made it

    def as_json(self) -> dict[str, Any]:
        return {
            **self.state.as_json(),
            "at": self.at,
            **({} if self.rollout is None else {"rollout": self.rollout}),
        }

    @classmethod
    def from_json(cls, saved: Any) -> UndoPoint:
        """Raises ValueError, TypeError, KeyError."""
        state = TrafficState(parse_traffic(saved["traffic"]), str(saved["default"]))
        return cls(
            state,
            float(saved["at"]),
            None if saved.get("rollout") is None else float(saved["rollout"]),
        )


class TrafficManager:
    """Sets `Model.default` and `Model.labels`; nothing else does once a model is registered."""

    def __init__(
        self,
        models: Mapping[str, Model],
        configured: Mapping[str, Traffic],
        state: StateStore,
        tell: Callable[[], None],
        notify_managed: Callable[[], None],
    ) -> None:
        """`tell` is called when requests may go elsewhere than before; it calls `refresh`.

        `notify_managed` is called when the default
        version was changed on request. `configured` is what the settings say.
        """
        self.checks: list[
            Callable[[Model, Traffic, Traffic], None]
        ] = []  # each raises for what a model cannot have, beside what it has
        self.on_traffic: list[
            Callable[[str], None]
        ] = []  # called with a model's name when its traffic was set, or it came or went
        self.models = models
        self._configured = configured
        self._state = state
        self._tell = tell
        self._notify_managed = notify_managed
        self._traffic: dict[str, Traffic] = {}
        self._undo: dict[str, list[UndoPoint]] = {}  # the newest last
        self._observers: dict[str, list[Observer]] = {}
        self._splitters: dict[
            str, Splitter
        ] = {}  # of models whose requests are not all the default version's

    def find(self, name: str, version: str | None = None) -> ModelVersion:
        """`version` may be a label. Raises ModelNotFound, ModelVersionNotFound."""
        model = self._model(name)
        return choose(name, model.versions, model.default, version, model.labels)

    def route(self, name: str, version: str | None = None, headers: Headers = ()) -> Route:
        """Where a request is submitted: to the version or the label that it names, else to the
        version that its model's traffic says.

        Raises as `find` does.
        """
        splitter = self._splitters.get(name)
        if splitter is None or version is not None:
            return self.find(name, version)
        return splitter.by_head(headers)

    def traffic(self, name: str) -> Traffic:
        """Its settings, also of a model that is not registered now."""
        return self._traffic.get(name, NOTHING)

    def now(self, name: str) -> TrafficState:
        """Raises ModelNotFound."""
        return TrafficState(self.traffic(name), self._model(name).default)

    def shares(self, name: str, state: TrafficState | None = None) -> dict[str, float]:
        """Of the requests that name no version and that no rule sends anywhere, by version, now or
        in that state. Raises ModelNotFound.
        """
        model = self._model(name)
        if state is None:
            splitter = self._splitters.get(name)
            return {model.default: 1.0} if splitter is None else splitter.table.shares()
        (traffic, default), versions = state, model.versions
        return make_table(
            name,
            traffic,
            versions,
            [number for number, each in versions.items() if each.ready],
            default,
        ).shares()

    def check_traffic(self, name: str, traffic: Traffic, *, force: bool) -> None:
        """What `set_traffic` refuses, and without `force` also versions that are not registered and
        were not missing before.

        Raises ModelNotFound, BadRequest, Conflict.
        """
        model, said = self._model(name), self.traffic(name)
        _check(model, traffic, said)
        for check in self.checks:
            check(model, traffic, said)
        unknown = sorted(
            unknown_versions(traffic, model.versions) - unknown_versions(said, model.versions)
        )
        if unknown and not force:
            hint = (
                suggestion(unknown[0], [*model.versions, *traffic.labels])
                or f"; it has {', '.join(sorted(model.versions))}."
            )
            how = (
                "Register it first, or set force=true (--force) to name it before it is registered."
            )
            raise BadRequest(f"Model {name} has no version or label {unknown[0]}{hint} {how}")

    def set_traffic(
        self, name: str, traffic: Traffic, *, undoable: bool = True, checked: bool = True
    ) -> None:
        """From the next request on.

        Not `undoable`: `rollback` goes to what was before, as if this had not been.
        Not `checked`: it was held before, and going back to it must not fail.

        Raises ModelNotFound, BadRequest, Conflict.
        """
        model = self._model(name)
        if checked:
            self.check_traffic(name, traffic, force=True)
        self._change(model, TrafficState(traffic, model.default), undoable=undoable)

    def set_default(self, name: str, version: str, *, undoable: bool = True) -> None:
        """`version` may be a label. Raises ModelNotFound, ModelVersionNotFound."""
        model = self._model(name)
        number = resolve_label(version, model.versions, model.labels)
        if number not in model.versions:
            raise ModelVersionNotFound(f"Model version {version} does not exist for model {name}")
        self._change(model, TrafficState(self.traffic(name), number), undoable=undoable)
        self._notify_managed()

    def start_with(self, name: str, default: str, *, explicit: bool) -> None:
        """The default version at the start of the server: what was set before it was restarted,
        unless the configuration names one.
        """
        model, saved = self._model(name), self._state.load(name).get("default")
        model.default = saved if saved in model.versions and not explicit else default
        self._tell()

    def undo_points(self, name: str) -> list[UndoPoint]:
        """The newest last, which is what `rollback` goes to. Raises ModelNotFound."""
        points, now = self._undo.get(name, []), self.now(name)
        last = next(
            (place for place in reversed(range(len(points))) if points[place].state != now), -1
        )
        return points[: last + 1]

    def rollback(self, name: str, *, dry_run: bool = False) -> UndoPoint:
        """Undo the last change of its traffic, its labels or its default version; the next call
        undoes the one before. Returns what it went to, or with `dry_run` would.

        Raises ModelNotFound, Conflict.
        """
        model, points = self._model(name), self.undo_points(name)
        if not points:
            raise Conflict(
                "There is no change to undo in the traffic, the labels and the default version of"
                f" model {name}."
            )
        before = points.pop()
        if before.state.default not in model.versions:
            why = (
                f"version {before.state.default}, its previous default, is no longer registered."
                " Register it first."
            )
            raise Conflict(f"Model {name} cannot be rolled back: {why}")
        if not dry_run:
            self._undo[name] = points
            self._change(model, before.state, undoable=False)
            self._notify_managed()
        return before

    def set_rollback_point(self, name: str, before: TrafficState, rollout: float) -> None:
        """Have one `rollback` undo all that was changed since that rollout began.

        Raises ModelNotFound.
        """
        points = self._undo.get(name, [])
        began = next(
            (place for place, point in enumerate(points) if point.rollout == rollout), len(points)
        )
        self._undo[name] = [*points[:began], UndoPoint(before, rollout, rollout)]
        self._keep(name, self.now(name), default=False)

    def observe(self, name: str, observer: Observer) -> None:
        """Have it see requests that name no version, whether or not the model is registered now."""
        self._observers.setdefault(name, []).append(observer)
        self._tell()

    def unobserve(self, name: str, observer: Observer) -> None:
        observers = self._observers.get(name, [])
        if observer in observers:
            observers.remove(observer)
        if not observers:
            self._observers.pop(name, None)
        self._tell()

    # What the registry calls

    def begin(self, name: str) -> None:
        """A model of that name is about to be there."""
        if name in self._traffic:
            return
        configured, saved = self._configured.get(name, NOTHING), self._state.load(name)
        self._traffic[name] = configured
        if "traffic" not in saved:
            return
        if saved.get("digest") != configured.digest():
            text = (
                "model %s: the traffic that was set while the server ran is ignored, because the"
                " configuration has changed since then"
            )
            logger.warning(text, name)
            self._state.save(name, traffic=None, undo=None, digest=None)
            return
        try:
            self._traffic[name] = parse_traffic(saved["traffic"])
            self._undo[name] = [UndoPoint.from_json(point) for point in saved.get("undo", [])]
        except (ValueError, TypeError, KeyError) as error:
            logger.warning("model %s: its saved traffic policy cannot be used: %s", name, error)

    def on_version_added(self, version: ModelVersion) -> None:
        """It is among its model's versions."""
        if version.version in self.traffic(version.name).labels:
            text = (
                "model %s: version %s has the name of a label; the label has no effect while that"
                " version is registered"
            )
            logger.warning(text, version.name, version.version)
        self._tell_traffic(version.name)

    def on_version_removed(self, version: ModelVersion) -> None:
        self._tell_traffic(version.name)

    def on_version_replaced(self, model: Model, old: str, new: str) -> None:
        """Another version has taken the place of one: whatever named that names it now."""
        if old == new:
            return
        name, traffic = model.name, self.traffic(model.name)
        now = self.now(name).renamed(old, new)
        self._undo[name] = [
            point._replace(state=point.state.renamed(old, new))
            for point in self._undo.get(name, [])
        ]
        self._traffic[name], model.default = now
        chosen = self._state.load(name).get("default") == old
        if now.traffic != traffic or chosen:
            self._keep(name, now, default=chosen)

    def forget(self, name: str) -> None:
        """The model was removed for good, with its settings."""
        self._traffic.pop(name, None)
        self._undo.pop(name, None)
        self._state.forget(name)

    def refresh(self) -> bool:
        """Rebuild the tables. Whether requests may go elsewhere than before."""
        for name in self._splitters.keys() - self.models:
            del self._splitters[name]
        changed = [model for model in self.models.values() if self._refresh(model)]
        return bool(changed)

    def _refresh(self, model: Model) -> bool:
        name, versions = model.name, model.versions
        splitter = self._splitters.get(name)
        traffic, observers = self.traffic(name), self._observers.get(name)
        model.labels = traffic.labels
        if not traffic.splits and not observers:
            return self._splitters.pop(name, None) is not None
        table = make_table(
            name,
            traffic,
            versions,
            [number for number, version in versions.items() if version.ready],
            model.default,
        )
        if splitter is None:
            splitter = self._splitters[name] = Splitter(name)
        elif splitter.table == table and splitter.versions == versions:
            splitter.observers = observers or []
            return False
        splitter.observers = observers or []
        splitter.set(table, versions)
        return True

    def _change(self, model: Model, new: TrafficState, *, undoable: bool = True) -> None:
        name, old = model.name, self.now(model.name)
        if undoable and new != old:
            self._undo[name] = [*self._undo.get(name, []), UndoPoint(old, time.time())][
                -MOST_UNDONE:
            ]
        self._traffic[name] = new.traffic
        model.default = new.default
        self._keep(name, new, default=new.default != old.default)
        self._tell()
        self._tell_traffic(name)

    def _keep(self, name: str, now: TrafficState, *, default: bool) -> None:
        """Save the traffic, and the default version only if it was chosen.

        At the next start, the one that was chosen before may be there again.
        """
        saved = self._state.load(name)
        self._state.save(
            name,
            traffic=now.traffic.as_json(),
            digest=self._configured.get(name, NOTHING).digest(),
            default=now.default if default else saved.get("default"),
            undo=[point.as_json() for point in self._undo.get(name, [])] or None,
        )

    def _tell_traffic(self, name: str) -> None:
        for listener in self.on_traffic:
            listener(name)

    def _model(self, name: str) -> Model:
        model = self.models.get(name)
        if model is None:
            raise ModelNotFound(
                f"Model not found: {name}{suggestion_among_many(name, self.models)}"
            )
        return model


def _check(model: Model, traffic: Traffic, said: Traffic) -> None:
    """What was `said` before stays possible: a way back must not fail for it.

    Raises BadRequest, Conflict.
    """
    workflow = next(
        (version.workflow for version in model.versions.values() if version.workflow), ""
    )
    if workflow and traffic != NOTHING:
        raise Conflict(
            f"Model {model.name} is a node of workflow {workflow}, which calls it directly: its"
            " traffic cannot be split."
        )
    for label in traffic.labels:
        if label in model.versions and label not in said.labels:
            raise BadRequest(
                f"'{label}' cannot be a label of model {model.name}: it is one of its versions."
            )
