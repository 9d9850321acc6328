"""The language of the code: docstrings, comments and names keep below the ceilings of this file.

ruff's rules of pydocstyle hold the form of docstrings. This module counts what they do not see.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("archiver", "benchmarks", "cli", "packages", "runtime", "scripts", "templates", "tests")
CEILINGS = {"docstring": 0.01, "comment": 0.06, "name": 0.003}

# A docstring of a function begins with a verb.
NO_VERB = re.compile(
    r"(Of|As|By|Where|With|Without|From|For|In|On|To|At|Behind|Beside|Before|After|Whose|Those"
    r"|That|Also|Half|Both|The same|What|Its?)\b|Raises [\w, `.]+\.?\s*$"
)
# A comment is a sentence or a noun phrase.
FRAGMENT = re.compile(
    r"#\s*(of|as|by|where|that|which|with|without|from|for|in|on|to|at|behind|beside|before|after"
    r"|else|so|what|whose|when|it|they|those|one|there|none|no|not|also|both|the same|times)\b"
)
MARKER = re.compile(r"#\s*(type:|noqa|fmt|!)")
EMPTY_NAME = re.compile(
    r"_*(each|found|own|place|given|kept|made|left|what|said|whole|told|there|those|these|them|mine"
    r"|its?|ones?|others?|same|rest|things?|words?|how|why|whom|whose)_*"
)


def sources() -> list[Path]:
    """Return the Python files of the repository, without generated ones."""
    return [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    ]


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {item.id for item in node.decorator_list if isinstance(item, ast.Name)}
            text = ast.get_docstring(node)
            if text and not decorators & {"property", "cached_property"}:
                yield node.lineno, text, bool(NO_VERB.match(text))


def _comments(source: str) -> Iterator[tuple[int, str, bool]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not MARKER.match(token.string):
            yield token.start[0], token.string, bool(FRAGMENT.match(token.string))


def _names(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        if name is not None:
            yield node.lineno, name, bool(EMPTY_NAME.fullmatch(name))


@pytest.mark.parametrize("kind", CEILINGS)
def test_the_language_of_the_code_keeps_below_its_ceiling(kind: str) -> None:
    count, faults = 0, list[str]()
    by_file = Counter[str]()
    for path in sources():
        source = path.read_text(encoding="utf-8")
        if kind == "comment":
            items = _comments(source)
        else:
            tree = ast.parse(source)
            items = _docstrings(tree) if kind == "docstring" else _names(tree)
        for line, text, is_fault in items:
            count += 1
            if is_fault:
                by_file[str(path.relative_to(ROOT))] += 1
                faults.append(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}")
    worst = [f"{number} in {name}" for name, number in by_file.most_common(10)]
    assert len(faults) <= CEILINGS[kind] * count, "\n".join([*worst, *faults[:20]])
