"""Helpers to open, use and check the web page in a browser."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.support import forked
from tests.support.servers import Running

expect: Any = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright, which the extra `dev` installs"
).expect
expect.set_options(timeout=30_000)

PNG = {"content-type": "image/png"}
TOOLS = ("curl", "requests", "urllib", "JavaScript", "tsx")


def snippets_of(page: Any) -> dict[str, str]:
    """Return the playground's snippet for each tool that is installed here."""
    tools = [tool for tool in TOOLS if tool != "JavaScript" or shutil.which("node")]
    return {tool: page.locator(f"pre[data-for={tool}]").text_content() for tool in tools}


def run_snippet(
    tool: str, snippet: str, cwd: Path, **variables: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a snippet of the playground as a user would, with this Python's scripts first."""
    if tool == "JavaScript":
        command = ["node", "--input-type=module", "--eval", snippet]
    elif tool in ("requests", "urllib"):
        command = [sys.executable, "-c", snippet]
    else:
        command = ["bash", "-c", snippet]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **variables}
    result = forked.run(command, cwd=cwd, env=environment, capture_output=True, timeout=60)
    assert result.returncode == 0, result.stderr.decode()
    return result


def png(light: int, size: tuple[int, int] = (64, 48)) -> bytes:
    """Make a PNG file with a single grey level."""
    file = io.BytesIO()
    Image.new("L", size, light).save(file, "PNG")
    return file.getvalue()


def register(client: httpx.Client, *archives: str, workers: int = 1, **parameters: str) -> None:
    """Register archives of the model store."""
    for archive in archives:
        query = {"url": archive, "initial_workers": workers, **parameters}
        assert client.post("/models", params=query).status_code == 200


def predict(server: Running, model: str, **options: Any) -> httpx.Response:
    """Send a request to a model; `options` are those of `httpx.post`."""
    url = f"{server.address('predictions')}/predictions/{model}"
    return httpx.post(url, timeout=60, **options)


def open_view(page: Any, server: Running, route: str = "") -> None:
    """Open a view of the page."""
    page.goto(f"{server.address('models')}/ui/#/{route}")


def row(page: Any, name: str) -> Any:
    """Find the table row that contains a text."""
    return page.get_by_role("row", name=re.compile(name))


def click(view: Any, button: str, **options: Any) -> None:
    """Click a button in a page or a part of it."""
    view.get_by_role("button", name=button, **options).click()


def fill(view: Any, label: str, value: str, **options: Any) -> None:
    """Fill a field in a page or a part of it."""
    view.get_by_label(label, **options).fill(value)


def expect_heading(view: Any, name: Any, **options: Any) -> None:
    """Wait until a page or a part of it shows a heading."""
    expect(view.get_by_role("heading", name=name, **options)).to_be_visible()


def expect_text(view: Any, text: Any, **options: Any) -> None:
    """Wait until a page or a part of it shows a text."""
    expect(view.get_by_text(text, **options)).to_be_visible()


def send_json(page: Any, value: object) -> None:
    """Send JSON with the playground."""
    page.get_by_label("JSON", exact=True).last.fill(json.dumps(value))
    click(page, "Send")


def check_accessibility(page: Any, view: str, *, dark: bool = True) -> None:
    """Check that axe finds nothing serious in a view, in light and dark colours."""
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="needs axe, which the extra `dev` installs"
    ).Axe()
    _check_findings(axe, page, view)
    if dark:
        page.emulate_media(color_scheme="dark")
        _check_findings(axe, page, f"{view}, dark", runOnly=["color-contrast"])
        page.emulate_media(color_scheme="light")


def _check_findings(axe: Any, page: Any, view: str, **options: Any) -> None:
    response = axe.run(page, options={"resultTypes": ["violations"], **options}).response
    serious = [
        (finding["id"], [node["html"] for node in finding["nodes"]][:3])
        for finding in response["violations"]
        if finding["impact"] in ("serious", "critical")
    ]
    assert serious == [], view


def check_width(page: Any, view: str) -> None:
    """Check that neither the page nor any of its tables is wider than the window."""
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
    tables = "[...document.querySelectorAll('.scroll')]"
    wide = f"{tables}.filter((table) => table.scrollWidth > table.clientWidth).length"
    assert page.evaluate(wide) == 0, view
