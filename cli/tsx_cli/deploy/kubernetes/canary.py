"""The steps of a canary on Kubernetes, and the metrics of its pods; pure functions.

The new version gets a Deployment and a Service in addition to the stable ones. The weights of the
HTTPRoute give it a percentage of the requests. No request is lost, because the route leads only to
ready pods.

    start     the canary's objects are applied, and its pods become ready
    route     the route gets its weights
    bake      the Gateway has accepted the weights, and the bake time begins
    move      the stable Deployment gets the new version, pod by pod
    unroute   all requests go to the stable Deployment
    remove    the canary's objects are removed

If an alarm goes off, `end` records the reason, and `unroute` and `remove` follow without `move`. An
annotation of the route contains the progress, so that any run can continue it. (`kubectl rollout
undo` would restore an annotation of the Deployment.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from tsx_cli.deploy.aws.alarms import AlarmBound
from tsx_cli.deploy.engine.canary import Baking, Shift, decide
from tsx_cli.deploy.engine.resources import State
from tsx_cli.deploy.kubernetes.gateway import ANNOTATION, annotations_of
from tsx_runtime.core.telemetry.histogram import quantile

WINDOW_S = 60.0  # period to which the bounds of alarms apply
_SAMPLE = re.compile(
    r"^(tsx_errors_total|tsx_request_seconds_bucket)\{([^}]*)\} (\S+)", re.MULTILINE
)
_BUCKET_BOUND = re.compile(r'\ble="([^"]+)"')


@dataclass(frozen=True)
class CanaryState:
    """The state of a canary, which an annotation of the route contains as JSON."""

    version: str  # digest of the pods' template
    percent: float
    since: str = ""  # ISO time when the Gateway accepted the weights; empty before
    ended: str = ""  # reason for the end of the canary; empty while it runs

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))


def read_canary(route: Mapping[str, Any]) -> CanaryState | None:
    """Return the state of the canary in the annotation of a route."""
    text = annotations_of(route).get(ANNOTATION)
    return None if text is None else CanaryState(**json.loads(text))


class CanaryObservation(NamedTuple):
    """The state of a canary's objects in the cluster."""

    canary: CanaryState | None
    pods: tuple[State, str]  # state of the canary's Deployment
    percent: float  # percentage of the requests, as set in the route
    route: tuple[State, str]  # state of the route; `ready` if the Gateway has accepted it

    @property
    def is_ending(self) -> bool:
        """Whether the canary is to be removed without success."""
        return self.canary is not None and bool(self.canary.ended)


class CanaryStep(NamedTuple):
    action: Literal["start", "route", "bake", "wait", "end", "move", "unroute", "remove"]
    text: str = ""


