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
from tsx_cli.deploy.engine.resources import UNDER_WAY, Observed, Resource, digest
from tsx_cli.deploy.kubernetes.canary import (
    WINDOW_S,
    CanaryObservation,
    CanaryState,
    CanaryStep,
    Counters,
    find_exceeded_bounds,
    next_step,
    read_canary,
    read_counters,
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
    Cluster,
    KubernetesObject,
    apply,
    count_restarts,
    remove,
    selector,
    tags_in,
)
from tsx_cli.deploy.kubernetes.resources import HTTP, INSTANCE, METRICS, NAME

MANAGER = "tsx-canary"  # field manager of the annotation with the canary's state
# The objects of a canary, in the order of their removal.
CANARY_KINDS = ("Deployment", "PodDisruptionBudget", "NetworkPolicy", "ServiceMonitor", "Service")
LOG_LINES = "20"  # number of last log lines that are kept from a canary that ends
METRICS_INTERVAL_S = 10.0
# A canary ends if its metrics cannot be read, or no Gateway accepts its weights, for this long.
MAX_BLOCKED_S = 300.0
NO_CANARY = "none"  # value of the property `Canary` if there is no canary


class CanaryWatch:
    """A watch over a canary, which decides the next step from its state and past metrics."""

    def __init__(self) -> None:
        self._readings: list[tuple[datetime, Mapping[str, Counters]]] = []
        self._blocked_since: datetime | None = None

    def step(
        self,
        version: str | None,
        shift: Shift | None,
        observed: CanaryObservation,
        fetch_counters: Callable[[], Mapping[str, Counters]],
        find_failures: Callable[[], dict[str, str]] = dict,
    ) -> CanaryStep:
        """Return the next step.

        Args:
            version: The version that the stable Deployment does not have yet, if any.
            shift: The wanted canary, if any.
            observed: The state of the canary's objects.
            fetch_counters: Reads the counters of the replicas by their names, or raises CliError.
            find_failures: Returns reasons to end the canary at once.
        """
        canary, alarm_reasons, metrics_error = observed.canary, dict[str, str](), ""
        if (
            shift is not None
            and canary is not None
            and canary.since
            and not canary.ended
            and canary.version == version
        ):
            try:
                alarm_reasons = find_failures() or self._check_bounds(canary, shift, fetch_counters)
            except CliError as error:
                # The canary keeps its requests until the metrics can be read again.
                metrics_error = f"the canary's metrics cannot be read: {error.message}"
        time = now()
        step = next_step(version, shift, observed, alarm_reasons, time)
        if metrics_error and step.action != "end":
            step = CanaryStep("wait", metrics_error)
        is_blocked = bool(metrics_error) or (
            observed.route[0] != "ready" and version is not None and not observed.is_ending
        )
        self._blocked_since = (
            (self._blocked_since or time) if step.action == "wait" and is_blocked else None
        )
        if (
            self._blocked_since is not None
            and (time - self._blocked_since).total_seconds() > MAX_BLOCKED_S
        ):
            step = CanaryStep("end", step.text)
        if step.action == "start":
            self._readings = []
        return step

    def _check_bounds(
        self,
        canary: CanaryState,
        shift: Shift,
        fetch_counters: Callable[[], Mapping[str, Counters]],
    ) -> dict[str, str]:
        """Return the bounds exceeded in the last minute, or since the canary began."""
        time, since = now(), datetime.fromisoformat(canary.since)
        is_bake_over = (time - since).total_seconds() >= shift.bake
        if (
            self._readings
            and (time - self._readings[-1][0]).total_seconds() < METRICS_INTERVAL_S
            and not is_bake_over
        ):
            return {}
        counters = fetch_counters()
        earlier = [
            reading for reading in self._readings if (time - reading[0]).total_seconds() >= WINDOW_S
        ]
        window_start, old_counters = earlier[-1] if earlier else (since, {})
        self._readings = [
            *earlier[-1:],
            *(reading for reading in self._readings if reading not in earlier),
            (time, counters),
        ]
        bounds = [bound for text in shift.alarms if (bound := parse_bound(text)) is not None]
        return find_exceeded_bounds(
            bounds, old_counters, counters, (time - window_start).total_seconds()
        )


class LiveCanary(NamedTuple):
    """A running canary."""

    state: CanaryState
    deployment: Mapping[str, Any]  # Deployment of the canary
    percent: float  # current percentage of the requests

    def is_promoted(self, stable: Mapping[str, Any]) -> bool:
        """Tell whether the stable Deployment has the canary's version, even if old pods remain."""
        canary_template, stable_template = (
            manifest["spec"]["template"]
            for manifest in (with_instance(self.deployment, stable["metadata"]["name"]), stable)
        )
        return (canary_template["spec"], tags_in(canary_template)) == (
            stable_template["spec"],
            tags_in(stable_template),
        )


