"""Buckets of `tsx deploy`: no call accepts a bucket of another account."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.deploying import FACTS, Deploy, a_spec
from tests.support.platforms.aws import ACCOUNT, Scenario
from tsx_cli.deploy.aws_lambda.resources import resources


@pytest.fixture
def deploy(deploy_to: Callable[..., Deploy]) -> Deploy:
    return deploy_to("sagemaker")


def test_each_s3_call_names_the_expected_owner_of_the_bucket(
    deploy: Deploy, scenario: Scenario
) -> None:
    deploy.apply()
    deploy.verb("destroy", "--yes", "--purge")
    names = "HeadBucket GetPublicAccessBlock PutPublicAccessBlock PutBucketTagging HeadObject"
    operations = [*names.split(), "PutObject", "ListObjectsV2", "DeleteObject"]
    assert scenario.owners == dict.fromkeys(operations, ACCOUNT)


def test_a_bucket_of_another_account_needs_its_owner(deploy: Deploy, scenario: Scenario) -> None:
    foreign_bucket = "--set=sagemaker.bucket=theirs --set=sagemaker.bucket_owner=210987654321"
    deploy.apply(foreign_bucket, code=1)
    assert "403: Forbidden" in deploy.err
    assert "name its owner with" in deploy.err
    assert "PutObject" not in scenario.owners
    deploy.apply("--set=sagemaker.bucket_owner=mine", code=2)
    assert "bucket_owner: String should match" in deploy.err


def test_the_given_owner_does_not_apply_to_the_bucket_of_tsx(
    deploy: Deploy, scenario: Scenario
) -> None:
    """A purge also reads tsx's own bucket, which other deployments have created."""
    deploy.apply()
    scenario.owners.clear()
    deploy.verb("destroy", "--yes", "--purge", "--set=sagemaker.bucket_owner=210987654321")
    assert scenario.owners == dict.fromkeys(
        ["HeadObject", "ListObjectsV2", "DeleteObject"], ACCOUNT
    )


@pytest.mark.parametrize(
    ("queue", "owner"),
    [
        ({"results": "s3://answers/x"}, ACCOUNT),
        # Each message may name another bucket.
        ({"results": "message"}, ACCOUNT),
        ({"results": "message", "results_owner": "2" * 12}, "2" * 12),
        ({}, None),
    ],
)
def test_results_go_to_a_bucket_of_the_expected_account(
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
