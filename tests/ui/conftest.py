"""A real browser for the tests of the web page, and the servers that it opens.

The tests are skipped if no browser is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.browser import installed_browser
from tests.support.models import make_model
from tests.support.servers import FREE_PORTS, Running, serving

# These options keep Chromium from starting a process for software rendering.
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-software-rasterizer",
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
]
TIMEOUT = 30_000  # ms

# The page polls every 1, 2 or 5 seconds; the tests poll five times as often.
FASTER_POLLS = """
const wait = window.setTimeout.bind(window);
window.setTimeout = (work, ms, ...rest) => wait(work, ms <= 5000 && ms % 1000 === 0 ? ms / 5 : ms, ...rest);
"""

IMAGE_HANDLER = """
import io
from PIL import Image


class BrightnessClassifier:
    input_kind = "image"

    def initialize(self, context):
        self.version = context.manifest["model"]["modelVersion"]

    def handle(self, data, context):
        return [self.classify(row["body"]) for row in data]

    def classify(self, body):
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
        for row in rows:
            if row == "fail":
                raise RuntimeError("the echo is broken")
            if row == "fail otherwise":
                raise RuntimeError("the echo is lost")
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
    """Start a browser for a module.

    The thread is occupied by playwright's event loop until the browser ends.
    """
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright, which the extra `dev` installs"
    )
    program = installed_browser()
    if program is None:
        pytest.skip("needs a browser: scripts/install-browser installs Chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model store with every model of these tests."""
    directory = tmp_path_factory.mktemp("store")
    make_model(directory / "luminance.mar", IMAGE_HANDLER)
    make_model(directory / "luminance2.mar", IMAGE_HANDLER, name="luminance", version="2.0")
    make_model(directory / "echo.mar", ECHO)
    make_model(directory / "odd.mar", ODD)
    for number in range(1, 13):
        make_model(directory / f"many{number}.mar", ECHO, name="many", version=f"{number}.0")
    return directory


@pytest.fixture(scope="module")
def start(
    browser: Any, store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Running]]:
    """Return a function that starts `tsx serve` with arguments and settings.

    The servers end with the module.
    """
    with ExitStack() as stack:

        def begin(
            *arguments: object, ports: Sequence[str] = FREE_PORTS, **settings: object
        ) -> Running:
            directory = tmp_path_factory.mktemp("server")
            environment = {
                "TSX_CACHE_DIR": str(store / "cache"),
                "TSX_STATE_DIR": str(directory / "state"),
                **{f"TSX_{name.upper()}": str(value) for name, value in settings.items()},
            }
            command = ["serve", "--model-store", store, *arguments, *ports]
            return stack.enter_context(serving(command, directory, environment))

        yield begin


@pytest.fixture(scope="module")
def empty_server(start: Callable[..., Running]) -> Running:
    """Start a server without models, for tests that register models with `management`."""
    return start()


@pytest.fixture
def management(empty_server: Running) -> Iterator[httpx.Client]:
    """Yield a client of the empty server's management API, and remove all models afterwards."""
    with httpx.Client(base_url=empty_server.address("models"), timeout=60) as client:
        yield client
        for model in client.get("/models").json()["models"]:
            for version in reversed(client.get(f"/models/{model['modelName']}/all").json()):
                client.delete(f"/models/{model['modelName']}/{version['modelVersion']}")
            client.delete(f"/models/{model['modelName']}")


@pytest.fixture(scope="module")
def context(browser: Any) -> Iterator[Any]:
    """Open one window for a module, since the browser starts a process for each window."""
    context = browser.new_context(
        permissions=["clipboard-read", "clipboard-write"],
        viewport={"width": 1280, "height": 900},
        reduced_motion="reduce",
    )
    context.set_default_timeout(TIMEOUT)
    context.add_init_script(FASTER_POLLS)
    yield context
    context.close()


@pytest.fixture
def page(context: Any) -> Iterator[Any]:
    """Open a page as a new visitor.

    The test fails if the browser blocks something, logs an error, or calls another host.
    """
    page = context.new_page()
    problems: list[str] = []
    page.on(
        "console",
        lambda message: problems.append(message.text) if message.type == "error" else None,
    )
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request", lambda request: None if _is_local(request.url) else problems.append(request.url)
    )
    yield page
    # A test may have disabled the page's storage.
    with suppress(Exception):
        page.evaluate("localStorage.clear()")
    page.close()
    # The browser logs error statuses and stopped servers, which are expected.
    allowed = ("Failed to load resource", "net::ERR_CONNECTION_REFUSED")
    assert [problem for problem in problems if not any(text in problem for text in allowed)] == []


def _is_local(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "blob:", "data:"))
