"""The handler of models for tables."""

from __future__ import annotations

from tsx_archiver.metadata.tabular import HANDLER
from tsx_runtime.worker.handler_api.loader import BuiltinHandler

HANDLERS = {HANDLER: BuiltinHandler("tsx_runtime.features.tabular.worker.handler:TabularHandler")}
