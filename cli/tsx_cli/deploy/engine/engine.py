"""The engine that applies a plan: it makes one change after the other, and waits for each.

There is no state file. Each run observes the existing resources, so running again continues an
interrupted run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tsx_cli.common.failure import INTERRUPTED, CliError
from tsx_cli.deploy.engine.kind import CloudError, ResourceKind
from tsx_cli.deploy.engine.plan import Change, Plan, plan, resolve_refs
from tsx_cli.deploy.engine.resources import OWNER, UNDER_WAY, Observed, Resource, Traits


@dataclass(frozen=True)
class Event:
    """The progress of a change, for display."""

    change: Change
    stage: Literal["begun", "waiting", "done", "failed"]
    seconds: float = 0.0
    text: str = ""


RETRY_HINT = "Run the same command again"  # how to continue an interrupted run
OnEvent = Callable[[Event], None]


class DeployFailed(CliError):
    """A change failed.

    The changes before it are kept, and another run continues after them.
    """

    def __init__(self, message: str, change: Change) -> None:
        super().__init__(message)
        self.change = change


class DeployInterrupted(CliError):
    """A change was interrupted (Ctrl-C)."""

    exit_code = INTERRUPTED


@dataclass
class Engine:
    """The engine that plans and applies the changes of one deployment."""

    cloud: Any  # is passed to the kinds
    kinds: Mapping[str, ResourceKind]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    on_event: OnEvent = lambda event: None
    retry_hint: str = RETRY_HINT
    outputs: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # resource id -> outputs

    def plan(self, desired: Sequence[Resource], unwanted: Iterable[Resource] = ()) -> Plan:
        """Observe the wanted and unwanted resources, and compute the changes.

        Raises:
            CliError: A resource of another owner has a wanted name.
        """
        observed = {
            resource.id: existing
            for resource in desired
            if (existing := self.observe(resource)) is not None
        }
        for resource in desired:
            _refuse_foreign_resource(
                resource, observed.get(resource.id), self.kinds[resource.kind].traits
            )
        self.outputs = {id: existing.outputs for id, existing in observed.items()}
        unwanted_pairs = [
            (resource, existing)
            for resource in unwanted
            if (existing := self.observe(resource)) is not None
        ]
        return plan(
            desired,
            observed,
            {name: kind.traits for name, kind in self.kinds.items()},
            unwanted_pairs,
        )

    def observe(self, resource: Resource) -> Observed | None:
        return self.kinds[resource.kind].observe(self.cloud, resource.name)

    def apply(self, planned: Plan) -> None:
        """Make all changes; the next run waits for a change that this run has begun.

        Raises:
            DeployFailed: A change failed.
            DeployInterrupted: The user pressed Ctrl-C.
        """
        done: list[Change] = []
        for change in planned.changes:
            if change.action == "same" and (
                change.observed is None or change.observed.state == "ready"
            ):
                continue
            start = self.clock()
            self.on_event(Event(change, "begun"))
            try:
                self._apply_change(change, start)
            except CloudError as error:
                self.on_event(Event(change, "failed", self.clock() - start, error.message))
                raise DeployFailed(
                    _failure_text(error.message, change, done, self.retry_hint), change
                ) from error
            except KeyboardInterrupt as interrupt:
                resource_text = f"{change.resource.short_kind} {change.resource.name}"
                consequence = (
                    self.kinds[change.resource.kind].traits.when_interrupted
                    or "AWS continues what has started"
                )
                raise DeployInterrupted(
                    f"left at {resource_text}: {consequence}. {self.retry_hint} to continue"
                ) from interrupt
            self.on_event(Event(change, "done", self.clock() - start))
            done.append(change)

    def _apply_change(self, change: Change, start: float) -> None:
        kind, resource = self.kinds[change.resource.kind], change.resource
        if change.action == "delete":
            self._delete(change, start)
            return
        resource = replace(resource, properties=resolve_refs(resource.properties, self.outputs))
        was_changing = change.observed is not None and change.observed.state == "changing"
        if was_changing:  # An interrupted run or another user began the change.
            change = replace(change, observed=self._wait_until_settled(change, start))
        assert change.action == "create" or change.observed is not None
        if change.action == "replace":
            self._delete(change, start)
        if change.action in ("create", "replace"):
            creation_start = self.clock()
            while (text := kind.create(self.cloud, resource)) is not None:
                self._wait(change, creation_start, kind, text, kind.create_timeout_s)
        settled = self._wait_until_settled(change, start)
        # If there is a reason, the platform has rolled back the change of an interrupted run.
        is_over = change.action == "same" or (was_changing and bool(settled.reason))
        self._update_until_equal(replace(change, resource=resource), settled, start, is_over)

    def _update_until_equal(
        self, change: Change, settled: Observed, start: float, is_over: bool
    ) -> None:
        """Update a resource until it equals the plan.

        If an alarm is triggered, AWS may restore the earlier state meanwhile.
        """
        kind = self.kinds[change.resource.kind]
        resource = change.resource
        old_properties = settled.properties
        traits = {resource.kind: kind.traits}
        has_changed, can_update_failed = (
            False,
            kind.traits.can_update_failed and change.action == "update",
        )
        has_begun = UNDER_WAY in settled.outputs  # An interrupted run may have begun the change.
        while settled.state != "failed" or can_update_failed:
            differing_fields = plan([resource], {resource.id: settled}, traits).changes[0].fields
            if not differing_fields and not can_update_failed:
                break
            if is_over:
                raise CloudError(
                    f"{resource.name} was returned to its previous"
                    f" state{f': {settled.reason}' if settled.reason else ''}"
                )
            if (has_changed and settled.properties == old_properties) or (
                has_begun and UNDER_WAY not in settled.outputs
            ):
                raise CloudError(
                    f"{resource.name} was rolled back to its previous state, but not by this run"
                )
            names = {field.path.partition(".")[0] for field in differing_fields}
            text, can_update_failed = kind.update(self.cloud, resource, settled, names), False
            if text is not None:
                has_changed = (
                    has_changed
                    or self._wait_until_settled(change, start).properties != old_properties
                )
                self._wait(change, start, kind, text)
            settled = self._wait_until_settled(change, start)
            has_begun = has_begun or UNDER_WAY in settled.outputs
            is_over = text is None or bool(settled.reason)
        if settled.state == "failed":
            raise CloudError(
                f"{resource.name} has failed: {settled.reason or 'AWS gives no reason'}"
            )
        self.outputs[resource.id] = settled.outputs

    def _wait_until_settled(self, change: Change, start: float) -> Observed:
        kind = self.kinds[change.resource.kind]
        while True:
            observed = kind.observe(self.cloud, change.resource.name)
            if observed is not None and observed.state != "changing":
                return observed
            self._wait(
                change, start, kind, "is not visible yet" if observed is None else observed.reason
            )

    def _delete(self, change: Change, start: float) -> None:
        kind = self.kinds[change.resource.kind]
        assert change.observed is not None
        while (text := kind.delete(self.cloud, change.observed)) is not None:
            self._wait(change, start, kind, text)
        while kind.observe(self.cloud, change.resource.name) is not None:
            self._wait(change, start, kind, "is being removed")

    def _wait(
        self,
        change: Change,
        start: float,
        kind: ResourceKind,
        text: str,
        timeout_s: float | None = None,
    ) -> None:
        seconds = self.clock() - start
        default_timeout_s = change.resource.timeout_s or kind.timeout_s
        if seconds > (default_timeout_s if timeout_s is None else timeout_s):
            raise CloudError(
                f"{change.resource.name}: it has made no progress for {seconds:.0f} s ({text})"
            )
        self.on_event(Event(change, "waiting", seconds, text))
        self.sleep(kind.poll_interval_s)


def _refuse_foreign_resource(resource: Resource, observed: Observed | None, traits: Traits) -> None:
    """Check that an existing resource belongs to this deployment.

    Raises:
        CliError: The resource has another owner.
    """
    wanted_owner = resource.tags.get(OWNER)
    if (
        observed is not None
        and wanted_owner is not None
        and observed.tags.get(OWNER) != wanted_owner
    ):
        owner = observed.tags.get(OWNER)
        if traits.can_adopt and owner is None:
            return
        reason = (
            f"it belongs to the deployment '{owner}'" if owner else "tsx deploy did not make it"
        )
        raise CliError(
            f"{resource.short_kind} {resource.name} already exists, and {reason}; choose another"
            " --name"
        )


def _failure_text(message: str, change: Change, done: Sequence[Change], retry_hint: str) -> str:
    created = [
        f"{earlier.resource.short_kind} {earlier.resource.name}"
        for earlier in done
        if earlier.action != "delete"
    ]
    created_text = (
        f"Created by this run and still there: {', '.join(created)}."
        if created
        else "Nothing was changed."
    )
    return (
        f"{message.rstrip('.')}. {created_text} {retry_hint} to continue, or `tsx deploy destroy`"
        " to remove all of it."
    )
