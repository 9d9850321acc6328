"""YAML in the usual style of people: keys in order, lists indented, and no aliases."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

# Texts that YAML 1.2 or Go reads as numbers or booleans, and a line end that PyYAML loses.
AMBIGUOUS = re.compile(r"^[-+]?(0o[0-7]+|[\d.]+[eE][-+]?\d+)$|^[yYnN]$|\x85")


class _Dumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Write texts of several lines as blocks, and quote texts that other readers misread."""
    style = '"' if AMBIGUOUS.search(text) else "|" if text.count("\n") > 1 else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def yaml_text(documents: Iterable[Mapping[str, Any]]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=140)
