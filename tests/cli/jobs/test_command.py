"""`tsx jobs` against a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.conftest import Run
from tests.support.models import make_model
from tests.support.servers import FREE_PORTS, Running, serving

FAILING_HANDLER = """
import os


def handle(data, context):
    if data is None:
        return None
    if not os.path.exists(os.environ["FICKLE_FILE"]):
        raise RuntimeError("not yet")
    return ["done"] * len(data)
"""


@pytest.fixture(scope="module")
def failing_server(
    processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Running, Path]]:
    """Start a server whose model fails until a file exists, and return both."""
    directory = tmp_path_factory.mktemp("server")
    make_model(directory / "fickle.mar", FAILING_HANDLER)
    environment = {
        "TSX_STATE_DIR": str(directory / "state"),
        "TSX_CACHE_DIR": str(directory / "cache"),
        "TSX_WORKER_PRELOAD": "false",
        "FICKLE_FILE": str(directory / "now"),
    }
    with serving(["serve", "fickle.mar", *FREE_PORTS], directory, environment) as running:
        yield running, directory / "now"


@pytest.fixture
def jobs(run: Run, failing_server: tuple[Running, Path]) -> Callable[..., Any]:
    """Run `tsx jobs` with these arguments, and return its JSON."""

    def call(*arguments: str) -> Any:
        result = run("jobs", *arguments, "--json", "--url", failing_server[0].address("models"))
        assert result.code == 0, result.err
        return json.loads(result.out)

    return call


def test_jobs_are_listed_retried_shown_and_cancelled(
    run: Run,
    jobs: Callable[..., Any],
    failing_server: tuple[Running, Path],
    until: Callable[[Callable[[], object]], None],
    tmp_path: Path,
) -> None:
    server, file = failing_server
    url = server.address("models")
    for arguments, text in (
        ("", "there are no jobs at"),
        ("--state failed", "there are no such jobs at"),
    ):
        result = run(f"jobs list {arguments}", "--url", url)
        assert (result.code, result.out.startswith(text)) == (0, True)
    assert jobs("list") == []
    assert run("jobs cancel --all --url", url).out == "there are no jobs to change\n"
    for _ in range(2):
        httpx.post(
            f"{server.address('predictions')}/predictions/fickle",
            content=b"x",
            headers={"prefer": "respond-async"},
            timeout=60,
        )
    until(lambda: len(jobs("list", "--state", "failed")) == 2)
    first, second = (job["id"] for job in jobs("list", "-n", "2"))
    assert jobs("show", first)["status"] == 500
    file.touch()
    assert jobs("retry", "--all", "--model", "fickle") == [first, second]
    until(lambda: jobs("show", second).get("status") == 200)
    output = run("jobs show", second, "-o", "answer.txt", "--url", url)
    assert (tmp_path / "answer.txt").read_text() == "done"
    assert "attempts" in output.out
    assert second in run("jobs list --model fickle --url", url).out
    until(lambda: jobs("list", "--state", "done") and not jobs("list", "--state", "running"))
    for command, text in (
        (f"cancel {second}", "is done"),
        ("show none", "Job none is not known"),
        ("cancel", "--all"),
        (f"retry {first} --all", "--all"),
        ("list --state lost", "--state takes"),
    ):
        result = run(f"jobs {command}", "--url", url)
        assert result.code != 0
        assert text in result.err
    assert jobs("cancel", "--all") == []
