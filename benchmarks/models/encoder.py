"""A small transformer encoder."""

import torch

TOKENS, WORDS, WIDTH = 64, 1000, 128


class Encoder(torch.nn.Module):
    """An encoder of (batch, tokens) that returns (batch, 10)."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=4 * WIDTH, batch_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, num_layers=2)
        self.head = torch.nn.Linear(WIDTH, 10)

    def forward(self, tokens):
        return self.head(self.layers(self.words(tokens)).mean(1))
