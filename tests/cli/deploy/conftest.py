"""A mock of AWS for the tests of `tsx deploy`, empty at the start of each test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.deploying import HANDLER, Deploy
from tests.support.models import make_model
from tests.support.platforms.aws import Account, Scenario
from tsx_cli.deploy.aws_lambda.lambda_parts import KINDS as LAMBDA
from tsx_cli.deploy.sagemaker.kinds import KINDS as SAGEMAKER


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("deployed") / "digits.mar", HANDLER)


@pytest.fixture
def scenario(account: Account, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Scenario:
    """Empty the AWS account, and return the scenario that controls it."""
    for kind in (*SAGEMAKER.values(), *LAMBDA.values()):
        monkeypatch.setattr(kind, "poll_interval_s", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return account.emptied()


@pytest.fixture
def deploy_to(
    archive: Path, scenario: Scenario, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Deploy]:
    """Return a function that makes the command for a target, with options of all its calls."""
    return lambda target, *always, name="digits": Deploy(archive, target, capsys, always, name)
