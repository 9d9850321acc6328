"""YAML as people write it: in the order of the keys, with lists indented, and nothing an alias of something else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _written(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """A file within the file as its lines."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if text.count("\n") > 1 else None)


_Dumper.add_representer(str, _written)


def yaml_text(documents: Iterable[Mapping[str, Any]]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=140)
