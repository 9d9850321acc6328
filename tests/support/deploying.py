"""`tsx deploy` as tests call it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tsx_cli.main import main

ROLE = "arn:aws:iam::123456789012:role/deployed"
IMAGE = "123456789012.dkr.ecr.eu-central-1.amazonaws.com/tsx@sha256:" + "0" * 64
OTHER_IMAGE = IMAGE[:-1] + "1"
HANDLER = "def handle(data, context):\n    return data and ['{}'] * len(data)\n"


class Deploy:
    """The command, with what all calls say. `err` is what the last one wrote beside its answer."""

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
        self.image: Sequence[str] = ("--image", IMAGE)  # unless the words name one

    def __call__(self, *words: str, code: int = 0) -> str:
        done = main(["deploy", *words])
        out, self.err = self.capsys.readouterr()
        assert done == code, out + self.err
        return out

    def wish(self, *words: str) -> list[str]:
        image = () if "--image" in words else self.image
        role = () if {"--role", "--create-role"} & set(words) else ("--role", ROLE)
        return [
            str(self.archive),
            "--target",
            self.target,
            "--name",
            self.name,
            *role,
            *image,
            *self.always,
            *words,
        ]

    def apply(self, *words: str, code: int = 0) -> str:
        """Without loading the archive, which tests/cli/deploy/preflight/test_preflight.py does."""
        return self(*self.wish(*words), "--yes", "--no-check", code=code)

    def plan(self, *words: str, code: int) -> Any:
        return json.loads(self("plan", *self.wish(*words), "--json", code=code))

    def verb(self, verb: str, *words: str, code: int = 0) -> str:
        return self(verb, "--name", self.name, "--target", self.target, *words, code=code)

    def reported(self, verb: str) -> Any:
        return json.loads(self.verb(verb, "--json"))


def actions(reported: Any) -> dict[str, str]:
    return {change["id"]: change["action"] for change in reported["changes"]}
