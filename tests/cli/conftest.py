"""The command line in this process, far from the user's own settings and cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.torchserve import TorchServe
from tsx_cli.main import main

DIGITS = Path(__file__).parents[2] / "examples" / "digits"


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run(
    tmp_path: Path, session_cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], logging_as_it_was: None
) -> Run:
    """`tsx` with these words, in an empty directory."""
    monkeypatch.setenv("TSX_CACHE_DIR", str(session_cache))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Ended:
        capfd.readouterr()
        code = main([str(word) for word in words])
        out, err = capfd.readouterr()
        deadline = time.monotonic() + 2
        while code == 1 and not out + err and time.monotonic() < deadline:  # what a thread has yet to write
            time.sleep(0.01)
            out, err = capfd.readouterr()
        return Ended(code, out, err)

    return run


@pytest.fixture
def torchserve(processes: None, short_path: Path, free_ports: Callable[[int], list[int]]) -> Iterator[TorchServe]:
    made = TorchServe(short_path, free_ports(3))
    try:
        yield made
    finally:
        made.end()
