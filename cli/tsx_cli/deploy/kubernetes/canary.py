"""The steps of a canary on Kubernetes, and what the metrics of its pods say of it. Pure functions.

The new version gets a Deployment and a Service of its own beside the stable ones, and a share of
the requests by the weights of the HTTPRoute. No request is lost: the route leads to pods only while
they are ready.

    start     the canary's objects are applied, and its pods become ready
    route     the route gets its weights
    bake      the Gateway has taken them: from now on the time counts
    move      the canary held: the stable Deployment gets the new version, pod by pod, beside the canary
    unroute   all requests go to the stable Deployment
    remove    the canary's objects are removed

Where an alarm goes off, `end` notes why, and `unroute` and `remove` follow without `move`. How far
it is stands in an annotation of the route and in the cluster's objects, so that any run can
continue it. (`kubectl rollout undo` would bring back one of the Deployment.)
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

WINDOW = 60.0  # seconds that a bound is about
_SAMPLE = re.compile(
    r"^(tsx_errors_total|tsx_request_seconds_bucket)\{([^}]*)\} (\S+)", re.MULTILINE
)
_BOUND = re.compile(r'\ble="([^"]+)"')


@dataclass(frozen=True)
class CanaryState:
    """As the annotation has it."""

    version: str  # a digest of the pods' template
    percent: float
    since: str = ""  # when its share was taken by the Gateway, in ISO form; empty before
    ended: str = ""  # why it goes back

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    def ending(self, reason: str) -> CanaryState:
        return replace(self, ended=reason)


def read_canary(found: Mapping[str, Any]) -> CanaryState | None:
    """Of a route."""
    text = (found["metadata"].get("annotations") or {}).get(ANNOTATION)
    return None if text is None else CanaryState(**json.loads(text))


class Surroundings(NamedTuple):
    """What the cluster shows of a canary."""

    canary: CanaryState | None
    pods: tuple[State, str]  # of the canary's Deployment
    percent: float  # of the requests, by the route
    route: tuple[State, str]  # whether the Gateway has taken it

    @property
    def ends(self) -> bool:
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
    """`version` is the one that the stable Deployment does not have yet; None where it has what is
    wanted.

    1. It is over, or has failed: the requests go back before its pods do.
    2. No canary is asked for any more: all replicas get the new version at once.
    3. It is not there, or it has another version or share: it starts.
    4. It does not become ready or stay so, or an alarm goes off: it ends.
    5. It is ready: it gets its share, bakes, and moves.
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
    """Of one pod since it started, all models together."""

    errors: float = 0.0
    below: Mapping[float, float] = {}  # requests that took at most so many seconds


def read_counters(text: str) -> Counters:
    """From the text of `/metrics`."""
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
    """The bounds that the pods' requests between two looks exceed, with what was measured."""
    pairs = [(before.get(pod, Counters()), now) for pod, now in after.items()]
    errors = sum(now.errors - then.errors for then, now in pairs) / max(1.0, seconds / WINDOW)
    below: dict[float, float] = {}
    for then, now in pairs:
        for bound, count in now.below.items():
            below[bound] = below.get(bound, 0.0) + count - then.below.get(bound, 0.0)
    off = {}
    for each in bounds:
        measured = (
            errors
            if each.metric == "5xx"
            else 1000 * percentile(float(each.metric[1:]) / 100, below)
        )
        if measured > each.limit:
            off[each.text] = f"{measured:.3g}{' in a minute' if each.metric == '5xx' else ' ms'}"
    return off


def percentile(share: float, below: Mapping[float, float]) -> float:
    """Seconds; 0 without requests."""
    bounds = sorted(below)
    counts = [
        round(more - less) for less, more in pairwise([0.0, *(below[bound] for bound in bounds)])
    ]
    return quantile(counts, share, [bound for bound in bounds if bound != float("inf")]) or 0.0
