"""Whatever call to AWS fails, before it is carried out or with its answer lost: running the same
command again ends where it would have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from tests.support.deploying import Deploy, actions
from tests.support.platforms.aws import NAMED_OTHERWISE, Account, Course
from tsx_cli.deploy.commands import locations
from tsx_cli.deploy.engine import engine
from tsx_cli.main import main

pytestmark = pytest.mark.slow


TIME = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d"
)  # a canary says since when it is one: a second later the same call says another
IAM = Path(__file__).parents[3] / "infra" / "iam"
READS = ("Describe", "Get", "List", "Head")
QUEUE = "arn:aws:sqs:eu-central-1:123456789012:images"
CANARY = ["--canary=10%", "--bake=0", "--alarm=5xx>0", "--alarm=p95>300ms"]
SHARED = ["--set=sagemaker.component.endpoint=shared", "--set=sagemaker.component.copies=2"]
LIVES = {  # what is wanted first, and then; by every kind of resource that there is
    "sagemaker component": (
        [*CANARY, *SHARED, "--set=sagemaker.autoscaling.min=0"],
        [*CANARY[:2], *SHARED, "--set=sagemaker.component.memory=4096", "--set=sagemaker.component.max_instances=6"],
    ),
    "sagemaker": (
        [*CANARY, "--create-role", "--set=sagemaker.autoscaling.max=3"],
        [*CANARY[:2], "--create-role", "--set=sagemaker.instances=2"],
    ),
    "lambda": (
        [*CANARY, "--create-role", f"--set=lambda.queue.arn={QUEUE}", "--set=lambda.autoscaling.max=3", "--set=lambda.url=public",
         "--set=lambda.reserved=5"],
        [*CANARY, "--create-role", f"--set=lambda.queue.arn={QUEUE}", "--set=lambda.queue.batch_size=5",
         "--set=lambda.provisioned=2", "--set=env.A=1"],
    ),
}  # fmt: skip


@pytest.fixture
def course(account: Account, monkeypatch: pytest.MonkeyPatch) -> Course:
    monkeypatch.setattr(locations, "Engine", partial(engine.Engine, sleep=lambda seconds: None))
    course = account.emptied()
    boto3.client("sqs").create_queue(QueueName="images")
    return course


class Breaking:
    """Runs a command until it is done; each call that changes something fails once, one of two with
    its answer lost.
    """

    def __init__(self, course: Course, capsys: pytest.CaptureFixture[str]) -> None:
        self.course, self.capsys = course, capsys
        self.counts: list[int] = []  # of calls that failed, by command

    def __call__(self, command: list[str]) -> None:
        failed: set[str] = set()

        def fail(when: int, operation: str, said: str) -> None:
            what = TIME.sub("", said)
            if (
                not operation.split(":")[1].startswith(READS)
                and what not in failed
                and len(failed) % 2 == when
            ):
                failed.add(what)
                raise ClientError(
                    {"Error": {"Code": "InternalFailure", "Message": "broken off"}}, operation
                )

        self.course.before, self.course.after = partial(fail, 0), partial(fail, 1)
        while main(["deploy", *command]) != 0:
            out, err = self.capsys.readouterr()
            if command[0] == "destroy" and "there is no deployment 'digits'" in err:
                break  # all that was lost is the answer to its last call
            assert "broken off" in err, out + err
            assert "to continue" in err
            assert len(failed) < 60
        self.course.before = self.course.after = lambda operation, what: None
        self.counts.append(len(failed))


def once(command: list[str]) -> None:
    assert main(["deploy", *command]) == 0


def life(deploy: Deploy, kind: str, run: Callable[[list[str]], Any]) -> list[Any]:
    """Made, changed, gone back and removed; what was there after each."""
    first, second = LIVES[kind]
    seen = []
    verb = ["--name", "digits", "--target", deploy.target, "--yes"]
    for words in (first, second, ["rollback", *verb, "--version=1"]):
        run(words if words[0] == "rollback" else [*deploy.wish(*words), "--yes", "--no-check"])
        deploy.capsys.readouterr()
        seen.append(deploy.reported("status"))
        if words is second:
            assert set(actions(deploy.plan(*words, code=0)).values()) == {"same"}
    run(["destroy", *verb, "--purge"])
    deploy.capsys.readouterr()
    deploy.verb("status", code=1)
    return [_lasting(each) for each in seen]


def _lasting(reported: Any) -> Any:
    """Without what no two deployments have in common."""
    return json.loads(
        json.dumps(reported),
        object_hook=lambda part: {key: value for key, value in part.items() if key != "url"},
    )


@pytest.mark.parametrize("kind", list(LIVES))
def test_a_call_that_fails_is_made_again_by_the_next_run(
    kind: str,
    archive: Path,
    course: Course,
    account: Account,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    deploy = Deploy(archive, kind.split()[0], capsys)
    expected = life(deploy, kind, once)
    _is_allowed("deployer", deploy.target, course, 30)
    course = account.emptied()
    boto3.client("sqs").create_queue(QueueName="images")
    breaking = Breaking(course, capsys)
    assert life(deploy, kind, breaking) == expected
    assert min(breaking.counts) >= 1
    assert sum(breaking.counts) > 20
    assert not boto3.client("iam").list_roles()["Roles"]


@pytest.mark.parametrize("kind", list(LIVES))
def test_a_plan_needs_no_more_than_the_policy_of_who_plans(
    kind: str, archive: Path, course: Course, capsys: pytest.CaptureFixture[str]
) -> None:
    deploy, words = Deploy(archive, kind.split()[0], capsys), LIVES[kind][0]
    deploy.apply(*words)
    course.asked.clear()
    deploy.plan(*words, code=0)
    _is_allowed("planner", deploy.target, course, 10)


def _is_allowed(whose: str, target: str, course: Course, least: int) -> None:
    """Each call that was made is one that a policy of infra/iam allows."""
    policy = json.loads((IAM / f"{whose}-{target}.json").read_text())
    allowed = {action for statement in policy["Statement"] for action in statement["Action"]}
    needed = {
        NAMED_OTHERWISE.get(each, each.replace("monitoring:", "cloudwatch:"))
        for each in course.asked
    }
    assert needed <= allowed, needed - allowed
    assert len(needed) > least
