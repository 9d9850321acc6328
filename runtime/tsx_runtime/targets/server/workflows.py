"""The workflows that a server has from its start: which they are, and how they get there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tsx_runtime.errors import SettingError, TsxError
from tsx_runtime.settings.schema import Settings
from tsx_runtime.sources import Trust, is_url
from tsx_runtime.targets.server.startup import split_name
from tsx_runtime.workflows.manager import SUFFIX, Workflow, WorkflowOrder, Workflows

logger = logging.getLogger("tsx.server")


@dataclass(frozen=True)
class StartWorkflow:
    """A workflow to load at the start. Without a path the order's URL says where it comes from, as in a registration."""

    path: Path | None
    order: WorkflowOrder


async def load_workflows(workflows: Workflows, starts: Iterable[StartWorkflow], *, or_tell: bool) -> list[Workflow]:
    """All side by side. With `or_tell`, one that cannot be registered is told and left out; else the first ends the start."""
    found = await asyncio.gather(*(_load(workflows, start, or_tell) for start in starts))
    return [workflow for workflow in found if workflow is not None]


def workflows_from_settings(settings: Settings) -> list[StartWorkflow]:
    """What the setting `load_workflows` names: `all`, or `[name=]file` in the workflow store. Raises SettingError."""
    if not settings.load_workflows:
        return []
    store = settings.workflow_store or settings.model_store
    if [entry.lower() for entry in settings.load_workflows] != ["all"]:
        return [_from_entry(*split_name(entry), store) for entry in settings.load_workflows]
    if store is None:
        raise SettingError(_NO_STORE.format("all"))
    return [start_workflow(path) for path in sorted(store.glob(f"*{SUFFIX}")) if not path.name.startswith(".")]


def start_workflow(path: Path, name: str | None = None) -> StartWorkflow:
    return StartWorkflow(path, WorkflowOrder(path.name, name, loaded_at_startup=True))


_NO_STORE = "load_workflows names '{}', but neither workflow_store nor model_store is set: give the archives' directory"


def _from_entry(name: str, file: str, store: Path | None) -> StartWorkflow:
    order = WorkflowOrder(file, name or None, loaded_at_startup=True)
    if is_url(file):
        return StartWorkflow(None, order)
    if store is None and not Path(file).is_absolute():
        raise SettingError(_NO_STORE.format(file))
    return StartWorkflow(Path(file) if store is None else store / file, order)


async def _load(workflows: Workflows, start: StartWorkflow, or_tell: bool) -> Workflow | None:
    try:
        if start.path is None:
            workflow = await workflows.register(start.order, trust=Trust.OPERATOR)
        else:
            workflow = await workflows.register_path(start.path, start.order)
    except TsxError as error:
        if not or_tell:
            raise
        logger.error("workflow %s is not served: %s", start.order.url, error.message)
        return None
    logger.info("workflow %s is loaded: POST /wfpredict/%s", workflow.name, workflow.name)
    return workflow
