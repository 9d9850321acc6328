"""Buckets of `tsx deploy`: no call reaches one that belongs to another account."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.deploying import FACTS, Deploy, a_spec
from tests.support.platforms.aws import ACCOUNT, Course
from tsx_cli.deploy.aws_lambda.resources import resources


@pytest.fixture
def deploy(on: Callable[..., Deploy]) -> Deploy:
    return on("sagemaker")


def test_each_call_of_s3_names_the_account_that_the_bucket_must_belong_to(
    deploy: Deploy, course: Course
) -> None:
    deploy.apply()
    deploy.verb("destroy", "--yes", "--purge")
    names = "HeadBucket GetPublicAccessBlock PutPublicAccessBlock PutBucketTagging HeadObject"
    operations = [*names.split(), "PutObject", "ListObjectsV2", "DeleteObject"]
    assert course.owners == dict.fromkeys(operations, ACCOUNT)


def test_a_bucket_of_another_account_is_refused_unless_its_owner_is_named(
    deploy: Deploy, course: Course
) -> None:
    theirs = "--set=sagemaker.bucket=theirs --set=sagemaker.bucket_owner=210987654321"
    deploy.apply(theirs, code=1)
    assert "403: Forbidden" in deploy.err
    assert "name its owner with" in deploy.err
    assert "PutObject" not in course.owners
    deploy.apply("--set=sagemaker.bucket_owner=mine", code=2)
    assert "bucket_owner: String should match" in deploy.err


def test_the_owner_of_a_named_bucket_does_not_own_the_bucket_of_tsx(
    deploy: Deploy, course: Course
) -> None:
    """A purge also looks into tsx's own bucket, which other deployments have made."""
    deploy.apply()
    course.owners.clear()
    deploy.verb("destroy", "--yes", "--purge", "--set=sagemaker.bucket_owner=210987654321")
    assert course.owners == dict.fromkeys(["HeadObject", "ListObjectsV2", "DeleteObject"], ACCOUNT)


@pytest.mark.parametrize(
    ("queue", "owner"),
    [
        ({"results": "s3://answers/x"}, ACCOUNT),
        # Each message may name a bucket.
        ({"results": "message"}, ACCOUNT),
        ({"results": "message", "results_owner": "2" * 12}, "2" * 12),
        ({}, None),
    ],
)
def test_results_of_a_function_go_to_a_bucket_of_its_account_or_of_the_named_one(
    queue: dict[str, str], owner: str | None
) -> None:
    settings = {
        "queue": {"arn": f"arn:aws:sqs:eu-central-1:{ACCOUNT}:q", **queue},
        "role": f"arn:aws:iam::{ACCOUNT}:role/r",
    }
    facts = replace(FACTS, image="image", account=ACCOUNT, region="eu-central-1")
    (function,) = (
        resource.properties
        for resource in resources(a_spec("lambda", **{"lambda": settings}), facts)
        if resource.id == "Function"
    )
    variables = function.get("Environment", {}).get("Variables", {})
    assert variables.get("TSX_LAMBDA_RESULTS_OWNER") == owner
