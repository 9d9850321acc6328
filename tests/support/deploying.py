"""`tsx deploy` as called by tests."""

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
    """Build the specification of the deployment digits; `more` are keys of `[deploy]`."""
    required = {"name": "digits", "target": target, "model": "digits.mar"}
    return DeploySpec.model_validate(required | copy.deepcopy(more))


class Deploy:
    """The command with the options that all calls share; `err` is the stderr of the last call.

    A string with spaces counts as several arguments.
    """

    def __init__(
        self,
        archive: Path,
        target: str,
        capsys: pytest.CaptureFixture[str],
        always: Sequence[str] = (),
        name: str = "digits",
    ) -> None:
        self.archive, self.target, self.capsys = archive, target, capsys
        self.always, self.name, self.err = always, name, ""
        self.is_aws = target in ("sagemaker", "lambda")
        # The image of calls without an image option.
        self.image: Sequence[str] = ("--image", IMAGE) if self.is_aws else ()

    def __call__(self, *arguments: str, code: int = 0) -> str:
        status = main(["deploy", *" ".join(arguments).split()])
        out, self.err = self.capsys.readouterr()
        assert status == code, out + self.err
        return out

    def wish(self, *arguments: str) -> list[str]:
        arguments = tuple(" ".join(arguments).split())
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
        """Deploy without loading the archive, which is tested with the preflight checks."""
        return self(*self.wish(*arguments), "--yes", "--no-check", code=code)

    def plan(self, *arguments: str, code: int) -> Any:
        return json.loads(self("plan", *self.wish(*arguments), "--json", code=code))

    def verb(self, verb: str, *arguments: str, code: int = 0) -> str:
        return self(verb, "--name", self.name, "--target", self.target, *arguments, code=code)

    def read_json(self, verb: str) -> Any:
        return json.loads(self.verb(verb, "--json"))

    @property
    def versions(self) -> list[tuple[int, bool]]:
        """Return the number of each version and whether it is current."""
        history = self.read_json("history")
        return [(version["number"], version["is_current"]) for version in history]


def actions(plan: Any) -> dict[str, str]:
    """Return the action of each resource in a plan."""
    return {change["id"]: change["action"] for change in plan["changes"]}
