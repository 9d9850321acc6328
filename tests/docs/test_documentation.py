"""What the documentation shows is what happens: its marked blocks run, in the order of the page, against the real commands.

A fence is marked behind its language: `python write NAME` is written to a file, `python run` is executed, and of `console run` every
line that begins with `$ ` is a command; the lines below it are its output, in which `...` stands for anything. `tsx serve` stays up
until the page ends or serves something else. The ports 8080 to 8082 of the page are free ports of this machine.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+) (run|write (\S+))\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md"), *ROOT.glob("benchmarks/*.md")])


class Block(NamedTuple):
    language: str
    file: str | None  # to write the text to; None: run it
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(language, file or None, text) for language, _, file, text in BLOCK.findall(page.read_text(encoding="utf-8"))]


def commands(text: str) -> Iterator[tuple[str, str]]:
    """(command, expected output) of a console block."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


class Reader:
    """A person at a terminal, who types what the page says."""

    def __init__(self, directory: Path, ports: list[int]) -> None:
        self.directory = directory
        self.ports = dict(zip((8080, 8081, 8082), ports, strict=True))
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("TSX_")}
        self.environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{self.environment['PATH']}"
        self.environment["TSX_CACHE_DIR"] = str(directory / "cache")
        for name, port in zip(("INFERENCE", "MANAGEMENT", "METRICS"), self.ports.values(), strict=True):
            self.environment[f"TSX_{name}_ADDRESS"] = f"http://127.0.0.1:{port}"
        self.server: subprocess.Popen[bytes] | None = None

    def follow(self, block: Block) -> None:
        if block.file is not None:
            (self.directory / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            self._run([sys.executable, "-c", self._with_ports(block.text)], "")
        else:
            for command, expected in commands(block.text):
                if command.startswith("tsx serve "):
                    self._serve(command)
                else:
                    self._run(["bash", "-c", self._with_ports(command)], self._with_ports(expected))

    def _with_ports(self, text: str) -> str:
        return re.sub(r"(?<=127\.0\.0\.1:)80(80|81|82)\b", lambda match: str(self.ports[int(match[0])]), text)

    def _run(self, command: list[str], expected: str) -> None:
        done = subprocess.run(
            command,
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout}"
        pattern = re.escape(expected.strip()).replace(r"\.\.\.", ".*")
        assert re.fullmatch(pattern, done.stdout.strip(), re.DOTALL), (
            f"{command[-1]}\nprinted\n{done.stdout}\nand the page says\n{expected}"
        )

    def _serve(self, command: str) -> None:
        self.stop()
        log = self.directory / "server.log"
        with log.open("wb") as output:
            self.server = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self.directory, env=self.environment, stdout=output, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + 120
        while not self._healthy():
            assert self.server.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline, log.read_text(errors="replace")

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[8080]}/ping", timeout=5) as answer:
                return bool(json.load(answer)["status"] == "Healthy")
        except (OSError, ValueError):
            time.sleep(0.02)  # between two tries, not instead of an event
            return False

    def stop(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            assert self.server.wait(60) == 0, (self.directory / "server.log").read_text(errors="replace")
            self.server = None


@pytest.fixture
def reader(tmp_path: Path, free_ports: Callable[[int], list[int]]) -> Iterator[Reader]:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    person = Reader(tmp_path, free_ports(3))
    yield person
    if person.server is not None:
        person.server.kill()
        person.server.wait()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_shows_is_what_happens(page: Path, reader: Reader) -> None:
    for block in blocks(page):
        reader.follow(block)
    reader.stop()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []
