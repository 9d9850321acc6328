"""The output of `tsx deploy`: the plan, the progress, the state."""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from tsx_cli.common.output import one_line, print_table
from tsx_cli.common.status_line import StatusLine
from tsx_cli.deploy.engine.engine import Event
from tsx_cli.deploy.engine.plan import Action, Change, Plan, changed_parts
from tsx_cli.deploy.engine.platform import DeployedVersion

MAX_VALUE_CHARS = 100
ANNOUNCED_S = 30.0  # Changes that take this long are announced with their duration.
# Typical seconds of a change; in AWS they depend on the image and the machines.
TYPICAL_S: Mapping[str, Mapping[str, float]] = {
    "AWS::SageMaker::Endpoint": {"create": 360, "replace": 420, "update": 480},
    "AWS::SageMaker::InferenceComponent": {"create": 300, "replace": 360, "update": 300},
    "AWS::Lambda::Function": {"create": 60, "update": 40},
    "Tsx::Container::Image": {"create": 240},
    "Tsx::ECR::Image": {"create": 300},
    "Tsx::Registry::Image": {"create": 300},
    "Kubernetes::Deployment": {"create": 60, "update": 60},
    "Tsx::Ray::Application": {"create": 30, "update": 30},
    "Tsx::Lambda::ProvisionedConcurrency": {"create": 180, "update": 180},
}
ACTIONS: Mapping[
    Action, tuple[str, str, str]
] = {  # symbol, text in the summary of a plan, text after the change
    "create": ("+", "to create", "created"),
    "update": ("~", "to update", "updated"),
    "replace": ("-/+", "to recreate", "recreated"),
    "delete": ("-", "to delete", "deleted"),
    "same": ("=", "as it should be", "as it should be"),
}


def show_plan(plan: Plan) -> None:
    """Print a line for each resource, and below it the values that change."""
    for change in plan.changes:
        reason = f"  ({one_line(change.reason)})" if change.reason else ""
        print(
            f"{ACTIONS[change.action][0]:>3} {change.resource.short_kind:<15}"
            f" {one_line(change.resource.name)}{reason}"
        )
        if change.action in ("update", "replace"):
            for path, old, new in (row for field in change.fields for row in changed_parts(field)):
                print(f"      {path}: {_value(old)} -> {_value(new)}")
            if change.resource.change_settings and change.action == "update":
                print(f"      how: {_value(change.resource.change_settings)}")
    counts = [(plan.count(action), texts[1]) for action, texts in ACTIONS.items()]
    time = sum(typical_seconds(change) for change in plan.changes)
    duration = f" It takes about {minutes(time)}." if time >= ANNOUNCED_S else ""
    total = ", ".join(f"{number} {text}" for number, text in counts if number)
    print(f"\n{total or 'nothing is there'}.{duration}")


def typical_seconds(change: Change) -> float:
    """Return the typical seconds of a change, including the bake time of a canary."""
    typical_s = TYPICAL_S.get(change.resource.kind, {}).get(change.action, 0.0)
    shift = (
        change.resource.properties.get("DeploymentConfig", {}) if change.action == "update" else {}
    )
    routing: Mapping[str, float] = shift.get("BlueGreenUpdatePolicy", {}).get(
        "TrafficRoutingConfiguration", {}
    )
    rolling_policy = shift.get("RollingUpdatePolicy")
    rolling_s = (
        0
        if rolling_policy is None
        else math.ceil(100 / rolling_policy["MaximumBatchSize"]["Value"])
        * rolling_policy["WaitIntervalInSeconds"]
    )
    bake_s = change.resource.change_settings.get("bake", 0) if change.action == "update" else 0
    return typical_s + routing.get("WaitIntervalInSeconds", 0) + rolling_s + bake_s


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


class Steps(StatusLine):
    """The printed progress: a line for each change, animated on a terminal while it runs."""

    def __enter__(self) -> Steps:
        super().__enter__()
        if self._status is not None:
            self._status.stop()  # until the first change
        return self

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def busy(self, text: str) -> Generator[None, None, None]:
        """Show a text while this machine works."""
        if self._status is None:
            yield
            return
        self._status.update(text.replace("[", r"\["))
        self._status.start()
        try:
            yield
        finally:
            self._status.stop()

    def __call__(self, event: Event) -> None:
        label = f"{event.change.resource.short_kind} {event.change.resource.name}"
        typical_s = typical_seconds(event.change)
        if event.stage in ("done", "failed"):
            if self._status is not None:
                self._status.stop()
            result = ACTIONS[event.change.action][2] if event.stage == "done" else "failed"
            self._console.print(
                f"{label}: {result} ({event.seconds:.0f} s)", markup=False, soft_wrap=True
            )
        elif self._status is not None:
            estimate = (
                f" of about {minutes(typical_s)}; {_ctrl_c_hint(event.change)}"
                if typical_s >= ANNOUNCED_S
                else ""
            )
            self._status.update(
                f"{label}: {event.text or 'begun'} ({event.seconds:.0f} s{estimate})".replace(
                    "[", r"\["
                )
            )
            self._status.start()
        elif event.stage == "begun" and typical_s >= ANNOUNCED_S:
            self._console.print(
                f"{label}: begun, about {minutes(typical_s)}; {_ctrl_c_hint(event.change)}",
                markup=False,
                soft_wrap=True,
            )


def _ctrl_c_hint(change: Change) -> str:
    """Return the effect of Ctrl-C: AWS continues without this command, but a build ends."""
    return "Ctrl-C ends it" if change.resource.kind.endswith("::Image") else "Ctrl-C leaves it"


def show_versions(versions: list[DeployedVersion]) -> None:
    rows = [
        (
            version.number,
            version.made.astimezone().strftime("%Y-%m-%d %H:%M"),
            version.model,
            version.id,
            "now" if version.is_current else "",
        )
        for version in reversed(versions)
    ]
    print_table(["version", "made", "model", "configuration", ""], rows)


def show_status(status: Mapping[str, Any]) -> None:
    rows = []
    for key, value in status.items():
        if value in (None, "", [], {}):
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for number, part in enumerate(value, start=1):
                rows += [
                    (f"{key.rstrip('s')} {number} {name}", _value(item))
                    for name, item in part.items()
                ]
        else:
            rows.append((key, _value(value)))
    print_table(["", ""], rows)


def confirm(plan: Plan, question: str) -> bool:
    """Ask a question; without a terminal, the result is False."""
    if not sys.stdin.isatty():
        return False
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def _value(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        value = ", ".join(
            f"{key}={' and '.join(map(str, item)) if isinstance(item, list) else item}"
            for key, item in value.items()
        )
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    text = one_line(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 1] + "…"
