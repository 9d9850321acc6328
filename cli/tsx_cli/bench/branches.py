"""Which of its commands `tsx bench` is, by its words: for an archive, a server that runs, a comparison, TorchServe's files."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import typer

from tsx_cli.bench.against_command import OrAgainst

TORCHSERVE = "tsx_cli.bench.torchserve.command"
COMPARE = "tsx_cli.bench.compare_command"


class OrAnother(OrAgainst):
    """A command that becomes another one where its words say so."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        module = another(args)
        if module is None:
            return super().make_context(info_name, args, parent, **extra)
        if module == COMPARE:
            info_name, args = f"{info_name} compare", args[1:]
        return typer.main.get_command(importlib.import_module(module).app).make_context(info_name, args, parent, **extra)


def another(words: Sequence[str]) -> str | None:
    """The module of the command that these words mean; None: that of an archive, or of a server that runs."""
    if words and words[0] == "compare":
        return COMPARE
    config = any(word == "--torchserve-config" or word.startswith("--torchserve-config=") for word in words)
    return TORCHSERVE if config or (words and words[0].endswith((".yaml", ".yml"))) else None
