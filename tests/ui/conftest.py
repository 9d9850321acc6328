"""A real browser for tests of the web page, and a server to look at.

Without a browser these tests are skipped, and say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import installed_browser
from tests.support.models import make_model
from tests.support.servers import Running, serving

# Without the process that would draw by the processor what a graphics card draws
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-software-rasterizer",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
]
TIMEOUT = 30_000  # ms, on a machine that has other things to do

LOOKS = """
import io
from PIL import Image


class Looks:
    input_kind = "image"

    def initialize(self, context):
        self.version = context.manifest["model"]["modelVersion"]

    def handle(self, data, context):
        return [self.look(row["body"]) for row in data]

    def look(self, body):
        image = Image.open(io.BytesIO(body)).convert("L")
        light = image.resize((1, 1)).getpixel((0, 0)) / 255
        return {"light": light, "dark": 1 - light} | ({"new": 0.5} if self.version != "1.0" else {})
"""

ECHO = """
class Echo:
    input_kind = "json"

    def initialize(self, context):
        pass

    def handle(self, data, context):
        rows = [row.get("data", row.get("body")) for row in data]
        if any(row == "fail" for row in rows):
            raise RuntimeError("the echo is broken")
        if any(row == "fail otherwise" for row in rows):
            raise RuntimeError("the echo is lost")
        for row in rows:
            if str(row).startswith("fail with"):
                raise ValueError(row)
        return rows
"""


ODD = """
import json
import time


class Odd:
    input_kind = "json"

    def initialize(self, context):
        pass

    def handle(self, data, context):
        return [self.answer(position, row.get("data", row.get("body")), context) for position, row in enumerate(data)]

    def answer(self, position, row, context):
        wanted = json.loads(row) if isinstance(row, (bytes, bytearray)) else row
        time.sleep(wanted.get("seconds", 0))
        if "bytes" in wanted:
            context.set_response_content_type(position, "application/octet-stream")
            return bytes(range(256)) * wanted["bytes"]
        if "status" in wanted:
            context.set_response_status(wanted["status"], "", position)
        return wanted["answer"]
"""


@pytest.fixture(scope="module")
def browser(processes: None) -> Iterator[Any]:
    """For a module: playwright's loop runs in this thread, and other modules want loops of their
    own.
    """
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright, which the extra `dev` installs"
    )
    program = installed_browser()
    if program is None:
        pytest.skip("needs a browser: scripts/install-browser installs Chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("store")
    make_model(directory / "looks.mar", LOOKS)
    make_model(directory / "looks2.mar", LOOKS, name="looks", version="2.0")
    make_model(directory / "echo.mar", ECHO)
    make_model(directory / "odd.mar", ODD)
    for number in range(1, 13):
        make_model(directory / f"many{number}.mar", ECHO, name="many", version=f"{number}.0")
    return directory


@pytest.fixture(scope="module")
def start(
    processes: None, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Running]]:
    """`tsx serve` with these words and settings; none outlives the module."""
    with ExitStack() as held:

        def begin(words: Sequence[object] = (), **settings: str) -> Running:
            place = tmp_path_factory.mktemp("server")
            environment = {
                "TSX_CACHE_DIR": str(store / "cache"),
                "TSX_STATE_DIR": str(place / "state"),
            }
            environment |= {"TSX_WORKER_PRELOAD": "false"}
            environment |= {f"TSX_{name.upper()}": value for name, value in settings.items()}
            return held.enter_context(
                serving(["serve", "--model-store", store, *words], place, environment)
            )

        yield begin


@pytest.fixture(scope="module")
def context(browser: Any) -> Iterator[Any]:
    """For a module: a process of the browser for each test would take longer than the test."""
    context = browser.new_context(
        permissions=["clipboard-read", "clipboard-write"],
        viewport={"width": 1280, "height": 900},
        reduced_motion="reduce",
    )
    context.set_default_timeout(TIMEOUT)
    yield context
    context.close()


@pytest.fixture
def page(context: Any) -> Iterator[Any]:
    """A page of a new visitor.

    Whatever the browser refuses, logs as an error, or fetches from elsewhere fails the test.
    """
    page = context.new_page()
    problems: list[str] = []
    page.on(
        "console",
        lambda message: problems.append(message.text) if message.type == "error" else None,
    )
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request",
        lambda request: problems.append(request.url) if not _is_own(request.url) else None,
    )
    yield page
    with suppress(Exception):  # a test has taken it away from the page
        page.evaluate("localStorage.clear()")
    page.close()
    allowed = (
        "Failed to load resource",
        "net::ERR_CONNECTION_REFUSED",
    )  # what the browser says of a status, and of a stopped server
    assert [problem for problem in problems if not any(text in problem for text in allowed)] == []


def _is_own(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "blob:", "data:"))
