"""Writes the generated files: sections of the documentation, and the wording of all errors.

Run it after a package, a setting or the text of an error changes. With --check it writes nothing
and exits with 1 when something is out of date.
"""

from __future__ import annotations

import ast
import json
import runpy
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tsx_archiver.metadata.model_limits import LIMITS
from tsx_cli.bench.load.results import Results
from tsx_runtime.settings.schema import Settings

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURE = ROOT / "docs" / "concepts" / "architecture.md"
CONFIGURATION = ROOT / "docs" / "reference" / "configuration.md"
PRODUCT = ("archiver", "cli", "packages", "runtime")
MIN_SPACES = 3  # A text with fewer spaces is not a sentence.


def package_floors() -> str:
    """List the packages, from the top floor down, by the imports that test_architecture.py allows."""
    may_import = runpy.run_path(str(ROOT / "tests" / "test_architecture.py"))["MAY_IMPORT"]
    imports: dict[str, set[str]] = {}
    for name, dependencies in may_import.items():
        package = _package(name)
        imports.setdefault(package, set()).update(
            _package(dependency) for dependency in dependencies if _package(dependency) != package
        )

    @cache
    def height(package: str) -> int:
        return 1 + max((height(dependency) for dependency in imports[package]), default=0)

    rows = [
        sorted(package for package in imports if height(package) == floor)
        for floor in range(max(map(height, imports)), 0, -1)
    ]
    return "".join(f"1. {', '.join(f'`{package}`' for package in row)}\n" for row in rows)


def _package(module: str) -> str:
    top, _, tail = module.partition(".")
    return f"{top}.{tail.partition('.')[0]}" if top == "tsx_runtime" else top


def settings_table() -> str:
    """Return the table of the server's settings."""
    lines = ["| setting | default | what it is |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = (
            "not set" if field.default is None else f"`{json.dumps(field.default, default=str)}`"
        )
        lines.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(lines) + "\n"


def limits_table() -> str:
    """Return the table of the limits that can be set per model."""
    lines = ["| key | name | default | what it is |", "|---|---|---|---|"]
    for name, limit in LIMITS.items():
        lines.append(
            f"| `{limit.key}` | `{name}` | `{limit.setting or limit.default}` |"
            f" {limit.description} |"
        )
    return "\n".join(lines) + "\n"


def results_schema() -> str:
    """Return the JSON schema of a benchmark's results."""
    return json.dumps(Results.model_json_schema(mode="serialization"), indent=2) + "\n"


def wording() -> str:
    """List the texts of the product's errors, with `{}` in place of values."""
    lines = []
    for folder in PRODUCT:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name.endswith(("_pb2.py", "_pb2_grpc.py")):
                continue
            texts = list(_error_texts(ast.parse(path.read_text(encoding="utf-8"))))
            if texts:
                lines += ["", f"# {path.relative_to(ROOT)}", *texts]
    return "\n".join(lines[1:]) + "\n"


def _error_texts(module: ast.Module) -> Iterator[str]:
    nodes = [node for node in ast.walk(module) if isinstance(node, ast.Raise | ast.Call)]
    raised_ids = {id(node.exc) for node in nodes if isinstance(node, ast.Raise)}
    for node in nodes:
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        # An error may also be created here, and raised or sent elsewhere.
        is_class = name.rpartition(".")[2][:1].isupper()
        for text in map(_template, node.args):
            if text and (id(node) in raised_ids or (is_class and text.count(" ") >= MIN_SPACES)):
                yield f"{name}: {json.dumps(text, ensure_ascii=False)}"


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) or "{}" for part in node.values)
    if isinstance(node, ast.IfExp):
        return " | ".join(filter(None, map(_template, (node.body, node.orelse))))
    return ""


def with_part(text: str, name: str, part: str) -> str:
    """Replace the text between the comments that mark the generated section `name`."""
    begin, end = f"<!-- {name}: made by scripts/update_docs.py -->\n", f"<!-- end of {name} -->"
    text_before, has_begin, tail = text.partition(begin)
    _, has_end, text_after = tail.partition(end)
    if not (has_begin and has_end):
        raise SystemExit(f"the comments around {name} are missing: {begin}...{end}")
    return text_before + begin + part + end + text_after


def main() -> int:
    """Write the outdated files, or report them with --check."""
    check = "--check" in sys.argv[1:]
    files = {
        ROOT / "docs" / "reference" / "bench-results.schema.json": results_schema(),
        ROOT / "tests" / "wording.txt": wording(),
    }
    for path, name, part in (
        (ARCHITECTURE, "floors", package_floors()),
        (CONFIGURATION, "settings", settings_table()),
        (CONFIGURATION, "limits", limits_table()),
    ):
        files[path] = with_part(files.get(path) or path.read_text(encoding="utf-8"), name, part)
    outdated_paths = [
        path
        for path, text in files.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if not check:
        for path in outdated_paths:
            path.write_text(files[path], encoding="utf-8")
    elif outdated_paths:
        names = ", ".join(str(path.relative_to(ROOT)) for path in outdated_paths)
        print(f"out of date: {names}; run `python scripts/update_docs.py`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
