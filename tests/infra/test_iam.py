"""The policies of infra/iam use existing actions, fit AWS's size limit and name their resources."""

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

from tests.support.platforms.aws import IAM_ACTION_BY_OPERATION
from tsx_cli.deploy.aws.iam_policies import SERVICES as DEPLOY_TARGETS
from tsx_cli.deploy.aws.iam_policies import execution_policy, trust_policy
from tsx_cli.deploy.spec import DeploySpec

ROOT = Path(__file__).parents[2]
IAM, DEPLOY, BATCH = (
    ROOT / "infra" / "iam",
    ROOT / "cli" / "tsx_cli" / "deploy",
    ROOT / "cli" / "tsx_cli" / "batch",
)
MAX_POLICY_CHARS = 6144  # AWS's limit for a managed policy, white space excluded
# The boto3 clients whose operations need the permissions of a service.
CLIENTS = {"s3": ("s3",), "sagemaker": ("sagemaker", "sagemaker-runtime")}
# Permissions that are not named after an API operation.
ACTIONS_WITHOUT_OPERATION = {
    "iam:PassRole",
    "lambda:InvokeFunction",
    "lambda:InvokeFunctionUrl",
    "lambda:PassCapacityProvider",
    "s3:GetBucketPublicAccessBlock",
    "s3:ListBucket",
    "s3:PutBucketPublicAccessBlock",
}
# Sids of the statements that may use the resource "*".
WILDCARD_SIDS = {"Who", "SignInToEcr", "Lists", "Scaling", "LookAtAlarms", "Metrics"}
READ_ACTION = re.compile(r"[\w-]+:(Get|Describe|List|BatchGet|BatchCheck)")
BUCKET = "tsx-ACCOUNT-REGION"
SESSION = botocore.session.get_session()
AWS_SERVICES = set(SESSION.get_available_services())
NEVER_GRANTED = {"s3:DeleteBucket"}  # a deployer must not delete the bucket


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
def test_a_policy_is_small_and_names_existing_actions_and_resources(file: Path) -> None:
    assert len("".join(file.read_text().split())) < MAX_POLICY_CHARS
    if file.name.startswith("trust"):
        return
    for statement in policy(file.stem)["Statement"]:
        assert statement["Resource"] != ["*"] or statement["Sid"] in WILDCARD_SIDS
        for action in statement["Action"]:
            service, _, operation = action.partition(":")
            known_operations = [
                name for client in CLIENTS.get(service, (service,)) for name in operations(client)
            ]
            assert operation in known_operations or action in ACTIONS_WITHOUT_OPERATION, action


@pytest.mark.parametrize("target", DEPLOY_TARGETS)
def test_the_checked_in_policies_equal_those_that_create_role_generates(target: str) -> None:
    keys = {"canary": {}, "sagemaker": {"component": {"endpoint": "e"}}}
    document = execution_policy(
        a_spec(target, name="x-name-x", **keys), "ACCOUNT", "REGION", BUCKET
    )
    assert policy(f"execution-{target}") == json.loads(
        json.dumps(document).replace("x-name-x", "NAME")
    )
    assert policy(f"trust-{target}") == trust_policy(target)


@pytest.mark.parametrize("target", DEPLOY_TARGETS)
def test_a_planner_may_only_read_and_only_what_a_deployer_may(target: str) -> None:
    actions = actions_of(policy(f"planner-{target}"))
    assert actions < actions_of(policy(f"deployer-{target}"))
    assert all(READ_ACTION.match(action) for action in actions)


def test_a_new_role_has_only_the_rights_of_its_deployment() -> None:
    def sids(**keys: object) -> set[str]:
        document = execution_policy(a_spec("lambda", **{"lambda": keys}), "1", "eu-west-1")
        return {statement["Sid"] for statement in document["Statement"]}

    queue = {"arn": "arn:aws:sqs:eu-west-1:1:q", "results": "s3://answers/x"}
    assert sids() == {"Logs"}
    assert sids(queue=queue, subnets=["s"]) == {"Logs", "Queue", "Results", "Network"}
    recording = execution_policy(
        a_spec("lambda", env={"TSX_RECORD_URL": "s3://b/recordings/"}), "1", "eu-west-1"
    )
    assert "arn:aws:s3:::b/recordings/*" in json.dumps(recording)
    assert "arn:aws-cn:logs" in json.dumps(execution_policy(a_spec("lambda"), "1", "cn-north-1"))


def test_the_role_of_an_endpoint_with_a_canary_may_describe_its_alarms() -> None:
    without_canary, with_canary = (
        actions_of(execution_policy(a_spec("sagemaker", **more), "1", "eu-west-1", BUCKET))
        for more in ({}, {"canary": {}})
    )
    assert with_canary - without_canary == {"cloudwatch:DescribeAlarms"}


def operations_of(file: Path) -> set[str]:
    """Return the AWS operations that a module mentions, as attributes or string literals."""
    tree = ast.parse(file.read_text())
    literals = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names = literals | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {
        f"{service}:{operation}"
        for service in literals & AWS_SERVICES
        for operation in operations(service)
        if xform_name(operation) in names
    }


@pytest.mark.slow
def test_a_deployer_may_call_every_operation_that_the_code_uses() -> None:
    files = [*sorted(DEPLOY.rglob("*.py")), *sorted(BATCH.rglob("*.py"))]
    needed_actions = {
        IAM_ACTION_BY_OPERATION.get(operation, operation)
        for file in files
        for operation in operations_of(file)
    }
    allowed_actions = set().union(
        *(actions_of(policy(f"deployer-{target}")) for target in DEPLOY_TARGETS)
    )
    assert needed_actions <= allowed_actions | NEVER_GRANTED, needed_actions - allowed_actions
    assert len(needed_actions) > 60
