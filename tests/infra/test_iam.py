"""The policies of infra/iam: actions that there are, in files that AWS takes, and no star where a
resource can be named.
"""

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
from tsx_cli.deploy.aws.iam_policies import execution, trust
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
def test_a_policy_names_actions_that_there_are(file: Path) -> None:
    assert len("".join(file.read_text().split())) < LARGEST
    if file.name.startswith("trust"):
        return
    for statement in policy(file.stem)["Statement"]:
        assert statement["Resource"] != ["*"] or statement["Sid"] in UNNAMED
        for action in statement["Action"]:
            service, _, operation = action.partition(":")
            known = [
                each for client in CLIENTS.get(service, (service,)) for each in operations(client)
            ]
            assert operation in known or action in NO_CALLS, action


@pytest.mark.parametrize("target", SERVED)
def test_the_files_of_a_role_are_what_create_role_makes(target: str) -> None:
    own = {"canary": {}, "sagemaker": {"component": {"endpoint": "e"}}}
    made = execution(a_spec(target, name="x-name-x", **own), "ACCOUNT", "REGION", BUCKET)
    assert policy(f"execution-{target}") == json.loads(json.dumps(made).replace("x-name-x", "NAME"))
    assert policy(f"trust-{target}") == trust(target)


@pytest.mark.parametrize("target", SERVED)
def test_who_plans_may_only_read_what_who_deploys_may(target: str) -> None:
    asked = actions_of(policy(f"planner-{target}"))
    assert asked < actions_of(policy(f"deployer-{target}"))
    assert all(READS.match(action) for action in asked)


def test_a_role_that_is_made_has_what_its_deployment_wants_and_no_more() -> None:
    def sids(**own: object) -> set[str]:
        made = execution(a_spec("lambda", **{"lambda": own}), "1", "eu-west-1")
        return {each["Sid"] for each in made["Statement"]}

    queue = {"arn": "arn:aws:sqs:eu-west-1:1:q", "results": "s3://answers/x"}
    assert sids() == {"Logs"}
    assert sids(queue=queue, subnets=["s"]) == {"Logs", "Queue", "Results", "Network"}
    assert "arn:aws-cn:logs" in json.dumps(execution(a_spec("lambda"), "1", "cn-north-1"))


def test_the_role_of_an_endpoint_with_a_canary_may_look_at_its_alarms() -> None:
    plain, shifted = (
        actions_of(execution(a_spec("sagemaker", **more), "1", "eu-west-1", BUCKET))
        for more in ({}, {"canary": {}})
    )
    assert shifted - plain == {"cloudwatch:DescribeAlarms"}


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
    allowed = set().union(*(actions_of(policy(f"deployer-{target}")) for target in SERVED))
    assert needed <= allowed | NEVER, needed - allowed
    assert len(needed) > 60
