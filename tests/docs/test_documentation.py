"""The marked blocks of the documentation run in order, with the real commands.

A fence is marked after its language: the text of `python write NAME` is written to a file,
`python run` is executed, and each line of `console run` that begins with `$ ` is a command. The
lines below it are its output, in which `...` stands for any text. `tsx serve` runs until the page
ends or starts another server. The ports 8080 to 8082, 7070 and 7071 of a page become free ports.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support import forked

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+) (run|write (\S+))\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*/README.md"),
        *ROOT.glob("benchmarks/*.md"),
    ]
)
PORTS = {"INFERENCE": 8080, "MANAGEMENT": 8081, "METRICS": 8082}
# Programs that are forked instead of started by a shell.
PROGRAMS = {"python": sys.executable, "tsx": "tsx"}
GRPC_PORTS = {"INFERENCE": 7070, "MANAGEMENT": 7071}


class Block(NamedTuple):
    language: str
    # the file to which the text is written; None if the text is run
    file: str | None
    text: str


def blocks(page: Path) -> list[Block]:
    return [
        Block(language, file or None, text)
        for language, _, file, text in BLOCK.findall(page.read_text(encoding="utf-8"))
    ]


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Return each command of a console block and its expected output."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def command_words(command: str) -> list[str]:
    """Return the arguments of a command; other than Python programs, it runs in a shell."""
    name, unquoted = command.partition(" ")[0], re.sub(r"'[^']*'", "", command)
    if name in PROGRAMS and not set("|&;<>()$`*?#~\n") & set(unquoted):
        return [PROGRAMS[name], *shlex.split(command)[1:]]
    return ["bash", "-c", f"exec {command}" if command.startswith("tsx serve ") else command]


class Reader:
    """A person at a terminal who types the commands of a page."""

    def __init__(
        self, directory: Path, environment: dict[str, str], start_server: Callable[..., Any]
    ) -> None:
        self.directory = directory
        self.environment = environment
        self.addresses = {
            f"127.0.0.1:{port}": environment[f"TSX_{role}_ADDRESS"][7:]
            for role, port in PORTS.items()
        }
        self.addresses |= {
            f"127.0.0.1:{port}": f"127.0.0.1:{environment[f'TSX_GRPC_{role}_PORT']}"
            for role, port in GRPC_PORTS.items()
        }
        self.start_server = start_server
        self.server: Any = None

    def follow(self, block: Block) -> None:
        if block.file is not None:
            (self.directory / block.file).write_text(
                self._with_addresses(block.text), encoding="utf-8"
            )
        elif block.language == "python":
            self._run([sys.executable, "-c", self._with_addresses(block.text)], "")
        else:
            for command, expected in commands(block.text):
                if command.startswith("tsx serve "):
                    self.stop()
                    self.server = self.start_server(
                        command_words(command), self.directory, self.environment
                    )
                else:
                    self._run(
                        command_words(self._with_addresses(command)), self._with_addresses(expected)
                    )

    def stop(self) -> None:
        if self.server is not None:
            assert self.server.stop() == 0, self.server.log

    def _with_addresses(self, text: str) -> str:
        for port_text, address in self.addresses.items():
            text = text.replace(port_text, address)
        return text

    def _run(self, command: list[str], expected: str) -> None:
        result = forked.run(
            command,
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, f"{command[-1]}\n{result.stdout}"
        pattern = re.escape(expected.strip()).replace(r"\.\.\.", ".*")
        assert re.fullmatch(pattern, result.stdout.strip(), re.DOTALL), (
            f"{command[-1]}\nprinted\n{result.stdout}\nand the page says\n{expected}"
        )


@pytest.fixture
def reader(
    tmp_path: Path,
    user_environment: dict[str, str],
    start_server: Callable[..., Any],
    free_ports: Callable[[int], list[int]],
) -> Reader:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    ports = {
        f"TSX_GRPC_{role}_PORT": str(port)
        for role, port in zip(GRPC_PORTS, free_ports(2), strict=True)
    }
    # The client package can be imported as if it were installed.
    client = {"PYTHONPATH": str(ROOT / "packages" / "tsx-client" / "src")}
    return Reader(
        tmp_path, user_environment | ports | client | {"TSX_ENABLE_GRPC": "true"}, start_server
    )


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_commands_of_a_page_print_the_documented_output(page: Path, reader: Reader) -> None:
    # The README runs with the default settings, like its readers' servers.
    if page.name == "README.md":
        reader.environment["TSX_WORKER_PRELOAD"] = "true"
    for block in blocks(page):
        reader.follow(block)
    reader.stop()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_are_valid(page: Path) -> None:
    targets = [
        target for target in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target
    ]
    assert [target for target in targets if not (page.parent / target).exists()] == []
