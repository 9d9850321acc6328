"""The handlers of MLflow's models."""

from __future__ import annotations

from tsx_archiver.metadata.mlmodel import PYFUNC, PYTORCH
from tsx_runtime.worker.handler_api.loader import BuiltinHandler

HANDLERS = {
    PYFUNC: BuiltinHandler("tsx_runtime.features.mlflow.worker.pyfunc:MLflowPyfunc"),
    PYTORCH: BuiltinHandler("tsx_runtime.features.mlflow.worker.pytorch:MLflowPyTorch"),
}
