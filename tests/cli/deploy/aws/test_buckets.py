"""Buckets of `tsx deploy`: no call reaches one that belongs to another account."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.deploying import FACTS, Deploy, a_spec
from tests.support.platforms.aws import ACCOUNT, Course
from tsx_cli.deploy.aws_lambda.resources import resources

pytestmark = pytest.mark.slow


@pytest.fixture
def deploy(archive: Path, course: Course, capsys: pytest.CaptureFixture[str]) -> Deploy:
    return Deploy(archive, "sagemaker", capsys)


def test_each_call_of_s3_names_the_account_that_the_bucket_must_belong_to(
    deploy: Deploy, course: Course
) -> None:
    deploy.apply()
    deploy.verb("destroy", "--yes", "--purge")
    assert course.owners == dict.fromkeys(
        ["HeadBucket", "GetPublicAccessBlock", "PutPublicAccessBlock", "PutBucketTagging", "HeadObject", "PutObject", "ListObjectsV2",
         "DeleteObject"], ACCOUNT
    )  # fmt: skip


def test_a_bucket_of_another_account_is_refused_unless_its_owner_is_named(
    deploy: Deploy, course: Course
) -> None:
    theirs = ("--set=sagemaker.bucket=theirs", "--set=sagemaker.bucket_owner=210987654321")
    deploy.apply(*theirs, code=1)
    assert (
        "403: Forbidden"
        in deploy.err
    )
    assert (
        "name its owner with"
        in deploy.err
    )
    assert "PutObject" not in course.owners
    deploy.apply("--set=sagemaker.bucket_owner=mine", code=2)
    assert "bucket_owner: String should match" in deploy.err


def test_the_owner_of_a_named_bucket_is_not_that_of_tsx_own_bucket(
    deploy: Deploy, course: Course
) -> None:
    """A purge also looks into the own bucket, which other deployments have made."""
    deploy.apply()
    course.owners.clear()
    deploy.verb("destroy", "--yes", "--purge", "--set=sagemaker.bucket_owner=210987654321")
    assert course.owners == dict.fromkeys(["HeadObject", "ListObjectsV2", "DeleteObject"], ACCOUNT)


@pytest.mark.parametrize(
    ("queue", "owner"),
    [
        ({"results": "s3://answers/x"}, ACCOUNT),
        ({"results": "message"}, ACCOUNT),  # of which each may name a bucket
        ({"results": "message", "results_owner": "2" * 12}, "2" * 12),
        ({}, None),
    ],
)
def test_answers_of_a_function_go_to_a_bucket_of_its_account_or_of_the_one_that_is_named(
    queue: dict[str, str], owner: str | None
) -> None:
    given = {
        "queue": {"arn": f"arn:aws:sqs:eu-central-1:{ACCOUNT}:q", **queue},
        "role": f"arn:aws:iam::{ACCOUNT}:role/r",
    }
    facts = replace(FACTS, image="image", account=ACCOUNT, region="eu-central-1")
    made = resources(a_spec("lambda", **{"lambda": given}), facts)
    function = next(each.properties for each in made if each.id == "Function")
    assert (
        function.get("Environment", {}).get("Variables", {}).get("TSX_LAMBDA_RESULTS_OWNER")
        == owner
    )
