"""A handler that returns the topics of a text."""

from typing import Any

import torch
from bert_tokens import padded, tokens_of
from ts.torch_handler.base_handler import BaseHandler


class TopicHandler(BaseHandler):
    input_kind = "text"

    def preprocess(self, data: Any) -> Any:
        texts = (row.get("data") or row.get("body") for row in data)
        return padded(
            [tokens_of(text if isinstance(text, str) else bytes(text).decode()) for text in texts]
        )

    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode():
            return self.model(**{name: tensor.to(self.device) for name, tensor in data.items()})

    def postprocess(self, data: Any) -> list[Any]:
        return [
            {f"topic {index}": value for index, value in enumerate(row)}
            for row in torch.softmax(data.float(), 1).tolist()
        ]
