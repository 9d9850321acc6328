"""The policies of infra/iam: actions that there are, in files that AWS takes, and no star where a
resource can be named.
"""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path

import botocore.session
import pytest
from botocore import xform_name

from tests.support.platforms.aws import NAMED_OTHERWISE
from tsx_cli.deploy.aws.iam_policies import documents, execution
from tsx_cli.deploy.spec import DeploySpec

ROOT = Path(__file__).parents[2]
IAM, DEPLOY, BATCH = (
    ROOT / "infra" / "iam",
    ROOT / "cli" / "tsx_cli" / "deploy",
    ROOT / "cli" / "tsx_cli" / "batch",
)
LARGEST = 6144  # characters of a managed policy, without its white space
CLIENTS = {"s3": ("s3",), "sagemaker": ("sagemaker", "sagemaker-runtime")}
NO_CALLS = {  # permissions that are not called as an operation of the API
    "iam:PassRole", "lambda:InvokeFunction", "lambda:InvokeFunctionUrl", "lambda:PassCapacityProvider", "s3:GetBucketPublicAccessBlock",
    "s3:ListBucket", "s3:PutBucketPublicAccessBlock",
}  # fmt: skip
UNNAMED = {  # what has no resources, or is asked of all of them
    "Who", "SignInToEcr", "Lists", "Scaling", "LookAtAlarms", "Metrics",
}  # fmt: skip


SESSION = botocore.session.get_session()
SERVICES = set(SESSION.get_available_services())
NEVER = {"s3:DeleteBucket"}  # the bucket stays


@cache
def operations(service: str) -> list[str]:
    return list(SESSION.get_service_model(service).operation_names)


@pytest.mark.parametrize("name", list(documents()))
def test_a_policy_names_actions_that_there_are(name: str) -> None:
    text = (IAM / f"{name}.json").read_text()
    policy = json.loads(text)
    assert policy == documents()[name]
    assert len("".join(text.split())) < LARGEST
    if name.startswith("trust"):
        return
    for statement in policy["Statement"]:
        assert statement["Resource"] != ["*"] or statement["Sid"] in UNNAMED
        for action in statement["Action"]:
            service, _, operation = action.partition(":")
            known = [
                each for client in CLIENTS.get(service, (service,)) for each in operations(client)
            ]
            assert operation in known or action in NO_CALLS, action


def test_a_role_that_is_made_has_what_its_deployment_wants_and_no_more() -> None:
    def sids(**own: object) -> set[str]:
        spec = DeploySpec.model_validate(
            {"name": "a", "target": "lambda", "model": "a.mar", "lambda": own}
        )
        return {each["Sid"] for each in execution(spec, "1", "eu-west-1")["Statement"]}

    queue = {"arn": "arn:aws:sqs:eu-west-1:1:q", "results": "s3://answers/x"}
    assert sids() == {"Logs"}
    assert sids(queue=queue, subnets=["s"]) == {"Logs", "Queue", "Results", "Network"}
    spec = DeploySpec.model_validate({"name": "a", "target": "lambda", "model": "a.mar"})
    assert "arn:aws-cn:logs" in json.dumps(execution(spec, "1", "cn-north-1"))


def test_the_role_of_an_endpoint_with_a_canary_may_look_at_its_alarms() -> None:
    def actions(**more: object) -> set[str]:
        spec = DeploySpec.model_validate(
            {"name": "a", "target": "sagemaker", "model": "a.mar", **more}
        )
        return {
            action
            for each in execution(spec, "1", "eu-west-1", "bucket")["Statement"]
            for action in each["Action"]
        }

    assert actions(canary={}) - actions() == {"cloudwatch:DescribeAlarms"}
    asked = {
        action
        for each in documents()["execution-sagemaker"]["Statement"]
        for action in each["Action"]
    }
    assert asked >= actions(canary={})  # and infra/iam has the file of it


def asked(file: Path) -> set[str]:
    """The operations of AWS that a module of tsx deploy names, in calls or as texts."""
    tree = ast.parse(file.read_text())
    texts = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    names = texts | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {
        f"{service}:{each}"
        for service in texts & SERVICES
        for each in operations(service)
        if xform_name(each) in names
    }


def test_whatever_the_code_asks_of_aws_is_allowed_to_who_deploys() -> None:
    files = [*sorted(DEPLOY.rglob("*.py")), *sorted(BATCH.rglob("*.py"))]
    needed = {NAMED_OTHERWISE.get(each, each) for file in files for each in asked(file)}
    allowed = {
        action
        for name in ("sagemaker", "lambda")
        for each in documents()[f"deployer-{name}"]["Statement"]
        for action in each["Action"]
    }
    assert needed <= allowed | NEVER, needed - allowed
    assert len(needed) > 60
