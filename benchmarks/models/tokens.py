"""A small transformer encoder with tsx's base handler; a body is 64 tokens as raw int64."""

import numpy as np
import torch
from encoder import Encoder
from ts.torch_handler.base_handler import BaseHandler


class Tokens(BaseHandler):
    def initialize(self, context):
        self.context, self.device, self.initialized = context, torch.device("cpu"), True
        torch.manual_seed(0)
        self.model = Encoder().eval()

    def preprocess(self, data):
        return torch.from_numpy(
            np.stack([np.frombuffer(row["body"], dtype=np.int64) for row in data])
        )
