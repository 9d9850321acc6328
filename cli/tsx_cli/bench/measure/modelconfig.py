"""Writes a configuration's keys into a model-config.yaml; the archive's other keys and its comments
stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from tsx_cli.bench.model.configuration import Configuration

KINDS_OF_PT2 = ("compile", "export")
_ENDS_OF_LINES = re.compile(
    "[\x85\u2028\u2029]"
)  # PyYAML reads them as such where it has written them as they are


def changes(configuration: Configuration, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that are to be set, None for those that are to go; `raw` is what the archive's own
    configuration says.
    """
    keys = configuration.keys() | {"slo": None}  # a batch size of its own is measured
    if "pt2" in keys:
        keys["pt2"] = _compiled(raw.get("pt2"), enable=configuration.compiled is True)
    return {key: value for key, value in keys.items() if value is not None or key in raw}


def _compiled(own: Any, *, enable: bool) -> dict[str, Any] | None:
    """`pt2` with compilation on or off; its other words stay.

    It may also be a backend's name, or torch.compile's arguments themselves.
    """
    if isinstance(own, str):
        own = {"compile": {"backend": own}}
    elif isinstance(own, Mapping) and own and not any(kind in own for kind in KINDS_OF_PT2):
        own = {"compile": dict(own)}
    kept = dict(own) if isinstance(own, Mapping) else {}
    options = kept.pop("compile", None)
    if enable:
        words = dict(options) if isinstance(options, Mapping) else {}
        return {**kept, "compile": {**words, "enable": True}}
    return kept or None


def with_keys(text: str, changed: Mapping[str, Any]) -> str:
    """The document with these keys at its top set, or removed where they are None; what else there
    is stays as it is written.

    Where that cannot be done line by line (a document in braces, aliases), the whole file is
    rewritten, without its comments.
    """
    before = yaml.safe_load(text)
    known = dict(before) if isinstance(before, dict) else {}
    after = {
        key: value
        for key, value in {**known, **changed}.items()
        if value is not None or (key not in changed and key in known)
    }
    edited = _edited(text, changed)
    try:
        if edited is not None and (yaml.safe_load(edited) or {}) == after:
            return edited
    except yaml.YAMLError:
        pass
    return _dumped(after)


def _edited(text: str, changed: Mapping[str, Any]) -> str | None:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None
    if root is not None and (not isinstance(root, yaml.MappingNode) or root.flow_style):
        return None
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    done = set()
    for key, value in reversed(pairs):
        if key.value in changed:
            done.add(key.value)
            first, last = key.start_mark.line, _last_line(lines, key.start_mark.line, value)
            comment = _comment(lines[first], value) if first == last else ""
            lines[first : last + 1] = [_written(key.value, changed[key.value], comment)]
    fresh = [_written(key, value, "") for key, value in changed.items() if key not in done]
    return "".join([*lines, *fresh])


def _last_line(lines: list[str], first: int, value: yaml.Node) -> int:
    """A block ends where the next thing begins: comments and empty lines between belong to that."""
    last = value.end_mark.line if value.end_mark.column else value.end_mark.line - 1
    last = min(max(first, last), len(lines) - 1)
    while last > first and (not lines[last].strip() or lines[last].lstrip().startswith("#")):
        last -= 1
    return last


def _comment(line: str, value: yaml.Node) -> str:
    rest = line[value.end_mark.column :] if value.end_mark.line == value.start_mark.line else ""
    return "  " + rest.strip() if rest.strip().startswith("#") else ""


def _written(key: str, value: Any, comment: str) -> str:
    if value is None:
        return ""
    text = _dumped({key: value})
    return f"{text[:-1]}{comment}\n" if text.count("\n") == 1 else text


def _dumped(value: Mapping[str, Any]) -> str:
    if not value:
        return ""
    text = yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True, width=120)
    return (
        yaml.safe_dump(dict(value), sort_keys=False, width=120)
        if _ENDS_OF_LINES.search(text)
        else text
    )
