"""Hot replacement: a loaded version replaces another one, and no request is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, NamedTuple

from tsx_archiver import ModelConfig
from tsx_archiver.metadata.model_limits import LIMITS
from tsx_runtime.core.concurrency.task_group import TaskGroup
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.models.plan import RegisterOrder, unset_values
from tsx_runtime.core.registry.model_table import ModelTable
from tsx_runtime.core.scheduling.job import Job
from tsx_runtime.errors import Conflict, LoadFailed

logger = logging.getLogger("tsx.registry")


def inherit_settings(old: ModelVersion, order: RegisterOrder, config: ModelConfig) -> RegisterOrder:
    """Fill in values that were requested for the old version, at its registration or later.

    `config` is that of the new archive. It decides the number of workers, unless the order or a
    client has set one.
    """
    inherited = unset_values(
        order,
        {name: getattr(old.order, name) for name in (*LIMITS, "device_type", "slo")}
        | old.changed_limits,
    )
    if order.initial_workers is None and (old.is_scaled_by_client or not config.min_workers):
        inherited |= {
            "initial_workers": old.min_workers,
            "max_workers": old.max_workers if order.max_workers is None else order.max_workers,
        }
    return replace(order, loaded_at_startup=old.loaded_at_startup, **inherited)


class Adjustments(NamedTuple):
    """The changes that clients have made to a version through the management API."""

    limits: dict[str, Any]
    workers: tuple[int, int]

    @classmethod
    def of_version(cls, version: ModelVersion) -> Adjustments:
        return cls(dict(version.changed_limits), (version.min_workers, version.max_workers))


def apply_later_changes(
    old: ModelVersion, new: ModelVersion, before: Adjustments
) -> Coroutine[Any, Any, None] | None:
    """Apply the changes of the old version since `before` to the new version.

    Returns:
        The task that changes the number of workers, if a client has changed it meanwhile.
    """
    current = Adjustments.of_version(old)
    missing = object()
    changed_limits = {
        name: value
        for name, value in current.limits.items()
        if name not in new.plan.unchangeable_parameters
        and before.limits.get(name, missing) != value
    }
    if changed_limits:
        new.change(changed_limits)
    if new.version == old.version:
        new.dispatcher.continue_counts(old.dispatcher.stats)
    if current.workers == before.workers:
        return None
    new.is_scaled_by_client = True
    return new.scale(*current.workers)


class Handover:
    """Redirects requests from an old version to a new one, from the swap on.

    Requests of a sequence go to the version with its state. A caller that looked up the old version
    before the swap reaches the new one.
    """

    def __init__(self, old: ModelVersion, new: ModelVersion) -> None:
        self._old, self._new = old, new
        self._submit_to_old, self._leave_old = old.submit, old.leave
        self._old_may_have_sequences = old.plan.strategy.sequences is not None
        if self._old_may_have_sequences:
            new.predecessors.append(old)
            new.dispatcher.share_losses(old.dispatcher)
            new.redirect(self._submit, self._leave)
        # The lambda looks up `new.submit` for each job, since a later replacement changes it.
        old.redirect(lambda job: new.submit(job), self._leave)

    def end(self) -> None:
        """Release the old version, which has ended."""
        self._old_may_have_sequences = False
        new = self._new
        if self._old in new.predecessors:
            new.predecessors.remove(self._old)
        if new.submit == self._submit:  # It differs if `new` was replaced meanwhile.
            new.redirect(*new.entry)

    def _submit(self, job: Job) -> None:
        if self._old_may_have_sequences and self._old.runs_sequence_of(job):
            self._submit_to_old(job)
        else:
            self._new.entry.submit(job)

    def _leave(self, job: Job) -> None:
        """Tell both versions that the client of a job has left.

        The version without the job ignores it.
        """
        self._leave_old(job)
        self._new.entry.leave(job)


class Replacer:
    """Runs replacements, one per model at a time."""

    def __init__(self, table: ModelTable, background: TaskGroup) -> None:
        self._table = table
        self._background = background
        self._names_in_progress: set[str] = set()  # names of models that are being replaced

    def begin(self, name: str, number: str) -> ModelVersion | None:
        """Start a replacement; return the version to replace, or None if there is none.

        It is the version with this number, or else the default one.

        Raises:
            Conflict: The model cannot be replaced now.
        """
        model = self._table.models.get(name)
        if model is None:
            return None
        if name in self._names_in_progress:
            raise Conflict(
                f"A version of model {name} is already being replaced. Try again when that is done."
            )
        old = model.versions.get(number) or model.versions[model.default]
        if old.workflow:
            raise Conflict(
                f"Model {name} is a node of workflow {old.workflow}, and is replaced only together"
                " with it."
            )
        self._names_in_progress.add(name)
        return old

    def end(self, old: ModelVersion) -> None:
        """Allow the next replacement of the model."""
        self._names_in_progress.discard(old.name)

    async def replace_version(
        self, old: ModelVersion, new: ModelVersion, starting: Coroutine[Any, Any, None]
    ) -> None:
        """Replace a version once the new one has loaded; after a failure, the old one stays."""
        before = Adjustments.of_version(old)
        try:
            await starting
            self._swap(old, new, before)
        except BaseException as error:
            if isinstance(error, LoadFailed | Conflict):
                text = (
                    f"version {new.version} of {new.url} has not taken its place: {error.message}"
                )
                old.note_failed_replacement(text, error.traceback)
                logger.error("%s goes on: %s", old.label, text)
            await self._table.discard(new)
            raise
        finally:
            self.end(old)

    def _swap(self, old: ModelVersion, new: ModelVersion, before: Adjustments) -> None:
        """Swap the versions, without an `await` in between.

        Raises:
            Conflict: The old version was unregistered.
        """
        if not self._table.is_registered(old):
            raise Conflict(
                f"Version {old.version} of model {old.name} was unregistered while its replacement"
                " was loaded."
            )
        if scaling := apply_later_changes(old, new, before):
            self._background.load(scaling)
        handover = Handover(old, new)
        self._table.swap(old, new)
        logger.info("%s: takes the place of version %s", new.label, old.version)
        self._background.begin(self._drain(old, handover))

    async def _drain(self, old: ModelVersion, handover: Handover) -> None:
        """Discard the old version once it is unused, or after `unregister_model_timeout`."""
        try:
            await asyncio.wait_for(old.dispatcher.wait_drained(), self._table.timeout)
        except (TimeoutError, asyncio.TimeoutError):
            text = (
                "%s: was replaced and is stopped with requests unanswered: draining took longer"
                " than unregister_model_timeout"
            )
            logger.warning(text, old.label)
        await self._table.discard(old)
        handover.end()
