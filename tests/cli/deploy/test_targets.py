"""The targets of `tsx deploy` are found by their names."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tsx_cli.deploy.targets import TARGETS, find_target


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_has_the_name_by_which_it_is_found(name: str) -> None:
    assert find_target(name).name == name


@pytest.mark.usefixtures("processes")
def test_a_command_imports_neither_boto3_nor_ray_nor_another_target() -> None:
    code = (
        "import sys, tsx_cli.deploy.commands.verbs\n"
        "from tsx_cli.deploy.targets import find_target\n"
        "find_target('container')\n"
        "print({'boto3', 'ray', 'tsx_cli.deploy.sagemaker'} & set(sys.modules))\n"
        "find_target('sagemaker'), find_target('ray')\n"
        "print({'boto3', 'ray'} & set(sys.modules))\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert finished.stdout.split() == ["set()", "set()"]
