"""The workflows that a server has from its start."""

from __future__ import annotations

import asyncio
import logging

from tsx_runtime.errors import SettingError, TsxError
from tsx_runtime.settings import Settings
from tsx_runtime.workflows.manager import SUFFIX, Workflow, WorkflowOrder, Workflows

logger = logging.getLogger("tsx.server")


async def load_workflows(workflows: Workflows, *, or_tell: bool) -> list[Workflow]:
    """All side by side. With `or_tell`, one that cannot be registered is told and left out; else the first ends the start."""
    orders = workflows_from_settings(workflows.settings)
    found = await asyncio.gather(*(_load(workflows, order, or_tell) for order in orders))
    return [workflow for workflow in found if workflow is not None]


def workflows_from_settings(settings: Settings) -> list[WorkflowOrder]:
    """What the setting `load_workflows` names: `all`, or `[name=]file` in the workflow store. Raises SettingError."""
    if not settings.load_workflows:
        return []
    store = settings.workflow_store or settings.model_store
    if store is None:
        raise SettingError("load_workflows is set, but neither workflow_store nor model_store is: give the archives' directory")
    if [entry.lower() for entry in settings.load_workflows] == ["all"]:
        return [WorkflowOrder(path.name, loaded_at_startup=True) for path in sorted(store.glob(f"*{SUFFIX}"))]
    return [_from_entry(entry) for entry in settings.load_workflows]


def _from_entry(entry: str) -> WorkflowOrder:
    name, equals, file = entry.partition("=")
    return WorkflowOrder(file, name, loaded_at_startup=True) if equals else WorkflowOrder(entry, loaded_at_startup=True)


async def _load(workflows: Workflows, order: WorkflowOrder, or_tell: bool) -> Workflow | None:
    try:
        workflow = await workflows.register(order)
    except TsxError as error:
        if not or_tell:
            raise
        logger.error("workflow %s is not served: %s", order.url, error.message)
        return None
    logger.info("workflow %s is loaded: POST /wfpredict/%s", workflow.name, workflow.name)
    return workflow
