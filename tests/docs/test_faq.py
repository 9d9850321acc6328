"""The FAQ page: its twelve answers, its nginx configuration, and its JavaScript."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.docs.test_documentation import LINK, ROOT
from tests.support.browser import installed_browser
from tests.support.models import make_model
from tests.support.servers import FREE_PORTS, serving
from tests.ui.conftest import ARGUMENTS, ECHO

PAGE = ROOT / "docs" / "start" / "faq.md"
SITE = "http://ml.example.com"
QUESTIONS = (
    "authentication",
    "return an image",
    "limit the memory",
    "serve on a GPU",
    "two GPUs",
    "numpy",
    "JavaScript",
    "metrics",
    "roll back",
    "nginx",
    "batching",
    "timeouts",
    "health check",
    "Windows",
    "upgrade",
    "sizing",
)


def answers() -> dict[str, str]:
    text = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return dict(part.split("\n", 1) for part in text)


def block(language: str) -> str:
    match = re.search(
        rf"^```{language}[^\n]*\n(.*?)^```$",
        PAGE.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    assert match is not None
    return match[1]


def test_each_question_has_an_answer_with_code_and_a_link() -> None:
    titles = list(answers())
    assert [[question in title for question in QUESTIONS].index(True) for title in titles] == list(
        range(16)
    )
    for title, answer in answers().items():
        assert "```" in answer, title
        links = [
            target for target in LINK.findall(answer.rpartition("More: ")[2]) if "://" not in target
        ]
        assert links, title
        assert [target for target in links if not (PAGE.parent / target).is_file()] == [], title


@pytest.mark.slow
def test_the_web_page_works_behind_nginx_with_a_prefix_and_a_host_name(
    processes: None, tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> None:
    nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/bin:/opt/homebrew/bin")
    if nginx is None:
        pytest.skip("needs nginx")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright, which the extra `dev` installs"
    )
    (port,) = free_ports(1)
    make_model(tmp_path / "echo.mar", ECHO)
    tokens = {
        "TSX_MANAGEMENT_TOKEN": "manage",
        "TSX_STATE_DIR": str(tmp_path / "state"),
        "TSX_CACHE_DIR": str(tmp_path / "cache"),
    }
    options = ["--set", f"cors_allowed_origin={SITE}:{port}", "--set", "trusted_proxies=127.0.0.1"]
    with serving(
        ["serve", tmp_path / "echo.mar", *options, *FREE_PORTS], tmp_path, tokens
    ) as server:
        config = block("nginx").replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        config = config.replace("http://127.0.0.1:8080", server.address("predictions"))
        config = config.replace("http://127.0.0.1:8081", server.address("models"))
        (tmp_path / "nginx.conf").write_text(config)
        running = subprocess.Popen([nginx, "-p", tmp_path, "-c", "nginx.conf", "-g", "daemon off;"])
        try:
            transport = httpx.HTTPTransport(retries=5)
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}",
                transport=transport,
                headers={"host": "ml.example.com"},
            ) as client:
                assert client.post("/ml/predictions/echo", json=[1]).json() == [1]
                # The location is relative to the prefix.
                assert client.get("/ml-admin/ui").headers["location"] == "ui/"
                foreign = {"origin": "http://evil.example", "authorization": "Bearer manage"}
                assert client.post("/ml-admin/models", headers=foreign).status_code == 403
            program = installed_browser()
            if program is not None:
                with sync_api.sync_playwright() as playwright:
                    names = f"--host-resolver-rules=MAP ml.example.com 127.0.0.1:{port}"
                    browser = playwright.chromium.launch(
                        executable_path=program, args=[*ARGUMENTS, names]
                    )
                    try:
                        use_page(browser.new_page(), port)
                    finally:
                        browser.close()
        finally:
            running.terminate()
            running.wait(30)


def use_page(page: Any, port: int) -> None:
    page.goto(f"{SITE}:{port}/ml-admin/ui")
    page.get_by_label("Management token").fill("manage")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="echo", exact=True).click()
    page.get_by_label("JSON", exact=True).last.fill("[1, 2]")
    page.get_by_role("button", name="Send").click()
    page.get_by_text("200 OK").wait_for()
    page.get_by_role("link", name="Server").click()
    page.get_by_role("row", name="cors_allowed_origin").wait_for()
    code = block("js").replace(
        "http://127.0.0.1:8080/predictions/digits", f"{SITE}:{port}/ml/predictions/echo"
    )
    assert (
        page.evaluate(f"async () => {{ {code}; return await predict(new Blob(['[3]'])) }}")
        is not None
    )
