"""A Deployment that is updated with a canary, by the steps of `canary.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, NamedTuple

from tsx_cli.common.client import Server
from tsx_cli.common.failure import CliError
from tsx_cli.deploy.aws.alarms import parse_bound
from tsx_cli.deploy.engine.canary import Shift
from tsx_cli.deploy.engine.kind import CloudError
from tsx_cli.deploy.engine.plan import differences
from tsx_cli.deploy.engine.resources import UNDER_WAY, Observed, Resource, Traits, digest
from tsx_cli.deploy.kubernetes.canary import (
    WINDOW_S,
    CanaryState,
    CanaryStep,
    Counters,
    Surroundings,
    next_step,
    read_canary,
    read_counters,
    went_off,
)
from tsx_cli.deploy.kubernetes.gateway import (
    ANNOTATION,
    backends,
    canary_of,
    canary_percent,
    with_weights,
)
from tsx_cli.deploy.kubernetes.kinds import (
    TYPES,
    WHEN_INTERRUPTED,
    Cluster,
    KubernetesObject,
    apply,
    remove,
    restarts,
    selector,
    tags_in,
)
from tsx_cli.deploy.kubernetes.resources import HTTP, INSTANCE, METRICS, NAME

MANAGER = "tsx-canary"  # field manager of the annotation with the canary's state
# The objects of a canary, in the order of their removal.
CANARY_KINDS = ("Deployment", "PodDisruptionBudget", "NetworkPolicy", "ServiceMonitor", "Service")
LOG_LINES = "20"  # last lines of a canary that ends
METRICS_INTERVAL_S = 10.0
# A canary ends if its metrics cannot be read, or no Gateway accepts its share, for so long.
MAX_BLOCKED_S = 300.0
NONE = "none"  # value of the property `Canary` without a canary


class CanaryWatch:
    """Decides the next step of a canary from its current state and the history of its metrics."""

    def __init__(self) -> None:
        self._readings: list[tuple[datetime, Mapping[str, Counters]]] = []
        self._blocked_since: datetime | None = None

    def step(
        self,
        version: str | None,
        shift: Shift | None,
        seen: Surroundings,
        counters: Callable[[], Mapping[str, Counters]],
        broken: Callable[[], dict[str, str]] = dict,
    ) -> CanaryStep:
        """Return the next step.

        Args:
            version: The version that the stable Deployment does not have yet, if any.
            shift: The wanted canary, if any.
            seen: What the cluster shows.
            counters: Reads the counters of the replicas by their names, or raises CliError.
            broken: Returns reasons to end the canary at once.
        """
        canary, off, unread = seen.canary, dict[str, str](), ""
        if (
            shift is not None
            and canary is not None
            and canary.since
            and not canary.ended
            and canary.version == version
        ):
            try:
                off = broken() or self._check_bounds(canary, shift, counters)
            except CliError as error:  # the canary keeps its share until the metrics are back
                unread = f"the canary's metrics cannot be read: {error.message}"
        moment = now()
        step = next_step(version, shift, seen, off, moment)
        if unread and step.action != "end":
            step = CanaryStep("wait", unread)
        is_blocked = bool(unread) or (
            seen.route[0] != "ready" and version is not None and not seen.ends
        )
        self._blocked_since = (
            (self._blocked_since or moment) if step.action == "wait" and is_blocked else None
        )
        if (
            self._blocked_since is not None
            and (moment - self._blocked_since).total_seconds() > MAX_BLOCKED_S
        ):
            step = CanaryStep("end", step.text)
        if step.action == "start":
            self._readings = []
        return step

    def _check_bounds(
        self, canary: CanaryState, shift: Shift, counters: Callable[[], Mapping[str, Counters]]
    ) -> dict[str, str]:
        """Return the bounds exceeded in the last minute, or since the canary began."""
        time, since = now(), datetime.fromisoformat(canary.since)
        is_over = (time - since).total_seconds() >= shift.bake
        if (
            self._readings
            and (time - self._readings[-1][0]).total_seconds() < METRICS_INTERVAL_S
            and not is_over
        ):
            return {}
        counted = counters()
        earlier = [
            reading for reading in self._readings if (time - reading[0]).total_seconds() >= WINDOW_S
        ]
        begin, before = earlier[-1] if earlier else (since, {})
        self._readings = [
            *earlier[-1:],
            *(reading for reading in self._readings if reading not in earlier),
            (time, counted),
        ]
        bounds = [bound for text in shift.alarms if (bound := parse_bound(text)) is not None]
        return went_off(bounds, before, counted, (time - begin).total_seconds())


class LiveCanary(NamedTuple):
    """A running canary."""

    state: CanaryState
    deployment: Mapping[str, Any]  # Deployment of the canary
    share: float  # its current percentage of the requests

    def is_promoted(self, stable: Mapping[str, Any]) -> bool:
        """Tell whether the stable Deployment has its version, even if pods are still old."""
        canary_template, stable_template = (
            manifest["spec"]["template"]
            for manifest in (with_instance(self.deployment, stable["metadata"]["name"]), stable)
        )
        return (canary_template["spec"], tags_in(canary_template)) == (
            stable_template["spec"],
            tags_in(stable_template),
        )


class Release(KubernetesObject):
    """A Deployment with a canary beside it.

    The property `Canary` is the share of the canary, and `Beside` holds its objects.
    """

    traits = Traits(
        is_tagged=False,
        unreported=frozenset({"apiVersion", "kind", "Beside"}),
        updates_failed=True,
        when_interrupted=WHEN_INTERRUPTED,
    )

    def __init__(self) -> None:
        super().__init__("Deployment")
        self._watch = CanaryWatch()
        self._log = ""

    def observe(self, cloud: Cluster, name: str) -> Observed | None:
        observed = super().observe(cloud, name)
        if observed is None:
            return None
        canary = canary_in(cloud, name)
        if canary is None:
            return replace(observed, properties={**observed.properties, "Canary": NONE})
        state = canary.state
        since = f" since {state.since}" if state.since else ""
        shown = f"{state.percent:g} %{since}{', which goes back' if state.ended else ''}"
        seen = replace(
            observed,
            properties={**observed.properties, "Canary": shown},
            outputs={**observed.outputs, UNDER_WAY: state},
        )
        # The canary is watched even if the stable Deployment scales or has failed.
        return (
            seen
            if canary.is_promoted(observed.properties)
            else replace(seen, state="ready", reason="")
        )

    def create(self, cloud: Cluster, resource: Resource) -> None:
        super().create(cloud, _without_canary(resource))

    def update(
        self, cloud: Cluster, resource: Resource, observed: Observed, changed: set[str]
    ) -> str | None:
        canary: CanaryState | None = observed.outputs.get(UNDER_WAY)
        shift = Shift(**resource.change_settings) if resource.change_settings else None
        old, new = (
            properties.get("spec", {}) for properties in (observed.properties, resource.properties)
        )
        changes = bool(differences(old.get("template"), new.get("template", {}), {}, set()))
        if canary is None and not (changes and shift is not None):
            # Without a spec, the canary was to end, and has already ended since the plan.
            if "spec" in resource.properties:
                super().update(cloud, _without_canary(resource), observed, changed)
            return None
        version = digest(resource.properties["spec"]["template"], 16) if changes else None
        seen = _surroundings(cloud, resource.name, canary)
        step = self._watch.step(
            version,
            shift,
            seen,
            lambda: _counters(cloud, resource.name),
            broken=lambda: _restarts(cloud, resource.name),
        )
        self._take_step(cloud, resource, observed, canary, version, step)
        if step.action == "remove" and changed - {"Canary"}:  # another number of pods, for instance
            super().update(cloud, _without_canary(resource), observed, changed)
        return step.text or "the canary is removed"

    def _take_step(
        self,
        cloud: Cluster,
        resource: Resource,
        observed: Observed,
        canary: CanaryState | None,
        version: str | None,
        step: CanaryStep,
    ) -> None:
        name = resource.name
        if step.action == "start":
            assert version is not None
            for manifest in resource.properties["Beside"]:
                apply(cloud, manifest)
            _set_annotation(
                cloud, name, CanaryState(version, float(resource.change_settings["percent"]))
            )
        elif step.action == "route":
            _route(cloud, name, float(resource.change_settings["percent"]))
        elif step.action == "bake":
            assert canary is not None
            _set_annotation(cloud, name, replace(canary, since=now().isoformat(timespec="seconds")))
        elif step.action == "end":
            assert canary is not None
            arguments = (
                "--selector",
                selector({NAME: name, INSTANCE: canary_of(name)}),
                "--prefix",
                "--tail",
                LOG_LINES,
            )
            self._log = cloud.program.try_(
                "logs", "--namespace", cloud.namespace, *arguments
            ).stdout.strip()
            _set_annotation(cloud, name, canary.ending(step.text))
        elif step.action == "move":
            super().update(cloud, _without_canary(resource), observed, set())
        elif step.action == "unroute":
            _route(cloud, name, 0)
        elif step.action == "remove":
            self._remove(cloud, name, canary)

    def _remove(self, cloud: Cluster, name: str, canary: CanaryState | None) -> None:
        """Remove the objects of a canary.

        Raises:
            CloudError: The canary has ended without success.
        """
        # The annotation goes first, so that the next run removes the rest if this one stops.
        _set_annotation(cloud, name, None)
        for kind in CANARY_KINDS:
            for manifest in cloud.list_objects(TYPES[kind], name, {INSTANCE: canary_of(name)}):
                remove(cloud, kind, manifest["metadata"]["name"])
        if canary is not None and canary.ended:
            log = f". The end of its log:\n{self._log}" if self._log else ""
            raise CloudError(
                f"the stable version of {name} has all requests again: {canary.ended}{log}"
            )


def route_of(cloud: Cluster, name: str) -> dict[str, Any] | None:
    """Return a route, or None if there is none or the cluster has no Gateway API."""
    return next(
        (
            route
            for route in cloud.list_objects(TYPES["HTTPRoute"], name)
            if route["metadata"]["name"] == name
        ),
        None,
    )


def canary_in(cloud: Cluster, name: str) -> LiveCanary | None:
    """Return the running canary of a deployment, if any.

    Routes are read only if the canary has a Deployment. Without a Gateway, neither the permission
    nor the API may exist.
    """
    deployment = cloud.get(
        TYPES["Deployment"], canary_of(name), doing=f"looking for a canary of {name}"
    )
    route = None if deployment is None else route_of(cloud, name)
    state = None if route is None else read_canary(route)
    if deployment is None or route is None or state is None:
        return None
    return LiveCanary(state, deployment, canary_percent(route, name))


def with_instance(value: Any, name: str) -> Any:
    """Replace the instance label everywhere in a manifest."""
    if isinstance(value, Mapping):
        return {
            key: name if key == INSTANCE else with_instance(item, name)
            for key, item in value.items()
        }
    return [with_instance(item, name) for item in value] if isinstance(value, list) else value


def with_share(cloud: Cluster, manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a route with the current share of a canary, which is 0 without its Deployment."""
    name = manifest["metadata"]["name"]
    canary = canary_in(cloud, name)
    rules = [{"backendRefs": backends(name, HTTP, 0.0 if canary is None else canary.share)}]
    return {**manifest, "spec": {**manifest["spec"], "rules": rules}}


