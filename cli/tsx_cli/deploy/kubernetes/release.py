"""A Deployment that is updated by way of a canary: carries out the steps of `canary.py`, and
watches the canary's pods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, NamedTuple

from tsx_cli.common.client import Server
from tsx_cli.common.failure import CliError
from tsx_cli.deploy.aws.alarms import read_bound
from tsx_cli.deploy.engine.canary import Shift
from tsx_cli.deploy.engine.kind import CloudError
from tsx_cli.deploy.engine.plan import differences
from tsx_cli.deploy.engine.resources import UNDER_WAY, Observed, Resource, Traits, digest
from tsx_cli.deploy.kubernetes.canary import (
    WINDOW,
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
    weighted,
)
from tsx_cli.deploy.kubernetes.kinds import (
    LEFT,
    TYPES,
    Cluster,
    KubernetesObject,
    apply,
    remove,
    restarts,
    selector,
    tags_in,
)
from tsx_cli.deploy.kubernetes.resources import HTTP, INSTANCE, METRICS, NAME

MANAGER = "tsx-canary"  # the owner of the annotation that says how far a canary is
OWN = (
    "Deployment",
    "PodDisruptionBudget",
    "NetworkPolicy",
    "ServiceMonitor",
    "Service",
)  # a canary's objects, as they are removed
LINES = "20"  # of the log of a canary that goes back
EVERY = 10.0  # seconds between two looks at the metrics
# seconds without metrics, or without a Gateway that takes its share, after which a canary goes back
STUCK = 300.0
NONE = "none"  # the property `Canary` where there is none


class CanaryWatch:
    """What to do next with a canary, from what is seen of it now and what its metrics have been."""

    def __init__(self) -> None:
        self._looks: list[tuple[datetime, Mapping[str, Counters]]] = []
        self._stuck: datetime | None = (
            None  # since when its metrics cannot be read, or no Gateway takes its share
        )

    def step(
        self,
        version: str | None,
        shift: Shift | None,
        seen: Surroundings,
        counters: Callable[[], Mapping[str, Counters]],
        broken: Callable[[], dict[str, str]] = dict,
    ) -> CanaryStep:
        """`counters` are those of its replicas by their names; they raise CliError where they
        cannot be read. `broken` ends it at once.
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
                off = broken() or self._look(canary, shift, counters)
            except (
                CliError
            ) as error:  # it has its share, and stays where it is until it can be seen again
                unread = f"the canary's metrics cannot be read: {error.message}"
        moment = now()
        step = next_step(version, shift, seen, off, moment)
        if unread and step.action != "end":
            step = CanaryStep("wait", unread)
        is_blocked = bool(unread) or (
            seen.route[0] != "ready" and version is not None and not seen.ends
        )
        self._stuck = (self._stuck or moment) if step.action == "wait" and is_blocked else None
        if self._stuck is not None and (moment - self._stuck).total_seconds() > STUCK:
            step = CanaryStep("end", step.text)
        if step.action == "start":
            self._looks = []
        return step

    def _look(
        self, canary: CanaryState, shift: Shift, counters: Callable[[], Mapping[str, Counters]]
    ) -> dict[str, str]:
        """What went off in the last minute, or since the canary began."""
        time, since = now(), datetime.fromisoformat(canary.since)
        is_over = (time - since).total_seconds() >= shift.bake
        if self._looks and (time - self._looks[-1][0]).total_seconds() < EVERY and not is_over:
            return {}
        counted = counters()
        earlier = [look for look in self._looks if (time - look[0]).total_seconds() >= WINDOW]
        begin, before = earlier[-1] if earlier else (since, {})
        self._looks = [
            *earlier[-1:],
            *(look for look in self._looks if look not in earlier),
            (time, counted),
        ]
        bounds = [bound for text in shift.alarms if (bound := read_bound(text)) is not None]
        return went_off(bounds, before, counted, (time - begin).total_seconds())


class LiveCanary(NamedTuple):
    """A canary that is under way."""

    state: CanaryState
    deployment: Mapping[str, Any]  # its own
    share: float  # percent of the requests that it gets now

    def is_promoted(self, stable: Mapping[str, Any]) -> bool:
        """Whether the stable Deployment has its version, though not all pods may be replaced
        yet.
        """
        own, other = (
            each["spec"]["template"]
            for each in (with_instance(self.deployment, stable["metadata"]["name"]), stable)
        )
        return (own["spec"], tags_in(own)) == (other["spec"], tags_in(other))


