"""Writes the generated parts of the documentation: floors, settings, the schema of a
benchmark's results.

Run it after a file or a setting is added, removed or changed. With --check it writes nothing and
says whether a part is out of date.
"""

from __future__ import annotations

import json
import runpy
import sys
from functools import cache
from pathlib import Path

from tsx_archiver.metadata.model_limits import LIMITS
from tsx_cli.bench.load.results import Results
from tsx_runtime.settings.schema import Settings

ROOT = Path(__file__).resolve().parents[1]


def floors() -> str:
    """Return the packages from the top floor down, by the table of tests/test_architecture.py."""
    may_import = runpy.run_path(str(ROOT / "tests" / "test_architecture.py"))["MAY_IMPORT"]
    imports: dict[str, set[str]] = {}
    for name, others in may_import.items():
        room = _room(name)
        imports.setdefault(room, set()).update(
            _room(other) for other in others if _room(other) != room
        )

    @cache
    def height(room: str) -> int:
        return 1 + max((height(other) for other in imports[room]), default=0)

    rows = [
        sorted(room for room in imports if height(room) == number)
        for number in range(max(map(height, imports)), 0, -1)
    ]
    return "".join(f"1. {', '.join(f'`{room}`' for room in row)}\n" for row in rows)


def _room(module: str) -> str:
    package, _, rest = module.partition(".")
    return f"{package}.{rest.partition('.')[0]}" if package == "tsx_runtime" else package


def settings_table() -> str:
    lines = ["| setting | default | what it is |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = (
            "not set" if field.default is None else f"`{json.dumps(field.default, default=str)}`"
        )
        lines.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(lines) + "\n"


def limits_table() -> str:
    lines = ["| key | name | default | what it is |", "|---|---|---|---|"]
    for name, limit in LIMITS.items():
        lines.append(
            f"| `{limit.key}` | `{name}` | `{limit.setting or limit.default}` |"
            f" {limit.description} |"
        )
    return "\n".join(lines) + "\n"


def with_part(text: str, name: str, part: str) -> str:
    """The text with `part` between the comments that say `name`."""
    begin, end = f"<!-- {name}: made by scripts/update_docs.py -->\n", f"<!-- end of {name} -->"
    before, found, rest = text.partition(begin)
    _, also_found, after = rest.partition(end)
    if not (found and also_found):
        raise SystemExit(f"the comments around {name} are missing: {begin}...{end}")
    return before + begin + part + end + after


def results_schema() -> str:
    return json.dumps(Results.model_json_schema(mode="serialization"), indent=2) + "\n"


def main() -> int:
    stale = []
    path, content = "docs/reference/bench-results.schema.json", results_schema()
    schema = ROOT / path
    if not schema.is_file() or schema.read_text(encoding="utf-8") != content:
        stale.append(path)
        if "--check" not in sys.argv[1:]:
            schema.write_text(content, encoding="utf-8")
    for file, name, part in (
        (ROOT / "docs" / "concepts" / "architecture.md", "floors", floors()),
        (ROOT / "docs" / "reference" / "configuration.md", "settings", settings_table()),
        (ROOT / "docs" / "reference" / "configuration.md", "limits", limits_table()),
    ):
        text = file.read_text(encoding="utf-8")
        wanted = with_part(text, name, part)
        if wanted != text:
            stale.append(f"the {name} in {file.relative_to(ROOT)}")
            if "--check" not in sys.argv[1:]:
                file.write_text(wanted, encoding="utf-8")
    if stale and "--check" in sys.argv[1:]:
        print(
            f"out of date: {', '.join(stale)}; run `python scripts/update_docs.py`", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
