"""A small transformer encoder on 32 tokens in raw int64, on one thread."""

import numpy as np
import torch

TOKENS, WORDS, WIDTH = 32, 1000, 64
model = None


class Encoder(torch.nn.Module):
    """An encoder of (batch, tokens) that returns (batch, 10)."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.places = torch.nn.Parameter(torch.randn(TOKENS, WIDTH))
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=4 * WIDTH, batch_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, num_layers=2)
        self.head = torch.nn.Linear(WIDTH, 10)

    def forward(self, tokens):
        return self.head(self.layers(self.words(tokens) + self.places).mean(1))


def start():
    global model
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Encoder().eval()


def sample():
    return np.random.default_rng(0).integers(0, WORDS, TOKENS, dtype=np.int64).tobytes()


def answers(bodies):
    rows = torch.frombuffer(bytearray().join(bodies), dtype=torch.int64).view(len(bodies), TOKENS)
    with torch.inference_mode():
        return model(rows).softmax(1).tolist()


def handle(data, context):
    if data is None:
        return start()
    return answers([row["body"] for row in data])
