"""The feature `mlflow`, whose handler `mlflow_pyfunc` needs the package mlflow."""

from __future__ import annotations

from tsx_archiver import OpenArchive
from tsx_archiver.metadata.mlmodel import PYFUNC
from tsx_runtime.core.models.plan import HandlerDefaults
from tsx_runtime.feature import Feature


class MlflowFeature(Feature):
    def handler_defaults(
        self, name: str, handler: str, archive: OpenArchive
    ) -> HandlerDefaults | None:
        return HandlerDefaults(package=("mlflow", "mlflow")) if handler == PYFUNC else None