class WeightedRoute(KubernetesObject):
    """A route whose weights follow the canary."""

    def __init__(self) -> None:
        super().__init__("HTTPRoute")

    def create(self, cloud: Cluster, resource: Resource) -> None:
        """Apply the route with the current share, because the canary may have ended meanwhile."""
        super().create(cloud, replace(resource, properties=with_share(cloud, resource.properties)))


def now() -> datetime:
    return datetime.now(timezone.utc)


def _without_canary(resource: Resource) -> Resource:
    """Return a Deployment without the properties of the canary."""
    properties = {
        key: value for key, value in resource.properties.items() if key not in ("Canary", "Beside")
    }
    return replace(resource, properties=properties)


def _surroundings(cloud: Cluster, name: str, canary: CanaryState | None) -> Surroundings:
    pods = KubernetesObject("Deployment").observe(cloud, canary_of(name))
    route = KubernetesObject("HTTPRoute").observe(cloud, name)
    return Surroundings(
        canary,
        ("changing", "is not visible yet") if pods is None else (pods.state, pods.reason),
        0.0 if route is None else canary_percent(route.properties, name),
        ("ready", "") if route is None else (route.state, route.reason),
    )


def _route(cloud: Cluster, name: str, percent: float) -> None:
    route = route_of(cloud, name)
    if route is None:
        raise CloudError(
            f"{cloud.region} has no HTTPRoute {name} any more, which divides the requests; run the"
            " same command again"
        )
    apply(cloud, with_weights(route, name, HTTP, percent))


