"""Models of MLflow's other flavours, by MLflow's own loader and its own reading of requests, one after the other."""

from __future__ import annotations

import json
import os
from typing import Any

from tsx_archiver.metadata.mlmodel import MANIFEST_KEY, MLmodel
from tsx_runtime.errors import BadRequest, TsxError
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handlers.base import choose_device
from tsx_runtime.worker.handlers.mlflow.model import missing_module, model_in

JSON, FORM = "application/json", "application/x-www-form-urlencoded"
DEVICE = "MLFLOW_DEFAULT_PREDICTION_DEVICE"


class MLflowPyfunc:
    """Answers as `mlflow models serve` does, except that a model that fails is answered with 500 rather than 400."""

    input_kind = "json"
    takes_raw_bodies = True

    def __init__(self) -> None:
        self.model: Any = None
        self.device: Any = None
        self.mlmodel = MLmodel()

    def initialize(self, context: Context) -> None:
        self.device = choose_device(context.system_properties.get("gpu_id"))
        directory, self.mlmodel = model_in(context)
        index = -1 if self.device.type == "cpu" else self.device.index or 0
        os.environ.setdefault(DEVICE, str(index if self.mlmodel.flavor == "transformers" else self.device))
        try:
            import mlflow.pyfunc  # an extra
        except ModuleNotFoundError as error:
            raise LoadError(f"A model of the flavour {self.mlmodel.flavor} is loaded by MLflow: pip install 'tsx-serve[mlflow]'") from error
        try:
            self.model = mlflow.pyfunc.load_model(str(directory))
        except ModuleNotFoundError as error:
            raise missing_module(error) from error

    def handle(self, data: Any, context: Context) -> list[Any]:
        if context.get_request_header(0, "describe") == "True":
            return [{"signature": self.mlmodel.data.get("signature"), MANIFEST_KEY: context.manifest.get(MANIFEST_KEY)}]
        return [self._answer(row.get("body") or row.get("data") or b"", context, index) for index, row in enumerate(data)]

    def _answer(self, body: Any, context: Context, index: int) -> str:
        from mlflow.exceptions import MlflowException  # an extra
        from mlflow.pyfunc.scoring_server import invocations

        kind = str(context.get_request_header(index, "content-type") or JSON)
        if kind.startswith(FORM):  # curl -d without a type
            kind = JSON
        try:
            answer = invocations(bytes(body), kind, self.model, self.model.metadata.get_input_schema())
        except MlflowException as error:
            cause = error.__context__
            if isinstance(cause, Exception) and "unexpected error while evaluating the model" in error.message:
                raise cause from error  # what the model raised: to MLflow that is the client's fault, whatever it is
            status, said = error.get_http_status_code(), {"message": error.message, "error_code": error.error_code}
        else:
            if answer.status < 400:
                context.set_response_content_type(index, answer.mimetype)
                return str(answer.response)
            status, said = answer.status, {"message": answer.response}
        context.set_response_status(status, idx=index)
        context.set_response_content_type(index, JSON)
        return json.dumps({"code": status, "type": (BadRequest if status < 500 else TsxError).type, **said}) + "\n"
