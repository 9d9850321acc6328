"""The steps of a canary on Kubernetes, and the metrics of its pods; pure functions.

The new version gets a Deployment and a Service beside the stable ones. The weights of the HTTPRoute
give it a share of the requests. No request is lost, because the route leads only to ready pods.

    start     the canary's objects are applied, and its pods become ready
    route     the route gets its weights
    bake      the Gateway has accepted the weights, and the bake time begins
    move      the stable Deployment gets the new version, pod by pod
    unroute   all requests go to the stable Deployment
    remove    the canary's objects are removed

If an alarm goes off, `end` records the reason, and `unroute` and `remove` follow without `move`. An
annotation of the route holds the progress, so that any run can continue it. (`kubectl rollout undo`
would restore an annotation of the Deployment.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from tsx_cli.deploy.aws.alarms import AlarmBound
from tsx_cli.deploy.engine.canary import Baking, Shift, decide
from tsx_cli.deploy.engine.resources import State
from tsx_cli.deploy.kubernetes.gateway import ANNOTATION
from tsx_runtime.core.telemetry.histogram import quantile

WINDOW_S = 60.0  # period of a bound
_SAMPLE = re.compile(
    r"^(tsx_errors_total|tsx_request_seconds_bucket)\{([^}]*)\} (\S+)", re.MULTILINE
)
_BOUND = re.compile(r'\ble="([^"]+)"')


@dataclass(frozen=True)
class CanaryState:
    """The content of the annotation."""

    version: str  # digest of the pods' template
    percent: float
    since: str = ""  # ISO time when the Gateway accepted its share; empty before
    ended: str = ""  # why the canary ends

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    def ending(self, reason: str) -> CanaryState:
        return replace(self, ended=reason)


def read_canary(route: Mapping[str, Any]) -> CanaryState | None:
    """Return the state of the canary in the annotation of a route."""
    text = (route["metadata"].get("annotations") or {}).get(ANNOTATION)
    return None if text is None else CanaryState(**json.loads(text))


class Surroundings(NamedTuple):
    """What the cluster shows about a canary."""

    canary: CanaryState | None
    pods: tuple[State, str]  # state of the canary's Deployment
    percent: float  # share of the requests, as set in the route
    route: tuple[State, str]  # whether the Gateway has accepted the route

    @property
    def ends(self) -> bool:
        """Whether the canary is to be removed without success."""
        return self.canary is not None and bool(self.canary.ended)


class CanaryStep(NamedTuple):
    action: Literal["start", "route", "bake", "wait", "end", "move", "unroute", "remove"]
    text: str = ""


def next_step(
    version: str | None,
    shift: Shift | None,
    seen: Surroundings,
    went_off: Mapping[str, str],
    now: datetime,
) -> CanaryStep:
    """Decide the next step of a canary.

    1. A finished or failed canary loses its requests before its pods.
    2. If no canary is wanted any more, all replicas get the new version at once.
    3. A canary that is missing, or has another version or share, starts.
    4. A canary ends if it does not become or stay ready, or if an alarm goes off.
    5. A ready canary gets its share, bakes, and moves.

    Args:
        version: The version that the stable Deployment does not have yet, if any.
        shift: The wanted canary, if any.
        seen: What the cluster shows.
        went_off: The reasons of the alarms that went off, by name.
        now: The time.
    """
    canary, ready = seen.canary, ("ready", "")
    if canary is not None and (seen.ends or version is None):
        if seen.percent:
            return CanaryStep("unroute", "all requests go to the stable version")
        return (
            CanaryStep("remove")
            if seen.route == ready
            else CanaryStep("wait", f"the route: {seen.route[1]}")
        )
    if shift is None:
        return CanaryStep("move", "all replicas get the new version")
    if canary is None or (canary.version, canary.percent) != (version, shift.percent):
        return CanaryStep("start", "the canary starts")
    if went_off:
        return CanaryStep(
            "end",
            "; ".join(f"the alarm {name} went off ({reason})" for name, reason in went_off.items()),
        )
    if seen.pods[0] == "failed" or (seen.pods != ready and canary.since):
        return CanaryStep(
            "end",
            "the canary's replicas"
            f" {'failed' if seen.pods[0] == 'failed' else 'are not ready any more'}:"
            f" {seen.pods[1]}",
        )
    if seen.pods != ready:
        return CanaryStep("wait", f"the canary: {seen.pods[1]}")
    if abs(seen.percent - shift.percent) > 0.1:
        return CanaryStep("route", f"the canary gets {shift.percent:g} % of the requests")
    if seen.route != ready:
        return CanaryStep("wait", f"the route: {seen.route[1]}")
    if not canary.since:
        return CanaryStep("bake", f"the canary has {shift.percent:g} % of the requests")
    baking = Baking(canary.version, canary.percent, datetime.fromisoformat(canary.since))
    todo = decide(canary.version, shift, baking, {}, now)
    return (
        CanaryStep("move", "the canary held: all replicas get the new version")
        if todo.action == "move"
        else CanaryStep("wait", todo.text)
    )


class Counters(NamedTuple):
    """The counters of a pod since its start, over all models."""

    errors: float = 0.0
    below: Mapping[float, float] = {}  # seconds -> number of requests that took at most that long


def read_counters(text: str) -> Counters:
    """Parse the text of `/metrics`."""
    errors, below = 0.0, dict[float, float]()
    for name, labels, value in _SAMPLE.findall(text):
        bound = _BOUND.search(labels)
        if name == "tsx_errors_total":
            errors += float(value)
        elif bound is not None:
            below[float(bound[1])] = below.get(float(bound[1]), 0.0) + float(value)
    return Counters(errors, below)


def went_off(
    bounds: Sequence[AlarmBound],
    before: Mapping[str, Counters],
    after: Mapping[str, Counters],
    seconds: float,
) -> dict[str, str]:
    """Return the bounds that the requests between two readings exceed, with the measured values."""
    pairs = [(before.get(pod, Counters()), now) for pod, now in after.items()]
    errors = sum(now.errors - then.errors for then, now in pairs) / max(1.0, seconds / WINDOW_S)
    below: dict[float, float] = {}
    for then, now in pairs:
        for bound, count in now.below.items():
            below[bound] = below.get(bound, 0.0) + count - then.below.get(bound, 0.0)
    off = {}
    for alarm_bound in bounds:
        measured = (
            errors
            if alarm_bound.metric == "5xx"
            else 1000 * percentile(float(alarm_bound.metric[1:]) / 100, below)
        )
        if measured > alarm_bound.limit:
            off[alarm_bound.text] = (
                f"{measured:.3g}{' in a minute' if alarm_bound.metric == '5xx' else ' ms'}"
            )
    return off


def percentile(share: float, below: Mapping[float, float]) -> float:
    """Return a percentile in seconds, or 0 without requests."""
    bounds = sorted(below)
    counts = [
        round(more - less) for less, more in pairwise([0.0, *(below[bound] for bound in bounds)])
    ]
    return quantile(counts, share, [bound for bound in bounds if bound != float("inf")]) or 0.0