class Release(KubernetesObject):
    """Its property `Canary` is what a canary beside it has of the requests, and `Beside` the
    canary's objects.
    """

    traits = Traits(
        is_tagged=False,
        unseen=frozenset({"apiVersion", "kind", "Beside"}),
        updates_failed=True,
        when_interrupted=LEFT,
    )

    def __init__(self) -> None:
        super().__init__("Deployment")
        self._watch = CanaryWatch()
        self._log = ""

    def observe(self, cloud: Cluster, name: str) -> Observed | None:
        found = super().observe(cloud, name)
        if found is None:
            return None
        canary = canary_in(cloud, name)
        if canary is None:
            return replace(found, properties={**found.properties, "Canary": NONE})
        state = canary.state
        shown = (
            f"{state.percent:g}"
            f" %{f' since {state.since}' if state.since else ''}{', which goes back' if state.ended else ''}"
        )
        seen = replace(
            found,
            properties={**found.properties, "Canary": shown},
            outputs={**found.outputs, UNDER_WAY: state},
        )
        # A stable Deployment that scales, or has failed before, must not keep the canary from being
        # watched.
        return (
            seen
            if canary.is_promoted(found.properties)
            else replace(seen, state="ready", reason="")
        )

    def create(self, cloud: Cluster, resource: Resource) -> None:
        super().create(cloud, _alone(resource))

    def update(
        self, cloud: Cluster, resource: Resource, found: Observed, changed: set[str]
    ) -> str | None:
        canary: CanaryState | None = found.outputs.get(UNDER_WAY)
        shift = Shift(**resource.how) if resource.how else None
        old, new = (each.get("spec", {}) for each in (found.properties, resource.properties))
        changes = bool(differences(old.get("template"), new.get("template", {}), {}, set()))
        if canary is None and not (changes and shift is not None):
            if (
                "spec" in resource.properties
            ):  # else the canary was to end, and has ended since the plan was made
                super().update(cloud, _alone(resource), found, changed)
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
        self._carry_out(cloud, resource, found, canary, version, step)
        if step.action == "remove" and changed - {"Canary"}:  # such as another number of pods
            super().update(cloud, _alone(resource), found, changed)
        return step.text or "the canary is removed"

    def _carry_out(
        self,
        cloud: Cluster,
        resource: Resource,
        found: Observed,
        canary: CanaryState | None,
        version: str | None,
        step: CanaryStep,
    ) -> None:
        name = resource.name
        if step.action == "start":
            assert version is not None
            for manifest in resource.properties["Beside"]:
                apply(cloud, manifest)
            _note(cloud, name, CanaryState(version, float(resource.how["percent"])))
        elif step.action == "route":
            _route(cloud, name, float(resource.how["percent"]))
        elif step.action == "bake":
            assert canary is not None
            _note(cloud, name, replace(canary, since=now().isoformat(timespec="seconds")))
        elif step.action == "end":
            assert canary is not None
            words = (
                "--selector",
                selector({NAME: name, INSTANCE: canary_of(name)}),
                "--prefix",
                "--tail",
                LINES,
            )
            self._log = cloud.program.try_(
                "logs", "--namespace", cloud.namespace, *words
            ).stdout.strip()
            _note(cloud, name, canary.ending(step.text))
        elif step.action == "move":
            super().update(cloud, _alone(resource), found, set())
        elif step.action == "unroute":
            _route(cloud, name, 0)
        elif step.action == "remove":
            self._remove(cloud, name, canary)

    def _remove(self, cloud: Cluster, name: str, canary: CanaryState | None) -> None:
        """Raises CloudError where it went back."""
        _note(
            cloud, name, None
        )  # before its pods go: a canary without a note is removed by the next run
        for kind in OWN:
            for each in cloud.list_objects(TYPES[kind], name, {INSTANCE: canary_of(name)}):
                remove(cloud, kind, each["metadata"]["name"])
        if canary is not None and canary.ended:
            log = f". The end of its log:\n{self._log}" if self._log else ""
            raise CloudError(
                f"the stable version of {name} has all requests again: {canary.ended}{log}"
            )


def route_of(cloud: Cluster, name: str) -> dict[str, Any] | None:
    """None also where the cluster has no Gateway API."""
    return next(
        (
            each
            for each in cloud.list_objects(TYPES["HTTPRoute"], name)
            if each["metadata"]["name"] == name
        ),
        None,
    )


def canary_in(cloud: Cluster, name: str) -> LiveCanary | None:
    """Reads routes only if the canary has a Deployment: without a Gateway, neither the permission
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
    """The manifest of another instance: wherever its label stands."""
    if isinstance(value, Mapping):
        return {
            key: name if key == INSTANCE else with_instance(each, name)
            for key, each in value.items()
        }
    return [with_instance(each, name) for each in value] if isinstance(value, list) else value


def with_share(cloud: Cluster, manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """A route with the share that a canary has now: none if its pods have been deleted by hand."""
    name = manifest["metadata"]["name"]
    canary = canary_in(cloud, name)
    rules = [{"backendRefs": backends(name, HTTP, 0.0 if canary is None else canary.share)}]
    return {**manifest, "spec": {**manifest["spec"], "rules": rules}}


class WeightedRoute(KubernetesObject):
    def __init__(self) -> None:
        super().__init__("HTTPRoute")

    def create(self, cloud: Cluster, resource: Resource) -> None:
        """With the share of now: since the plan was made, the canary may have ended and its pods
        may be gone.
        """
        super().create(cloud, replace(resource, properties=with_share(cloud, resource.properties)))


def now() -> datetime:
    return datetime.now(timezone.utc)


def _alone(resource: Resource) -> Resource:
    """What is applied of it."""
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
    apply(cloud, weighted(route, name, HTTP, percent))


def _note(cloud: Cluster, name: str, canary: CanaryState | None) -> None:
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
                Server(address, token, role="management", timeout=EVERY)
                .call("GET", "/metrics")
                .body()
                .decode(errors="replace")
            )
        counters[pod] = read_counters(text)
    return counters
