"""The traffic policies, labels and default versions of all models, and their former states.

Changes, and what `rollback` needs to undo them, are saved for the next start of the server
(`core/persistence.py`). Traffic in `tsx.toml` applies until the management API changes it. If the
file changes, it applies again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tsx_runtime.core.models.model import Model, ModelVersion
from tsx_runtime.core.persistence import StateStore
from tsx_runtime.core.scheduling.job import Headers, Route
from tsx_runtime.core.traffic.routing import (
    choose_version,
    make_table,
    resolve_label,
    unknown_versions,
)
from tsx_runtime.core.traffic.splitter import Observer, Splitter
from tsx_runtime.errors import BadRequest, Conflict, ModelNotFound, ModelVersionNotFound
from tsx_runtime.settings.traffic_policy import NOTHING, Traffic, parse_traffic
from tsx_runtime.shared.suggestions import suggestion, suggestion_among_many

MAX_UNDO_POINTS = 100  # changes per model that can be undone

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
    at: float  # time of the change, in seconds since 1970
    rollout: float | None = None  # start of the rollout that made the change

    def as_json(self) -> dict[str, Any]:
        return {
            **self.state.as_json(),
            "at": self.at,
            **({} if self.rollout is None else {"rollout": self.rollout}),
        }

    @classmethod
    def from_json(cls, saved: Any) -> UndoPoint:
        """Read a saved point.

        Raises:
            ValueError: The traffic is invalid. (Another structure raises TypeError or KeyError.)
        """
        state = TrafficState(parse_traffic(saved["traffic"]), str(saved["default"]))
        return cls(
            state,
            float(saved["at"]),
            None if saved.get("rollout") is None else float(saved["rollout"]),
        )


class TrafficManager:
    """Sets `Model.default` and `Model.labels` of registered models; nothing else does."""

    def __init__(
        self,
        models: Mapping[str, Model],
        configured: Mapping[str, Traffic],
        state: StateStore,
        notify: Callable[[], None],
        notify_managed: Callable[[], None],
    ) -> None:
        """Route the requests of `models` by their configured or their saved traffic.

        Args:
            models: The registered models by name.
            configured: The traffic in the settings.
            state: The saved state.
            notify: Called when requests may take another route than before; it calls `refresh`.
            notify_managed: Called when a client has changed the default version.
        """
        # Each check gets a model with its new and its current traffic, and raises an error against
        # the new one.
        self.checks: list[Callable[[Model, Traffic, Traffic], None]] = []
        # Called with a model's name when its traffic was set, or a version was added or removed.
        self.on_traffic: list[Callable[[str], None]] = []
        self.models = models
        self._configured = configured
        self._state = state
        self._notify = notify
        self._notify_managed = notify_managed
        self._traffic: dict[str, Traffic] = {}
        self._undo: dict[str, list[UndoPoint]] = {}  # the newest last
        self._observers: dict[str, list[Observer]] = {}
        # The splitters of models whose requests do not all go to the default version.
        self._splitters: dict[str, Splitter] = {}

    def find(self, name: str, version: str | None = None) -> ModelVersion:
        """Return a version of a model.

        Args:
            name: The name of the model.
            version: A version or a label. None is the default version.

        Raises:
            ModelNotFound: No model has this name.
            ModelVersionNotFound: The model has no such version.
        """
        model = self._model(name)
        return choose_version(name, model.versions, model.default, version, model.labels)

    def route(self, name: str, version: str | None = None, headers: Headers = ()) -> Route:
        """Return the route of a request: the requested version, or else the traffic's choice.

        It raises the errors of `find`.
        """
        splitter = self._splitters.get(name)
        if splitter is None or version is not None:
            return self.find(name, version)
        return splitter.route_for_headers(headers)

    def traffic(self, name: str) -> Traffic:
        """Return the traffic of a model, which need not be registered."""
        return self._traffic.get(name, NOTHING)

    def current_state(self, name: str) -> TrafficState:
        """Return the state that a rollback to this moment would restore.

        Raises:
            ModelNotFound: No model has this name.
        """
        return TrafficState(self.traffic(name), self._model(name).default)

    def shares(self, name: str, state: TrafficState | None = None) -> dict[str, float]:
        """Return how requests without a version or a matching rule are divided, by version.

        Args:
            name: The name of the model.
            state: The state to use instead of the current one.

        Raises:
            ModelNotFound: No model has this name.
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
            [number for number, model_version in versions.items() if model_version.ready],
            default,
        ).shares()

    def check_traffic(self, name: str, traffic: Traffic, *, force: bool) -> None:
        """Check that `set_traffic` accepts a traffic.

        Without `force`, it may name an unregistered version only if the current traffic does, too.

        Raises:
            ModelNotFound: No model has this name.
            BadRequest: The traffic is invalid for this model.
            Conflict: Something else forbids the traffic now.
        """
        model, current = self._model(name), self.traffic(name)
        _check(model, traffic, current)
        for check in self.checks:
            check(model, traffic, current)
        unknown = sorted(
            unknown_versions(traffic, model.versions) - unknown_versions(current, model.versions)
        )
        if unknown and not force:
            hint = (
                suggestion(unknown[0], [*model.versions, *traffic.labels])
                or f"; it has {', '.join(sorted(model.versions))}."
            )
            advice = (
                "Register it first, or set force=true (--force) to name it before it is registered."
            )
            raise BadRequest(f"Model {name} has no version or label {unknown[0]}{hint} {advice}")

    def set_traffic(
        self, name: str, traffic: Traffic, *, undoable: bool = True, checked: bool = True
    ) -> None:
        """Set the traffic of a model from the next request on.

        Args:
            name: The name of the model.
            traffic: The new traffic.
            undoable: Whether `rollback` can undo this change. If not, it skips the change.
            checked: Whether to check the traffic. A return to a former traffic must not fail.

        Raises:
            ModelNotFound: No model has this name.
            BadRequest: The traffic is invalid for this model.
            Conflict: Something else forbids the traffic now.
        """
        model = self._model(name)
        if checked:
            self.check_traffic(name, traffic, force=True)
        self._change(model, TrafficState(traffic, model.default), undoable=undoable)

    def set_default(self, name: str, version: str, *, undoable: bool = True) -> None:
        """Set the default version of a model; `version` may be a label.

        Raises:
            ModelNotFound: No model has this name.
            ModelVersionNotFound: The model has no such version.
        """
        model = self._model(name)
        number = resolve_label(version, model.versions, model.labels)
        if number not in model.versions:
            raise ModelVersionNotFound(f"Model version {version} does not exist for model {name}")
        self._change(model, TrafficState(self.traffic(name), number), undoable=undoable)
        self._notify_managed()

    def set_initial_default(self, name: str, default: str, *, explicit: bool) -> None:
        """Set the default version when the server starts.

        The version that was set before a restart takes precedence, unless `default` is `explicit`.
        """
        model, saved = self._model(name), self._state.load(name).get("default")
        model.default = saved if saved in model.versions and not explicit else default
        self._notify()

    def undo_points(self, name: str) -> list[UndoPoint]:
        """Return the states that `rollback` can restore, the newest last.

        Raises:
            ModelNotFound: No model has this name.
        """
        points, current = self._undo.get(name, []), self.current_state(name)
        last = next(
            (index for index in reversed(range(len(points))) if points[index].state != current), -1
        )
        return points[: last + 1]

    def rollback(self, name: str, *, dry_run: bool = False) -> UndoPoint:
        """Undo the last change of traffic, labels or default version.

        Each call undoes one more change.

        Returns:
            The restored state; with `dry_run`, the state that would be restored.

        Raises:
            ModelNotFound: No model has this name.
            Conflict: No change can be undone.
        """
        model, points = self._model(name), self.undo_points(name)
        if not points:
            raise Conflict(
                "There is no change to undo in the traffic, the labels and the default version of"
                f" model {name}."
            )
        undo_point = points.pop()
        if undo_point.state.default not in model.versions:
            problem = (
                f"version {undo_point.state.default}, its previous default, is no longer"
                " registered. Register it first."
            )
            raise Conflict(f"Model {name} cannot be rolled back: {problem}")
        if not dry_run:
            self._undo[name] = points
            self._change(model, undo_point.state, undoable=False)
            self._notify_managed()
        return undo_point

    def set_rollback_point(self, name: str, before: TrafficState, rollout: float) -> None:
        """Make one `rollback` undo all changes since a rollout began.

        Raises:
            ModelNotFound: No model has this name.
        """
        points = self._undo.get(name, [])
        first = next(
            (index for index, point in enumerate(points) if point.rollout == rollout), len(points)
        )
        self._undo[name] = [*points[:first], UndoPoint(before, rollout, rollout)]
        self._save(name, self.current_state(name), default=False)

    def observe(self, name: str, observer: Observer) -> None:
        """Show an observer the requests without a version; the model need not be registered yet."""
        self._observers.setdefault(name, []).append(observer)
        self._notify()

    def unobserve(self, name: str, observer: Observer) -> None:
        observers = self._observers.get(name, [])
        if observer in observers:
            observers.remove(observer)
        if not observers:
            self._observers.pop(name, None)
        self._notify()

    # The methods below are called by the registry.

    def load_settings(self, name: str) -> None:
        """Load the configured or saved traffic before a model of that name is registered."""
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
        """React to a version that was added to its model."""
        if version.version in self.traffic(version.name).labels:
            text = (
                "model %s: version %s has the name of a label; the label has no effect while that"
                " version is registered"
            )
            logger.warning(text, version.name, version.version)
        self._notify_traffic(version.name)

    def on_version_removed(self, version: ModelVersion) -> None:
        self._notify_traffic(version.name)

    def on_version_replaced(self, model: Model, old: str, new: str) -> None:
        """Replace a version's number by its successor's number in all settings."""
        if old == new:
            return
        name, traffic = model.name, self.traffic(model.name)
        renamed = self.current_state(name).renamed(old, new)
        self._undo[name] = [
            point._replace(state=point.state.renamed(old, new))
            for point in self._undo.get(name, [])
        ]
        self._traffic[name], model.default = renamed
        is_chosen = self._state.load(name).get("default") == old
        if renamed.traffic != traffic or is_chosen:
            self._save(name, renamed, default=is_chosen)

    def forget(self, name: str) -> None:
        """Remove the settings of a model that was removed for good."""
        self._traffic.pop(name, None)
        self._undo.pop(name, None)
        self._state.forget(name)

    def refresh(self) -> bool:
        """Rebuild the tables, and tell whether requests may take another route than before."""
        for name in self._splitters.keys() - self.models:
            del self._splitters[name]
        changed_models = [model for model in self.models.values() if self._refresh(model)]
        return bool(changed_models)

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
        name, old = model.name, self.current_state(model.name)
        if undoable and new != old:
            self._undo[name] = [*self._undo.get(name, []), UndoPoint(old, time.time())][
                -MAX_UNDO_POINTS:
            ]
        self._traffic[name] = new.traffic
        model.default = new.default
        self._save(name, new, default=new.default != old.default)
        self._notify()
        self._notify_traffic(name)

    def _save(self, name: str, state: TrafficState, *, default: bool) -> None:
        """Save the traffic, and the default version only if a client chose it.

        Otherwise the default is not saved, since another version may be registered at the next
        start.
        """
        saved = self._state.load(name)
        self._state.save(
            name,
            traffic=state.traffic.as_json(),
            digest=self._configured.get(name, NOTHING).digest(),
            default=state.default if default else saved.get("default"),
            undo=[point.as_json() for point in self._undo.get(name, [])] or None,
        )

    def _notify_traffic(self, name: str) -> None:
        for listener in self.on_traffic:
            listener(name)

    def _model(self, name: str) -> Model:
        model = self.models.get(name)
        if model is None:
            raise ModelNotFound(
                f"Model not found: {name}{suggestion_among_many(name, self.models)}"
            )
        return model


def _check(model: Model, traffic: Traffic, current: Traffic) -> None:
    """Check a traffic. Labels of the current one are not checked, so that a return cannot fail.

    Raises:
        BadRequest: A label has the name of a version.
        Conflict: A workflow calls the model directly.
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
        if label in model.versions and label not in current.labels:
            raise BadRequest(
                f"'{label}' cannot be a label of model {model.name}: it is one of its versions."
            )
