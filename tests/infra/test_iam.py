"""The policies of infra/iam: existing actions, sizes that AWS takes, and named resources."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore import xform_name

from tests.support.platforms.aws import NAMED_OTHERWISE
from tsx_cli.deploy.aws.iam_policies import SERVICES as SERVED
from tsx_cli.deploy.aws.iam_policies import execution_policy, trust_policy
from tsx_cli.deploy.spec import DeploySpec

ROOT = Path(__file__).parents[2]
IAM, DEPLOY, BATCH = (
    ROOT / "infra" / "iam",
    ROOT / "cli" / "tsx_cli" / "deploy",
    ROOT / "cli" / "tsx_cli" / "batch",
)
LARGEST = 6144  # characters of a managed policy, without its white space
CLIENTS = {"s3": ("s3",), "sagemaker": ("sagemaker", "sagemaker-runtime")}
# Permissions without an operation of the API.
NO_CALLS = {
    "iam:PassRole", "lambda:InvokeFunction", "lambda:InvokeFunctionUrl", "lambda:PassCapacityProvider", "s3:GetBucketPublicAccessBlock",
    "s3:ListBucket", "s3:PutBucketPublicAccessBlock",
}  # fmt: skip
# Statements without resources, or about all of them.
UNNAMED = {
    "Who", "SignInToEcr", "Lists", "Scaling", "LookAtAlarms", "Metrics",
}  # fmt: skip


READS = re.compile(r"[\w-]+:(Get|Describe|List|BatchGet|BatchCheck)")
BUCKET = "tsx-ACCOUNT-REGION"
SESSION = botocore.session.get_session()
SERVICES = set(SESSION.get_available_services())
NEVER = {"s3:DeleteBucket"}  # the bucket stays


def a_spec(target: str, **more: Any) -> DeploySpec:
    return DeploySpec.model_validate({"name": "a", "target": target, "model": "a.mar", **more})


@cache
def operations(service: str) -> list[str]:
    return list(SESSION.get_service_model(service).operation_names)


def policy(name: str) -> Any:
    return json.loads((IAM / f"{name}.json").read_text())


def actions_of(document: Any) -> set[str]:
    return {action for statement in document["Statement"] for action in statement["Action"]}


@pytest.mark.parametrize("file", sorted(IAM.glob("*.json")), ids=lambda file: file.stem)
def test_a_policy_names_existing_actions(file: Path) -> None:
    assert len("".join(file.read_text().split())) < LARGEST
    if file.name.startswith("trust"):
        return
    for statement in policy(file.stem)["Statement"]:
        assert statement["Resource"] != ["*"] or statement["Sid"] in UNNAMED
        for action in statement["Action"]:
            service, _, operation = action.partition(":")
            known = [
                operation
                for client in CLIENTS.get(service, (service,))
                for operation in operations(client)
            ]
            assert operation in known or action in NO_CALLS, action


@pytest.mark.parametrize("target", SERVED)
def test_the_files_of_a_role_are_those_of_create_role(target: str) -> None:
    keys = {"canary": {}, "sagemaker": {"component": {"endpoint": "e"}}}
    document = execution_policy(
        a_spec(target, name="x-name-x", **keys), "ACCOUNT", "REGION", BUCKET
    )
    assert policy(f"execution-{target}") == json.loads(
        json.dumps(document).replace("x-name-x", "NAME")
    )
    assert policy(f"trust-{target}") == trust_policy(target)


@pytest.mark.parametrize("target", SERVED)
def test_a_planner_may_only_read_and_only_what_a_deployer_may(target: str) -> None:
    actions = actions_of(policy(f"planner-{target}"))
    assert actions < actions_of(policy(f"deployer-{target}"))
    assert all(READS.match(action) for action in actions)


def test_a_new_role_has_only_the_rights_of_its_deployment() -> None:
    def sids(**keys: object) -> set[str]:
        document = execution_policy(a_spec("lambda", **{"lambda": keys}), "1", "eu-west-1")
        return {statement["Sid"] for statement in document["Statement"]}

    queue = {"arn": "arn:aws:sqs:eu-west-1:1:q", "results": "s3://answers/x"}
    assert sids() == {"Logs"}
    assert sids(queue=queue, subnets=["s"]) == {"Logs", "Queue", "Results", "Network"}
    assert "arn:aws-cn:logs" in json.dumps(execution_policy(a_spec("lambda"), "1", "cn-north-1"))


def test_the_role_of_an_endpoint_with_a_canary_may_look_at_its_alarms() -> None:
    plain, shifted = (
        actions_of(execution_policy(a_spec("sagemaker", **more), "1", "eu-west-1", BUCKET))
        for more in ({}, {"canary": {}})
    )
    assert shifted - plain == {"cloudwatch:DescribeAlarms"}


def operations_of(file: Path) -> set[str]:
    """Return the operations of AWS that a module names, in calls or as texts."""
    tree = ast.parse(file.read_text())
    texts = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names = texts | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {
        f"{service}:{operation}"
        for service in texts & SERVICES
        for operation in operations(service)
        if xform_name(operation) in names
    }


def test_a_deployer_may_call_every_operation_of_the_code() -> None:
    files = [*sorted(DEPLOY.rglob("*.py")), *sorted(BATCH.rglob("*.py"))]
    needed = {
        NAMED_OTHERWISE.get(operation, operation)
        for file in files
        for operation in operations_of(file)
    }
    allowed = set().union(*(actions_of(policy(f"deployer-{target}")) for target in SERVED))
    assert needed <= allowed | NEVER, needed - allowed
    assert len(needed) > 60
