"""Takes the screenshots for README.md from the running product, in about five minutes.

Run `python -m scripts.make_images` on a quiet machine. docs/images/page.png is the web page of a
server under load, docs/images/report.png the report of a short `tsx bench`.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright

from tests.support.browser import installed_browser
from tests.support.servers import FREE_PORTS, serving

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
DIGITS = ROOT / "examples" / "digits"
ARCHIVE = ["archive", "digits.pth", "--model-file", "model.py", "--handler", "handler.py"]
CONFIG = "batchSize: 16\nthreads: 1\n"
BENCH = [
    "--slo",
    "p99<100ms",
    "--input",
    DIGITS / "images",
    "--workers",
    "1",
    "--threads",
    "1",
    "--batch-sizes",
    "1,4,16",
]
BENCH += ["--connections", "1,4,16,64", "--duration", "1s", "--rounds", "2", "--time-limit", "4m"]
LOAD_SECONDS = 75  # more than the minute that the charts show
CLIENTS = 8
MAX_IMAGE_BYTES = 200_000


def tsx(directory: Path, *arguments: object) -> None:
    subprocess.run(
        [sys.executable, "-m", "tsx_cli", *map(str, arguments)], cwd=directory, check=True
    )


def load(address: str, stop_event: threading.Event) -> None:
    """Send requests at a rate that rises and falls."""
    body = (DIGITS / "images" / "7.png").read_bytes()
    start = time.monotonic()
    with httpx.Client(base_url=address, timeout=60) as client:
        while not stop_event.wait(0.025 + 0.02 * math.sin((time.monotonic() - start) / 6)):
            client.put("/predictions/digits", content=body).raise_for_status()


def take_page(browser: Any, directory: Path) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 1000}, color_scheme="light")
    with serving(["serve", directory / "digits.mar", *FREE_PORTS], directory, {}) as server:
        stop_event = threading.Event()
        clients = [
            threading.Thread(target=load, args=(server.address("predictions"), stop_event))
            for _ in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        try:
            page.goto(f"{server.address('models')}/ui/#/model/digits/overview")
            page.get_by_label("1 minute", exact=True).check()
            time.sleep(LOAD_SECONDS)
            save(page, "page.png")
        finally:
            stop_event.set()
            for client in clients:
                client.join()
            page.close()


def take_report(browser: Any, directory: Path) -> None:
    tsx(directory, "bench", "digits.mar", *BENCH, "--output", "report")
    page = browser.new_page(viewport={"width": 1280, "height": 1000}, color_scheme="light")
    page.goto((directory / "report" / "report.html").as_uri())
    save(page, "report.png")
    page.close()


def save(page: Any, name: str) -> None:
    """Save a screenshot with 128 colours, which makes the file a third as large."""
    file = IMAGES / name
    page.screenshot(path=file, animations="disabled")
    with Image.open(file) as picture:
        picture.convert("RGB").quantize(128).save(file, optimize=True)
    if file.stat().st_size > MAX_IMAGE_BYTES:
        raise SystemExit(f"{file} has {file.stat().st_size} bytes, more than {MAX_IMAGE_BYTES}")


def main() -> None:
    program = installed_browser()
    if program is None:
        raise SystemExit("needs a browser: scripts/install-browser installs Chromium")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        path = Path(directory)
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        (path / "model-config.yaml").write_text(CONFIG, encoding="utf-8")
        tsx(DIGITS, *ARCHIVE, "--config-file", path / "model-config.yaml", "--output", path)
        take_page(browser, path)
        take_report(browser, path)
        browser.close()


if __name__ == "__main__":
    main()
