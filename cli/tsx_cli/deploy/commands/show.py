"""The output of `tsx deploy`: the plan, the progress, the state."""

from __future__ import annotations

import math
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.status import Status

from tsx_cli.common.output import one_line, print_table
from tsx_cli.deploy.engine.engine import Event
from tsx_cli.deploy.engine.plan import Action, Change, Plan, narrowed
from tsx_cli.deploy.engine.platform import DeployedVersion

LONGEST = 100  # characters of a value
LONG = 30.0  # seconds: from here on it is announced
# seconds, from experience: what AWS takes hangs on the image and the machines
USUAL: Mapping[str, Mapping[str, float]] = {
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
ACTIONS: Mapping[Action, tuple[str, str, str]] = {  # in a plan, in its sum, and done
    "create": ("+", "to create", "created"),
    "update": ("~", "to update", "updated"),
    "replace": ("-/+", "to recreate", "recreated"),
    "delete": ("-", "to delete", "deleted"),
    "same": ("=", "as it should be", "as it should be"),
}


def show_plan(planned: Plan) -> None:
    """A line for each resource, and under what changes the values that do."""
    for change in planned.changes:
        because = f"  ({one_line(change.reason)})" if change.reason else ""
        print(
            f"{ACTIONS[change.action][0]:>3} {change.resource.short_kind:<15}"
            f" {one_line(change.resource.name)}{because}"
        )
        if change.action in ("update", "replace"):
            for path, old, new in (row for field in change.fields for row in narrowed(field)):
                print(f"      {path}: {_value(old)} -> {_value(new)}")
            if change.resource.how and change.action == "update":
                print(f"      how: {_value(change.resource.how)}")
    counts = [(planned.count(action), words[1]) for action, words in ACTIONS.items()]
    time = sum(expected(change) for change in planned.changes)
    duration = f" It takes about {minutes(time)}." if time >= LONG else ""
    print(
        f"\n{', '.join(f'{number} {word}' for number, word in counts if number) or 'nothing is there'}.{duration}"
    )


def expected(change: Change) -> float:
    """Seconds that it usually takes; a canary takes its time on top."""
    usual = USUAL.get(change.resource.kind, {}).get(change.action, 0.0)
    shift = (
        change.resource.properties.get("DeploymentConfig", {}) if change.action == "update" else {}
    )
    traffic: Mapping[str, float] = shift.get("BlueGreenUpdatePolicy", {}).get(
        "TrafficRoutingConfiguration", {}
    )
    rolling = shift.get("RollingUpdatePolicy")
    steps = (
        0
        if rolling is None
        else math.ceil(100 / rolling["MaximumBatchSize"]["Value"])
        * rolling["WaitIntervalInSeconds"]
    )
    bake = change.resource.how.get("bake", 0) if change.action == "update" else 0
    return usual + traffic.get("WaitIntervalInSeconds", 0) + steps + bake


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


class Steps:
    """A line for each applied change, with its time; on a terminal the line is animated while AWS
    works.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._status: Status | None = None

    def __enter__(self) -> Steps:
        if self._console.is_terminal and not self._console.quiet:
            self._status = self._console.status("")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def busy(self, text: str) -> Generator[None, None, None]:
        """While something is done on this machine."""
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
        what, usual = (
            f"{event.change.resource.short_kind} {event.change.resource.name}",
            expected(event.change),
        )
        if event.stage in ("done", "failed"):
            if self._status is not None:
                self._status.stop()
            word = ACTIONS[event.change.action][2] if event.stage == "done" else "failed"
            self._console.print(
                f"{what}: {word} ({event.seconds:.0f} s)", markup=False, soft_wrap=True
            )
        elif self._status is not None:
            of = f" of about {minutes(usual)}; {_way_out(event.change)}" if usual >= LONG else ""
            self._status.update(
                f"{what}: {event.text or 'begun'} ({event.seconds:.0f} s{of})".replace("[", r"\[")
            )
            self._status.start()
        elif event.stage == "begun" and usual >= LONG:
            self._console.print(
                f"{what}: begun, about {minutes(usual)}; {_way_out(event.change)}",
                markup=False,
                soft_wrap=True,
            )


def _way_out(change: Change) -> str:
    """What AWS does goes on without this command; a build is this command's own."""
    return "Ctrl-C ends it" if change.resource.kind.endswith("::Image") else "Ctrl-C leaves it"


def show_versions(versions: list[DeployedVersion]) -> None:
    rows = [
        (
            each.number,
            each.made.astimezone().strftime("%Y-%m-%d %H:%M"),
            each.model,
            each.id,
            "now" if each.is_current else "",
        )
        for each in reversed(versions)
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
                    (f"{key.rstrip('s')} {number} {name}", _value(each))
                    for name, each in part.items()
                ]
        else:
            rows.append((key, _value(value)))
    print_table(["", ""], rows)


def confirm(planned: Plan, question: str) -> bool:
    """Only a person at a terminal can be asked."""
    if not sys.stdin.isatty():
        return False
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def _value(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        value = ", ".join(
            f"{key}={' and '.join(map(str, each)) if isinstance(each, list) else each}"
            for key, each in value.items()
        )
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    text = one_line(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
