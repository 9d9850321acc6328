"""The feature `workflows`, which answers requests by graphs of models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.feature import Feature
from tsx_runtime.features.workflows.manager import Workflows

if TYPE_CHECKING:
    from tsx_runtime.http.app import ServerApp


class WorkflowsFeature(Feature):
    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self.workflows = Workflows(registry)

    def add_routes(self, app: ServerApp) -> None:
        context = app.context
        if "inference" in app.roles:
            from tsx_runtime.features.workflows.predictions import (
                WorkflowPredictions,
                runs_workflow,
            )
            from tsx_runtime.http.routes import openapi

            predictions = WorkflowPredictions(
                self.workflows,
                context.settings.max_request_size,
                context.guards.inference,
                app.counts,
                app.is_confined,
            )
            app.model_apps.append((lambda scope: runs_workflow(scope["path"]), predictions))
            app.document(openapi.workflow_path())
        if "management" in app.roles:
            from tsx_runtime.features.workflows import routes as workflows

            router = workflows.build_router(self.workflows, context.max_management_body)
            app.add_routes(router, {"workflows": context.guards.management})

    async def close(self) -> None:
        self.workflows.close()
