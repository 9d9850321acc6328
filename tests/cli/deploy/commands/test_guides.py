"""The commands in the guides are valid, and their options form a valid specification."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tsx_cli.deploy.commands import verbs
from tsx_cli.deploy.commands.options import DeploymentOptions
from tsx_cli.deploy.commands.spec_file import read_spec
from tsx_cli.deploy.spec import DeploySpec
from tsx_cli.main import main

GUIDES = Path(__file__).parents[4] / "docs" / "guides" / "deploy"
COMMANDS = sorted(
    {
        line.strip()
        for page in ("choose.md", "container.md", "kubernetes.md", "ray.md")
        for line in re.sub(r"\\\n\s*", "", (GUIDES / page).read_text()).splitlines()
        if line.startswith("    tsx deploy digits.mar") and "--emit" not in line
    }
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_guides_is_a_valid_specification(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: list[DeploySpec] = []

    def read(options: DeploymentOptions, **_: object) -> bool:
        specs.append(read_spec(*options))
        return False

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verbs, "show_changes", read)
    monkeypatch.setattr(verbs, "apply", read)
    assert main(shlex.split(command)[1:]) == 0
    assert specs[0].name == "digits"
