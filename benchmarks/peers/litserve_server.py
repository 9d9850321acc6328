"""A LitServe server of the model in BENCHMARK_MODEL, on a given port."""

import importlib
import os
import sys
from pathlib import Path
from typing import Annotated

import litserve
from fastapi import Body

MODEL = Path(os.environ["BENCHMARK_MODEL"])
sys.path.insert(0, str(MODEL.parent))


class Model(litserve.LitAPI):
    def setup(self, device):
        self.model = importlib.import_module(MODEL.stem)
        self.model.start()

    def decode_request(
        self, request: Annotated[bytes, Body(media_type="application/octet-stream")]
    ):
        return request

    def batch(self, inputs):
        return inputs

    def predict(self, inputs):
        return self.model.answers(inputs)

    def unbatch(self, output):
        return output

    def encode_response(self, output):
        return output


if __name__ == "__main__":
    api = Model(max_batch_size=64, batch_timeout=0.001)
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1)
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[1]),
        num_api_servers=1,
        generate_client_file=False,
        log_level="error",
    )