def _set_annotation(cloud: Cluster, name: str, canary: CanaryState | None) -> None:
    notes = {} if canary is None else {"annotations": {ANNOTATION: canary.text}}
    manifest = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": name, **notes},
    }
    apply(cloud, manifest, MANAGER, "--validate=false")


def _restarts(cloud: Cluster, name: str) -> dict[str, str]:
    count = restarts(cloud.list_objects("pods", name, {INSTANCE: canary_of(name)}))
    return {"restarts>0": f"{count} of its containers"} if count else {}


def _counters(cloud: Cluster, name: str) -> dict[str, Counters]:
    pods = [
        pod["metadata"]["name"]
        for pod in cloud.list_objects("pods", name, {INSTANCE: canary_of(name)})
    ]
    deployment: Mapping[str, Any] | None = cloud.get(
        TYPES["Deployment"], canary_of(name), doing="looking for the canary"
    )
    if deployment is None or not pods:
        raise CloudError("it has no pods")
    token = cloud.token(deployment, "TSX_MANAGEMENT_TOKEN")
    counters = {}
    for pod in pods:
        with cloud.forwarded(f"pod/{pod}", METRICS) as address:
            text = (
                Server(address, token, role="management", timeout=METRICS_INTERVAL_S)
                .call("GET", "/metrics")
                .body()
                .decode(errors="replace")
            )
        counters[pod] = read_counters(text)
    return counters
