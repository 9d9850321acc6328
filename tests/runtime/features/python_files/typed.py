"""Models with one annotation each, as a user writes them in one Python file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from pydantic import BaseModel, Field


class Text(BaseModel):
    text: str = Field(examples=["a good day"])


class Label(BaseModel):
    label: str
    score: float


@dataclass
class Point:
    x: float
    y: float = 0.0


class Row(TypedDict):
    age: Annotated[int, Field(ge=0)]
    name: str


class Error(Exception):
    """An error with a status, as of FastAPI or Starlette."""

    def __init__(self, status_code: int, detail: str) -> None:
        self.status_code, self.detail = status_code, detail


class Sentiment:
    """Tell whether a text is positive."""

    batchSize = 8  # noqa: N815  # as in model-config.yaml

    def load(self, device: str) -> None:
        self.words, self.device = {"good", "great"}, device

    def predict(self, batch: list[Text]) -> list[Label]:
        return [
            Label(label="good" if self.words & set(item.text.split()) else "bad", score=len(batch))
            for item in batch
        ]


class Model:
    def predict(self, item: Text) -> Label:
        if item.text == "teapot":
            raise Error(418, "short and stout")
        if item.text == "wrong":
            return {"label": item.text}  # type: ignore[return-value]  # tested
        return Label(label=item.text, score=1.0)


class Dataclass:
    def predict(self, item: Point) -> Point:
        return Point(item.y, item.x)


class TypedRow:
    def predict(self, item: Row) -> Row:
        return {"age": item["age"] + 1, "name": item["name"]}


class Str:
    def predict(self, item: str) -> str:
        return item.upper()


class Int:
    def predict(self, item: int) -> int:
        return item + 1


class Float:
    def predict(self, item: Annotated[float, Field(ge=0)]) -> float:
        return item / 2


class Bool:
    def predict(self, item: bool) -> bool:
        return not item


class Bytes:
    def predict(self, item: bytes) -> bytes:
        return item[::-1]


class ListOf:
    def predict(self, items: list[float]) -> list[float]:
        return items[::-1]


class DictOf:
    def predict(self, item: dict[str, int]) -> dict[str, int]:
        return {name: 2 * value for name, value in item.items()}


class Array:
    def predict(self, item: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]  # as users write
        return item.T


class Floats:
    def predict(self, item: npt.NDArray[np.float32]) -> str:
        return f"{item.dtype} {item.shape}"


class Arrays:
    def predict(self, batch: list[np.ndarray]) -> np.ndarray:  # type: ignore[type-arg]  # as users write
        return np.stack(batch).sum(axis=1)


class Tensor:
    def predict(self, item: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"double": item * 2}


class Picture:
    def predict(self, image: Image.Image) -> Image.Image:
        return image.rotate(90, expand=True)


class Several:
    def predict(self, image: Image.Image, top: int = 3, tags: list[str] | None = None) -> list[Any]:
        return [image.size, top, tags]


class Untyped:
    def predict(self, item):  # type: ignore[no-untyped-def]  # tested
        if item == b"object":
            return object()
        return [type(item).__name__, item if not isinstance(item, bytes) else len(item)]


class Choice:
    def predict(self, item: Literal["a", "b"] | None) -> str:
        return f"{item}!"


class Coroutine:
    async def predict(self, item: Text) -> Label:
        await asyncio.sleep(0)
        return Label(label=item.text, score=0.5)


class CoroutineBatch:
    async def load(self) -> None:
        self.loaded = await asyncio.sleep(0, "loaded")

    async def predict(self, batch: list[Text]) -> list[str]:
        await asyncio.sleep(0)
        return [f"{self.loaded} {item.text}" for item in batch]


class Stream:
    def predict(self, item: Text) -> Iterator[Label]:
        for word in item.text.split():
            if word == "fail":
                raise ValueError("a bad word")
            yield Label(label=word, score=0.0)


class AsyncStream:
    async def predict(self, item: Text) -> AsyncIterator[str]:
        for word in item.text.split():
            await asyncio.sleep(0)
            yield f" {word}\n"


class BatchStream:
    def predict(self, batch: list[Text]) -> Iterator[list[int]]:
        for number in range(2):
            yield [len(item.text) + number for item in batch]


def predict(item: Text) -> str:
    return f"function {item.text}"
