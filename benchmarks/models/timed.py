"""A BaseHandler that answers with the time in which it loaded its model."""

import os
import time

import torch
from ts.torch_handler.base_handler import BaseHandler


class Timed(BaseHandler):
    def initialize(self, context):
        started = time.perf_counter()
        super().initialize(context)
        self.seconds = time.perf_counter() - started

    def preprocess(self, data):
        return torch.ones(len(data), 1)

    def postprocess(self, output):
        return [
            {"seconds": self.seconds, "pid": os.getpid(), "answer": value}
            for value in output.flatten().tolist()
        ]
