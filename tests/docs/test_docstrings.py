"""Docstrings that users read: their examples run, and the files that they mention exist."""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tsx_archiver import ArchiveSpec, write_archive
from tsx_runtime.testing import ServerUnderTest, serve

ROOT = Path(__file__).parents[2]
PUBLIC = (
    "tsx_archiver.inspecting",
    "tsx_archiver.opening",
    "tsx_archiver.writing",
    "tsx_client",
    "tsx_runtime.plugins.api",
    "tsx_runtime.testing",
    "tsx_runtime.worker.exceptions",
    "tsx_runtime.worker.handler_api.context",
    "tsx_runtime.worker.handler_api.metrics",
    "tsx_runtime.worker.handler_api.testing",
    "tsx_runtime.worker.handler_api.utils",
    "tsx_runtime.worker.handlers.base",
)
HANDLER = """
def handle(data, context):
    return [7 for row in data or ()]
"""
CODE = ("archiver", "runtime", "cli", "packages", "benchmarks", "scripts", "templates", "tests")
FILE = re.compile(r"(?<![\w./-])((?:[\w.-]+/)*[\w-]+\.(?:py|md|sh))\b")
SUFFIX = re.compile(r"\.(?:py|md|sh)\b")
COMMENT = re.compile(r"(?:^ *|  )# (.*)", re.MULTILINE)
# Files of users, examples and other projects, which need not exist.
OTHER_FILES = {
    "auto_benchmark.py",
    "code/inference.py",
    "coverage.py",
    "digits.py",
    "echo.py",
    "file.py",
    "json.py",
    "mkldnn_ir.py",
    "path/file.py",
}


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, processes: None
) -> Iterator[tuple[ServerUnderTest, Path]]:
    """Serve a model `digits`, and return the server and the directory of its archive."""
    directory = tmp_path_factory.mktemp("examples")
    (directory / "digits.py").write_text(HANDLER)
    (directory / "echo.py").write_text(HANDLER)
    (directory / "7.png").write_bytes(b"\x89PNG")
    archive = write_archive(ArchiveSpec("digits", handler=str(directory / "digits.py")), directory)
    with serve(archive) as running:
        yield running, directory


@pytest.mark.parametrize("module", PUBLIC)
def test_examples_of_public_docstrings_run(
    module: str, server: tuple[ServerUnderTest, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    running, directory = server
    monkeypatch.chdir(directory)
    names = {"Path": Path, "image": b"\x89PNG"}
    tests = doctest.DocTestFinder().find(import_module(module), extraglobs=names)
    runner = doctest.DocTestRunner()
    report: list[str] = []
    for test in tests:
        for example in test.examples:
            example.source = example.source.replace("http://127.0.0.1:8080", running.url)
        runner.run(test, out=report.append)
    assert runner.tries
    assert not runner.failures, "".join(report)


def test_files_mentioned_in_docstrings_and_comments_exist() -> None:
    sources = [path for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    file_names = {path.name for path in sources} | {
        page.name for page in ROOT.rglob("docs/**/*.md")
    }
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources
        for name in _named_files(path.read_text(encoding="utf-8"))
        if name.lower() not in OTHER_FILES
        and name not in file_names
        and not ("/" in name and _exists(name, path))
        and not (ROOT / name).exists()
    ]
    assert not missing


def test_python_files_mentioned_in_the_documentation_exist() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.rglob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    folders = (*CODE, "examples")
    file_names = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}
    users_files = OTHER_FILES | {"fastapi_lane.py", "hatch_build.py"}
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in pages
        for name in re.findall(r"`([\w./-]+\.py)(?:::\w+)?`", page.read_text(encoding="utf-8"))
        if name not in users_files
        and (Path(name).name not in file_names or not ("/" not in name or _exists(name, page)))
    ]
    assert not missing


def _named_files(source: str) -> Iterator[str]:
    if SUFFIX.search(source) is None:
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented):
            yield from FILE.findall(ast.get_docstring(node) or "")
    for comment in COMMENT.findall(source):
        yield from FILE.findall(comment)


def _exists(name: str, path: Path) -> bool:
    folders = (ROOT, *path.parents, *(ROOT / folder for folder in CODE), ROOT / "docs")
    roots = (*folders, ROOT / "runtime" / "tsx_runtime", ROOT / "cli" / "tsx_cli")
    return any((root / name).exists() for root in roots)
