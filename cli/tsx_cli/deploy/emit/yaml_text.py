"""YAML as people write it: in the order of the keys, with lists indented, and nothing an alias of
something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

# Numbers and booleans of YAML 1.2 and of Go's readers, and a line end that PyYAML loses.
AMBIGUOUS = re.compile(r"^[-+]?(0o[0-7]+|[\d.]+[eE][-+]?\d+)$|^[yYnN]$|\x85")


class _Dumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _written(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Write a file as its lines, and quote what another reader would take for another type."""
    style = '"' if AMBIGUOUS.search(text) else "|" if text.count("\n") > 1 else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _written)


def yaml_text(documents: Iterable[Mapping[str, Any]]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=140)
