"""The language of the code: docstrings, comments and names keep below the ceilings of this file.

ruff's rules of pydocstyle hold the form of docstrings. This module counts what they do not see.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

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
COMMENT = re.compile(r"(?:^\s*|  )(#.*)")
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


def _items(tree: ast.Module, source: str) -> Iterator[tuple[str, int, str, bool]]:
    """Yield the kind, line and text of each docstring, name and comment, and whether it is bad."""
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        if name is not None:
            yield "name", node.lineno, name, bool(EMPTY_NAME.fullmatch(name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {item.id for item in node.decorator_list if isinstance(item, ast.Name)}
            text = ast.get_docstring(node)
            if text and not decorators & {"property", "cached_property"}:
                yield "docstring", node.lineno, text, bool(NO_VERB.match(text))
    for number, line in enumerate(source.splitlines(), 1):
        if (comment := COMMENT.search(line)) and not MARKER.match(comment[1]):
            yield "comment", number, comment[1], bool(FRAGMENT.match(comment[1]))


def test_the_language_of_the_code_keeps_below_its_ceilings() -> None:
    counts, faults = Counter[str](), defaultdict[str, list[str]](list)
    for path in sources():
        source = path.read_text(encoding="utf-8")
        for kind, line, text, is_fault in _items(ast.parse(source), source):
            counts[kind] += 1
            if is_fault:
                faults[kind].append(f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}")
    assert min(counts[kind] for kind in CEILINGS) > 1000
    for kind, ceiling in CEILINGS.items():
        assert len(faults[kind]) <= ceiling * counts[kind], "\n".join([kind, *faults[kind][:30]])
