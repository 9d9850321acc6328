"""What several tests of the web page do with it."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.support.servers import Running

expect: Any = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright, which the extra `dev` installs"
).expect
expect.set_options(timeout=30_000)


TOOLS = ("curl", "requests", "urllib", "JavaScript", "tsx")  # that the playground has lines for


def command_of(tool: str, line: str) -> list[str]:
    """Return what runs a line of the playground."""
    if tool == "JavaScript":
        return ["node", "--input-type=module", "--eval", line]
    return [sys.executable, "-c", line] if tool in ("requests", "urllib") else ["bash", "-c", line]


def png(light: int, size: tuple[int, int] = (64, 48)) -> bytes:
    file = io.BytesIO()
    Image.new("L", size, light).save(file, "PNG")
    return file.getvalue()


def register(client: httpx.Client, *archives: str, workers: int = 1) -> None:
    for archive in archives:
        assert (
            client.post("/models", params={"url": archive, "initial_workers": workers}).status_code
            == 200
        )


def look(page: Any, server: Running, where: str = "") -> None:
    page.goto(f"{server.address('models')}/ui/#/{where}")


def send_json(page: Any, value: object) -> None:
    page.get_by_label("JSON", exact=True).last.fill(json.dumps(value))
    page.get_by_role("button", name="Send").click()
