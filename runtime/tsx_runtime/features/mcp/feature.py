"""The feature `mcp`, which offers models as tools to agents."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec

from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.scheduling.strategies import EntryPoint
from tsx_runtime.core.workers.worker import Worker
from tsx_runtime.errors import BadRequest, SettingError
from tsx_runtime.feature import Feature, ServerApp
from tsx_runtime.features.mcp.settings import McpSettings

PACKAGE = "mcp_types"  # a package of the SDK since its version 2
INSTALL = "needs the extra mcp, which is not installed: pip install 'tsx-serve[mcp]'"

logger = logging.getLogger("tsx.registry")


class McpFeature(Feature):
    def __init__(self, registry: Registry) -> None:
        super().__init__(registry)
        self.offers_all = McpSettings.of(registry.settings).mcp
        if self.offers_all and find_spec(PACKAGE) is None:
            raise SettingError(f"mcp = true {INSTALL}")

    def offered_versions(self) -> list[ModelVersion]:
        """Return the default versions that are tools once they have reported a signature."""
        defaults = (model.versions[model.default] for model in self.registry.models.values())
        return [
            version
            for version in defaults
            if (self.offers_all if version.config.mcp is None else version.config.mcp)
        ]

    def around(self, version: ModelVersion, entry: EntryPoint) -> EntryPoint | None:
        if version.config.mcp and find_spec(PACKAGE) is None:
            raise BadRequest(f"mcp: true in the model-config.yaml of {version.name} {INSTALL}")
        return None

    @asynccontextmanager
    async def loading(self, version: ModelVersion, worker: Worker) -> AsyncIterator[None]:
        yield
        if version.signature is None and version.config.mcp:
            logger.warning(
                "%s: it is not offered by MCP, because its handler reports no signature (mcp.md)",
                version.label,
            )

    def add_routes(self, app: ServerApp) -> None:
        if "inference" not in app.roles:
            return
        from starlette.routing import Route  # a slow import

        from tsx_runtime.features.mcp.routes import McpRoute  # imports FastAPI

        guard = app.context.guards.inference
        # Clients of MCP expect 401 where those of TorchServe expect 400.
        app.guards["mcp"] = guard and guard._replace(status=401)
        route = McpRoute(app, self.offered_versions, always=self.offers_all)
        app.router.routes.append(Route("/mcp", route))
        if self.offers_all:
            app.paths["/mcp"] = {"POST": "Call models as tools of an agent (MCP)"}
