"""YAML as people write it: keys in order, lists indented, and no aliases."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

# Numbers and booleans for YAML 1.2 and for Go, and a line end that PyYAML loses.
AMBIGUOUS = re.compile(r"^[-+]?(0o[0-7]+|[\d.]+[eE][-+]?\d+)$|^[yYnN]$|\x85")


class _Dumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Write texts of several lines as blocks, and quote what is ambiguous for other readers."""
    style = '"' if AMBIGUOUS.search(text) else "|" if text.count("\n") > 1 else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def yaml_text(documents: Iterable[Mapping[str, Any]]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=140)
