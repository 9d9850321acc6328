"""Parts of results.json that stand for themselves: classes of inputs by size, starts of a server, cores."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=False)


class SizeClass(Part):
    """Accepted answers to inputs of these sizes, both ends included."""

    smallest: int  # bytes
    largest: int
    ok: int
    p50_ms: float
    p99_ms: float


class ColdStart(Part):
    """One start of a server: from its process to being ready, the model's loading included, and its first answer after that."""

    ready_seconds: float
    first_answer_ms: float | None = None  # None: it was refused


class PinnedCores(Part):
    """The cores of both sides; those of the server are empty where it was running already."""

    server: list[int]
    generator: list[int]
