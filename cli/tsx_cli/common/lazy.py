"""Command groups that import a command's module only when the command runs.

Help and completion therefore stay fast.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

import tsx_cli

HELP_OPTIONS = ["-h", "--help"]
# click.UsageError; newer versions of typer contain their own copy of click.
WRONG_USAGE: Any = typer.BadParameter.__base__
NO_COMMAND = re.compile(r"No such command '(.+?)'\.")


def command_of(app: typer.Typer) -> Any:
    """Return the command of an app.

    Its help shows no type for flags, and joins the lines of paragraphs.
    """
    command: Any = typer.main.get_command(app)
    _prepare_help(command)
    return command


def _prepare_help(command: Any) -> None:
    if command.help:
        command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", command.help)
    for option in command.get_params(typer.Context(command, help_option_names=HELP_OPTIONS)):
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for subcommand in getattr(command, "commands", {}).values():
        _prepare_help(subcommand)


class LazyGroup(TyperGroup):
    """A group that lists its commands without importing their modules.

    Each package of `tsx_cli` with a module `command` is a command of the same name, the `app` of
    that module. SUMMARY of the package is its line in the help, and POSITION its place there.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        names = [file.parent.name for file in Path(tsx_cli.__path__[0]).glob("*/command.py")]
        packages = {name: importlib.import_module(f"tsx_cli.{name}") for name in names}
        for name in sorted(names, key=lambda name: (packages[name].POSITION, name)):
            self.commands[name] = TyperCommand(name, help=packages[name].SUMMARY)

    def invoke(self, ctx: Any) -> Any:
        """Simplify the errors about wrong values and unknown commands.

        Newer versions of typer put the name of a Python exception before the value. For a command
        of another group, the error shows the right command line.
        """
        try:
            return super().invoke(ctx)
        except WRONG_USAGE as error:
            error.message = error.message.removeprefix("Value error, ")
            if match := NO_COMMAND.match(error.message):
                lines = self._lines_with(match[1], ctx.command_path)
                error.message = f"{match[0]} Did you mean {lines}?" if lines else error.message
            raise

    def _lines_with(self, name: str, program: str) -> str:
        """Return the command lines in which `name` is a command."""
        groups = [
            group for group in self.commands if name in getattr(self._load(group), "commands", ())
        ]
        lines = [name] * (name in self.commands) + [f"{group} {name}" for group in groups]
        return " or ".join(f"'{program} {line}'" for line in lines)

    def _load(self, name: str) -> Any:
        return command_of(importlib.import_module(f"tsx_cli.{name}.command").app)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, remaining = super().resolve_command(ctx, args)
        if command is not None:
            command = self._load(args[0])
            command.name = name
        return name, command, remaining


class DefaultGroup(TyperGroup):
    """A group that runs its command `default` if the first argument is not the name of a command.

    The group has the help of `default`, with a list of the other commands.
    """

    default = ""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        default_command = self.commands[self.default]
        # Errors show the name of the group, which users know.
        path = property(lambda context: context.parent.command_path)
        default_command.context_class = type(
            "DefaultContext", (default_command.context_class,), {"command_path": path}
        )

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return the names of the commands, and the options of the default command."""
        commands = super().shell_complete(ctx, incomplete)
        shown_values = {item.value for item in commands}
        return [
            *commands,
            *(
                item
                for item in self.commands[self.default].shell_complete(ctx, incomplete)
                if item.value not in shown_values
            ),
        ]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        default_command = self.commands[self.default]
        group = TyperGroup(
            name=self.name,
            help=default_command.help,
            params=default_command.params,
            commands={
                name: command for name, command in self.commands.items() if name != self.default
            },
            subcommand_metavar=(
                f"| {' | '.join(name for name in self.commands if name != self.default)} FILE"
            ),
            rich_markup_mode=self.rich_markup_mode,
        )
        _prepare_help(group)
        group.format_help(ctx, formatter)
