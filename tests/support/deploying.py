"""`tsx deploy` as tests call it."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.image.recipe import Local
from tsx_cli.deploy.spec import DeploySpec
from tsx_cli.main import main

ROLE = "arn:aws:iam::123456789012:role/deployed"
IMAGE = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/tsx@sha256:" + "0" * 64
OTHER_IMAGE = IMAGE[:-1] + "1"
HANDLER = "def handle(data, context):\n    return data and ['{}'] * len(data)\n"
FACTS = Facts(Path("digits.mar"), "ab" * 32, "digits", "1.0", "", "", "")
LOCAL = Local("3.12", "2.9.0+cpu", "0.1.0")


def a_spec(target: str, **more: Any) -> DeploySpec:
    """Make the specification of the deployment digits; `more` are keys of `[deploy]`."""
    keys = {"name": "digits", "target": target, "model": "digits.mar"}
    return DeploySpec.model_validate(keys | copy.deepcopy(more))


class Deploy:
    """The command with the arguments of all calls; `err` is the stderr of the last one."""

    def __init__(
        self,
        archive: Path,
        target: str,
        capsys: pytest.CaptureFixture[str],
        always: Sequence[str] = (),
        name: str = "digits",
    ) -> None:
        self.archive, self.target, self.capsys, self.always, self.name, self.err = (
            archive,
            target,
            capsys,
            always,
            name,
            "",
        )
        self.is_aws = target in ("sagemaker", "lambda")
        # The default, unless the arguments name an image.
        self.image: Sequence[str] = ("--image", IMAGE) if self.is_aws else ()

    def __call__(self, *arguments: str, code: int = 0) -> str:
        done = main(["deploy", *arguments])
        out, self.err = self.capsys.readouterr()
        assert done == code, out + self.err
        return out

    def wish(self, *arguments: str) -> list[str]:
        image = () if "--image" in arguments else self.image
        has_role = not self.is_aws or {"--role", "--create-role"} & set(arguments)
        role = () if has_role else ("--role", ROLE)
        return [
            str(self.archive),
            "--target",
            self.target,
            "--name",
            self.name,
            *role,
            *image,
            *self.always,
            *arguments,
        ]

    def apply(self, *arguments: str, code: int = 0) -> str:
        """Apply the deployment without loading the archive."""
        return self(*self.wish(*arguments), "--yes", "--no-check", code=code)

    def plan(self, *arguments: str, code: int) -> Any:
        return json.loads(self("plan", *self.wish(*arguments), "--json", code=code))

    def verb(self, verb: str, *arguments: str, code: int = 0) -> str:
        return self(verb, "--name", self.name, "--target", self.target, *arguments, code=code)

    def reported(self, verb: str) -> Any:
        return json.loads(self.verb(verb, "--json"))


def actions(reported: Any) -> dict[str, str]:
    return {change["id"]: change["action"] for change in reported["changes"]}
