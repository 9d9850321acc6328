"""Writes the file tree into README.md, each line from the first sentence of its file; with --check it only says whether that is needed."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- made by scripts/tree.py -->\n```\n", "```\n<!-- end -->"
PACKAGES = [
    "archiver/tsx_archiver",
    "archiver/model_archiver",
    "runtime/tsx_runtime",
    "cli/tsx_cli",
    "templates/tsx_templates",
]
CLOSED = {"runtime/tsx_runtime/worker/ts", "archiver/model_archiver"}  # one line for all that is inside
ELSEWHERE = {
    "examples/digits": "A small model of real digits in every form that tsx serves; the demo and the tests use it",
    "scripts": "What people and CI call: demo, test",
    "tests": "Mirrors the rooms",
    "benchmarks": "Speed and size, side by side in one run",
    "docs": "Guides and reference; architecture.md is where to begin",
}
WIDTH = 42
LONGEST = 104


def first_sentence(file: Path) -> str:
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    sentence = docstring.split("\n\n")[0].replace("\n", " ").split(". ")[0].rstrip(".")
    return shortened(re.sub(r" \([^)]*\)", "", sentence))


def shortened(sentence: str) -> str:
    """The sentence, or as many of its clauses as fit."""
    while len(sentence) > LONGEST:
        shorter = re.sub(r"[,;:] [^,;:]*$", "", sentence)
        if shorter == sentence:
            break
        sentence = shorter
    return sentence


def line(depth: int, name: str, text: str) -> str:
    return f"{'    ' * depth + name:{WIDTH}}{text}".rstrip() + "\n"


def tree_of(folder: Path, depth: int, name: str) -> Iterator[str]:
    if not (folder / "__init__.py").is_file():
        return
    yield line(depth, f"{name}/", first_sentence(folder / "__init__.py"))
    if folder.relative_to(ROOT).as_posix() in CLOSED:
        return
    for file in sorted(folder.glob("*.py")):
        if file.name != "__init__.py":
            yield line(depth + 1, file.name, first_sentence(file))
    for inner in sorted(folder.iterdir()):
        if inner.is_dir():
            yield from tree_of(inner, depth + 1, inner.name)


def render() -> str:
    shipped = "".join(part for package in PACKAGES for part in tree_of(ROOT / package, 0, package))
    return shipped + "".join(line(0, f"{name}/", text) for name, text in ELSEWHERE.items())


def main() -> int:
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = before + BEGIN + render() + END + after
    if wanted == text:
        return 0
    if "--check" in sys.argv[1:]:
        print("the file tree in README.md is not that of the files: run `python scripts/tree.py`", file=sys.stderr)
        return 1
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
