"""The commands of tsx in templates, such as that of the Dockerfile, take their arguments."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import tsx_templates
from tsx_cli.common.lazy import command_of
from tsx_cli.main import app

FOLDER = Path(tsx_templates.__file__).parent
COMMAND = re.compile(r"(?:&& |RUN |\$\(|run: |^ +)tsx ((?:archive|bench|check) [^\n|&]*)", re.M)
VALUE = re.compile(r"\{\{.*?\}\}|\[\[.*?\]\]|\$\w+")
WORD = "lambda"  # the value of all variables, which also is the name of a target
COMMANDS = sorted(
    {
        match[1].rstrip("\\ ")
        for path in FOLDER.rglob("*.j2")
        for match in COMMAND.finditer(path.read_text(encoding="utf-8"))
    }
)


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_of_a_template_takes_its_arguments(text: str) -> None:
    command: Any = command_of(app)
    context = command.make_context("tsx", shlex.split(VALUE.sub(WORD, text)))
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


def test_the_commands_of_images_are_among_them() -> None:
    assert any(text.startswith("archive unpack /tmp/") for text in COMMANDS)
    assert len(COMMANDS) > 5
