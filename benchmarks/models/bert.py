"""A text classifier of the shape of a small BERT.

It takes int64 tokens and their mask (batch, length) and returns logits (batch, classes).
"""

import torch
from bert_layer import WIDTH, Layer
from torch import nn

WORDS, LAYERS, MAX_TOKENS, CLASSES = 8192, 6, 128, 8


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(MAX_TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        features = self.norm(
            self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        )
        mask_view = mask[:, None, None, :].bool()
        for layer in self.layers:
            features = layer(features, mask_view)
        logits: torch.Tensor = self.head(features[:, 0])
        return logits
