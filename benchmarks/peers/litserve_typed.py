"""A LitServe server of the typed model in BENCHMARK_MODEL, on a given port."""

import importlib
import os
import sys
from pathlib import Path

import litserve

MODEL = Path(os.environ["BENCHMARK_MODEL"])
sys.path.insert(0, str(MODEL.parent))
types = importlib.import_module(MODEL.stem)


class Model(litserve.LitAPI):
    def setup(self, device):
        self.model = types.Sentiment()
        self.model.load(device)

    def decode_request(self, request: types.Text) -> types.Text:
        return request

    def batch(self, inputs):
        return inputs

    def predict(self, batch):
        return self.model.predict(batch)

    def unbatch(self, output):
        return output

    def encode_response(self, output) -> types.Label:
        return output


if __name__ == "__main__":
    api = Model(max_batch_size=32, batch_timeout=0.001)
    server = litserve.LitServer(api, accelerator="cpu", devices=1, workers_per_device=1)
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[1]),
        num_api_servers=1,
        generate_client_file=False,
        log_level="error",
    )
