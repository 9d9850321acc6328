"""The feature `workflows`, which answers requests by graphs of models."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import TsxError
from tsx_runtime.feature import Feature, LoadedItem, ServerApp, StartItem
from tsx_runtime.features.workflows.manager import SUFFIX, WorkflowOrder, Workflows, store_of
from tsx_runtime.features.workflows.settings import WorkflowsSettings
from tsx_runtime.settings.schema import Settings
from tsx_runtime.sources import Trust
from tsx_runtime.sources.store_entries import resolve_entries

logger = logging.getLogger("tsx.server")


class WorkflowsFeature(Feature):
    store_of = staticmethod(store_of)

    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self.workflows = Workflows(registry)

    @classmethod
    def start_items(cls, settings: Settings) -> Sequence[StartItem]:
        entries = WorkflowsSettings.of(settings).load_workflows
        return [
            StartItem(cls, path, file, name)
            for name, file, path in resolve_entries(
                entries,
                store_of(settings),
                "workflow_store",
                lambda path: path.name.endswith(SUFFIX),
            )
        ]

    async def load(self, item: StartItem, *, log_failures: bool) -> LoadedItem | None:
        order = WorkflowOrder(item.url, item.name, loaded_at_startup=True)
        try:
            if item.path is None:
                workflow = await self.workflows.register(order, trust=Trust.OPERATOR)
            else:
                workflow = await self.workflows.register_path(item.path, order)
        except TsxError as error:
            if not log_failures:
                raise
            logger.error("workflow %s is not served: %s", item.url, error.message)
            return None
        logger.info("workflow %s is loaded: POST /wfpredict/%s", workflow.name, workflow.name)
        nodes = {"nodes": ", ".join(workflow.nodes)}
        return LoadedItem("workflow", workflow.name, f"/wfpredict/{workflow.name}", nodes)

    def add_routes(self, app: ServerApp) -> None:
        context = app.context
        if "inference" in app.roles:
            from tsx_runtime.features.workflows import predictions

            runs_workflow = predictions.WorkflowPredictions(
                self.workflows,
                context.settings.max_request_size,
                context.guards.inference,
                app.counts,
                app.is_confined,
            )
            app.model_apps.append((predictions.is_workflow_request, runs_workflow))
            app.document(predictions.workflow_path())
        if "management" in app.roles:
            from tsx_runtime.features.workflows import routes

            router = routes.build_router(self.workflows, context.max_management_body)
            app.add_routes(router, {"workflows": context.guards.management})

    async def close(self) -> None:
        self.workflows.close()
