"""Chooses the command of `tsx bench` by its arguments: an archive, a running server, a comparison, TorchServe's files."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

AGAINST = "tsx_cli.bench.commands.against_command"
TORCHSERVE = "tsx_cli.bench.torchserve.command"
COMPARE = "tsx_cli.bench.commands.compare_command"


class OrAnother(TyperCommand):
    """A command that another one replaces, depending on its arguments: a running server has other options."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        module = another(args)
        if module is None:
            return super().make_context(info_name, args, parent, **extra)
        if module == COMPARE:
            info_name, args = f"{info_name} compare", args[1:]
        return typer.main.get_command(importlib.import_module(module).app).make_context(info_name, args, parent, **extra)


def another(words: Sequence[str]) -> str | None:
    """The module of the command that these words mean; None: that of an archive."""
    if words and words[0] == "compare":
        return COMPARE
    options = {word.partition("=")[0] for word in words if word.startswith("--")}
    if "--torchserve-config" in options or any(word.endswith((".yaml", ".yml")) for word in _by_themselves(words)):
        return TORCHSERVE
    return AGAINST if "--against" in options else None


def _by_themselves(words: Sequence[str]) -> Iterator[str]:
    """Those that no option has before them, which might be its value."""
    for before, word in zip(("", *words), words, strict=False):
        if not word.startswith("-") and (not before.startswith("-") or "=" in before):
            yield word