class Release(KubernetesObject):
    """A Deployment that may have a canary.

    The property `Canary` is the canary's percentage of the requests, and `Beside` contains the
    canary's objects.
    """

    traits = replace(
        KubernetesObject.traits, unreported=frozenset({"apiVersion", "kind", "Beside"})
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
            return replace(observed, properties={**observed.properties, "Canary": NO_CANARY})
        state = canary.state
        since = f" since {state.since}" if state.since else ""
        canary_text = f"{state.percent:g} %{since}{', which goes back' if state.ended else ''}"
        observed_canary = replace(
            observed,
            properties={**observed.properties, "Canary": canary_text},
            outputs={**observed.outputs, UNDER_WAY: state},
        )
        # The canary is watched even if the stable Deployment scales or has failed.
        return (
            observed_canary
            if canary.is_promoted(observed.properties)
            else replace(observed_canary, state="ready", reason="")
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
        has_changed = bool(differences(old.get("template"), new.get("template", {}), {}, set()))
        if canary is None and not (has_changed and shift is not None):
            # A resource without a spec only ends the canary, which has ended since the plan.
            if "spec" in resource.properties:
                super().update(cloud, _without_canary(resource), observed, changed)
            return None
        version = digest(resource.properties["spec"]["template"], 16) if has_changed else None
        canary_observation = _observe_canary(cloud, resource.name, canary)
        step = self._watch.step(
            version,
            shift,
            canary_observation,
            lambda: _fetch_counters(cloud, resource.name),
            find_failures=lambda: _find_restarts(cloud, resource.name),
        )
        self._take_step(cloud, resource, observed, canary, version, step)
        # The plan may change more than the canary, for instance the number of pods.
        if step.action == "remove" and changed - {"Canary"}:
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
            _set_percent(cloud, name, float(resource.change_settings["percent"]))
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
            self._log = cloud.program.run_unchecked(
                "logs", "--namespace", cloud.namespace, *arguments
            ).stdout.strip()
            _set_annotation(cloud, name, replace(canary, ended=step.text))
        elif step.action == "move":
            super().update(cloud, _without_canary(resource), observed, set())
        elif step.action == "unroute":
            _set_percent(cloud, name, 0)
        elif step.action == "remove":
            self._remove(cloud, name, canary)

    def _remove(self, cloud: Cluster, name: str, canary: CanaryState | None) -> None:
        """Remove the objects of a canary.

        Raises:
            CloudError: The canary has ended without success.
        """
        # The annotation is removed first, so that the next run removes the rest if this one stops.
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
    """Return the route of a deployment.

    The result is None if there is no route, or if the cluster has no Gateway API.
    """
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

    Routes are read only if the canary has a Deployment. A cluster without a Gateway may lack the
    API, or the permission to read routes.
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


def with_canary_percent(cloud: Cluster, manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a route with the canary's current percentage, which is 0 without its Deployment."""
    name = manifest["metadata"]["name"]
    canary = canary_in(cloud, name)
    rules = [{"backendRefs": backends(name, HTTP, 0.0 if canary is None else canary.percent)}]
    return {**manifest, "spec": {**manifest["spec"], "rules": rules}}


class WeightedRoute(KubernetesObject):
    """A route whose weights follow the canary."""

    def __init__(self) -> None:
        super().__init__("HTTPRoute")

    def create(self, cloud: Cluster, resource: Resource) -> None:
        """Apply the route with its current percentage: the canary may have ended meanwhile."""
        super().create(
            cloud, replace(resource, properties=with_canary_percent(cloud, resource.properties))
        )


def now() -> datetime:
    return datetime.now(timezone.utc)


def _without_canary(resource: Resource) -> Resource:
    """Return a Deployment without the properties of the canary."""
    properties = {
        key: value for key, value in resource.properties.items() if key not in ("Canary", "Beside")
    }
    return replace(resource, properties=properties)


def _observe_canary(cloud: Cluster, name: str, canary: CanaryState | None) -> CanaryObservation:
    pods = KubernetesObject("Deployment").observe(cloud, canary_of(name))
    route = KubernetesObject("HTTPRoute").observe(cloud, name)
    return CanaryObservation(
        canary,
        ("changing", "is not visible yet") if pods is None else (pods.state, pods.reason),
        0.0 if route is None else canary_percent(route.properties, name),
        ("ready", "") if route is None else (route.state, route.reason),
    )


def _set_percent(cloud: Cluster, name: str, percent: float) -> None:
    route = route_of(cloud, name)
    if route is None:
        raise CloudError(
            f"{cloud.region} has no HTTPRoute {name} any more, which divides the requests; run the"
            " same command again"
        )
    apply(cloud, with_weights(route, name, HTTP, percent))


def _set_annotation(cloud: Cluster, name: str, canary: CanaryState | None) -> None:
    annotations = {} if canary is None else {"annotations": {ANNOTATION: canary.text}}
    manifest = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": name, **annotations},
    }
    apply(cloud, manifest, MANAGER, "--validate=false")


def _find_restarts(cloud: Cluster, name: str) -> dict[str, str]:
    count = count_restarts(cloud.list_objects("pods", name, {INSTANCE: canary_of(name)}))
    return {"restarts>0": f"{count} of its containers"} if count else {}


def _fetch_counters(cloud: Cluster, name: str) -> dict[str, Counters]:
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
        with cloud.forward_port(f"pod/{pod}", METRICS) as address:
            text = (
                Server(address, token, role="management", timeout=METRICS_INTERVAL_S)
                .call("GET", "/metrics")
                .body()
                .decode(errors="replace")
            )
        counters[pod] = read_counters(text)
    return counters
