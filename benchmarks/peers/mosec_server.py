"""A Mosec server of the model in BENCHMARK_MODEL; it takes Mosec's options."""

import importlib
import os
import sys
from pathlib import Path

from mosec import Server, Worker

MODEL = Path(os.environ["BENCHMARK_MODEL"])
BATCH = int(os.environ.get("BENCHMARK_BATCH", "64"))
sys.path.insert(0, str(MODEL.parent))


class Model(Worker):
    def __init__(self):
        self.model = importlib.import_module(MODEL.stem)
        self.model.start()

    def deserialize(self, data):
        return data

    def forward(self, data):
        return self.model.answers(data)


if __name__ == "__main__":
    server = Server()
    # 1 ms is the shortest possible wait.
    server.append_worker(Model, num=1, max_batch_size=BATCH, max_wait_time=1)
    server.run()