def next_step(
    version: str | None,
    shift: Shift | None,
    observed: CanaryObservation,
    alarm_reasons: Mapping[str, str],
    now: datetime,
) -> CanaryStep:
    """Decide the next step of a canary.

    1. A finished or failed canary loses its requests before its pods.
    2. If no canary is wanted any more, all replicas get the new version at once.
    3. A canary that is missing, or has another version or percentage, starts.
    4. A canary ends if it does not become or stay ready, or if an alarm goes off.
    5. A ready canary gets its requests, bakes, and moves.

    Args:
        version: The version that the stable Deployment does not have yet, if any.
        shift: The wanted canary, if any.
        observed: The state of the canary's objects.
        alarm_reasons: The reasons of the alarms that went off, by their names.
        now: The time.
    """
    canary, ready = observed.canary, ("ready", "")
    if canary is not None and (observed.is_ending or version is None):
        if observed.percent:
            return CanaryStep("unroute", "all requests go to the stable version")
        return (
            CanaryStep("remove")
            if observed.route == ready
            else CanaryStep("wait", f"the route: {observed.route[1]}")
        )
    if shift is None:
        return CanaryStep("move", "all replicas get the new version")
    if canary is None or (canary.version, canary.percent) != (version, shift.percent):
        return CanaryStep("start", "the canary starts")
    if alarm_reasons:
        return CanaryStep(
            "end",
            "; ".join(
                f"the alarm {name} went off ({reason})" for name, reason in alarm_reasons.items()
            ),
        )
    if observed.pods[0] == "failed" or (observed.pods != ready and canary.since):
        return CanaryStep(
            "end",
            "the canary's replicas"
            f" {'failed' if observed.pods[0] == 'failed' else 'are not ready any more'}:"
            f" {observed.pods[1]}",
        )
    if observed.pods != ready:
        return CanaryStep("wait", f"the canary: {observed.pods[1]}")
    if abs(observed.percent - shift.percent) > 0.1:
        return CanaryStep("route", f"the canary gets {shift.percent:g} % of the requests")
    if observed.route != ready:
        return CanaryStep("wait", f"the route: {observed.route[1]}")
    if not canary.since:
        return CanaryStep("bake", f"the canary has {shift.percent:g} % of the requests")
    baking = Baking(canary.version, canary.percent, datetime.fromisoformat(canary.since))
    action = decide(canary.version, shift, baking, {}, now)
    return (
        CanaryStep("move", "the canary held: all replicas get the new version")
        if action.action == "move"
        else CanaryStep("wait", action.text)
    )


class Counters(NamedTuple):
    """The counters of a pod since its start, summed over all models."""

    errors: float = 0.0
    # Seconds -> number of requests that took at most that long.
    bucket_counts: Mapping[float, float] = {}


def read_counters(text: str) -> Counters:
    """Parse the text of `/metrics`."""
    errors, bucket_counts = 0.0, dict[float, float]()
    for name, labels, value in _SAMPLE.findall(text):
        bound = _BUCKET_BOUND.search(labels)
        if name == "tsx_errors_total":
            errors += float(value)
        elif bound is not None:
            bucket_counts[float(bound[1])] = bucket_counts.get(float(bound[1]), 0.0) + float(value)
    return Counters(errors, bucket_counts)


def find_exceeded_bounds(
    bounds: Sequence[AlarmBound],
    old_counters: Mapping[str, Counters],
    new_counters: Mapping[str, Counters],
    seconds: float,
) -> dict[str, str]:
    """Return the bounds that the requests between two readings exceed, with the measured values."""
    pairs = [(old_counters.get(pod, Counters()), new) for pod, new in new_counters.items()]
    errors = sum(new.errors - old.errors for old, new in pairs) / max(1.0, seconds / WINDOW_S)
    bucket_counts: dict[float, float] = {}
    for old, new in pairs:
        for bound, count in new.bucket_counts.items():
            bucket_counts[bound] = (
                bucket_counts.get(bound, 0.0) + count - old.bucket_counts.get(bound, 0.0)
            )
    exceeded = {}
    for alarm_bound in bounds:
        measured = (
            errors
            if alarm_bound.metric == "5xx"
            else 1000 * percentile(float(alarm_bound.metric[1:]) / 100, bucket_counts)
        )
        if measured > alarm_bound.limit:
            exceeded[alarm_bound.text] = (
                f"{measured:.3g}{' in a minute' if alarm_bound.metric == '5xx' else ' ms'}"
            )
    return exceeded


def percentile(fraction: float, bucket_counts: Mapping[float, float]) -> float:
    """Return a percentile in seconds, or 0 if there are no requests.

    Args:
        fraction: The percentile as a fraction, such as 0.95.
        bucket_counts: The counts of requests by the upper bounds of their times.
    """
    bounds = sorted(bucket_counts)
    counts = [
        round(upper - lower)
        for lower, upper in pairwise([0.0, *(bucket_counts[bound] for bound in bounds)])
    ]
    return quantile(counts, fraction, [bound for bound in bounds if bound != float("inf")]) or 0.0
