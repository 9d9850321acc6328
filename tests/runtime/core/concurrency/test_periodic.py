"""Periodic background tasks of the server."""

from __future__ import annotations

import asyncio

import pytest

from tsx_runtime.core.concurrency.periodic import repeat, running


def test_an_error_is_logged_and_other_tasks_continue(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ZeroDivisionError("no such number")

    async def serve() -> None:
        calls: asyncio.Queue[None] = asyncio.Queue()
        async with running(
            "charts stand still", repeat(0.0, fail), repeat(0.0, lambda: calls.put(None))
        ):
            for _ in range(10):
                await calls.get()

    asyncio.run(serve())
    assert "charts stand still until" in caplog.text
    assert "no such number" in caplog.text
