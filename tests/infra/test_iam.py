"""The policies of infra/iam: actions that there are, in files that AWS takes, and no star where a resource can be named."""

from __future__ import annotations

import json
from pathlib import Path

import botocore.session
import pytest

from tsx_cli.deploy.iam import documents, execution
from tsx_cli.deploy.spec import DeploySpec

IAM = Path(__file__).parents[2] / "infra" / "iam"
LARGEST = 6144  # characters of a managed policy, without its white space
CLIENTS = {"s3": ("s3",), "sagemaker": ("sagemaker", "sagemaker-runtime")}
NO_CALLS = {  # permissions that are not called as an operation of the API
    "iam:PassRole", "lambda:InvokeFunction", "lambda:InvokeFunctionUrl", "lambda:PassCapacityProvider", "s3:GetBucketPublicAccessBlock",
    "s3:ListBucket", "s3:PutBucketPublicAccessBlock",
}  # fmt: skip
UNNAMED = {  # what has no resources, or is asked of all of them
    "Who", "SignInToEcr", "Prices", "Lists", "Scaling", "LookAtAlarms", "Metrics",
}  # fmt: skip


@pytest.mark.parametrize("name", list(documents()))
def test_a_policy_names_actions_that_there_are(name: str) -> None:
    text = (IAM / f"{name}.json").read_text()
    policy = json.loads(text)
    assert policy == documents()[name]
    assert len("".join(text.split())) < LARGEST
    if name.startswith("trust"):
        return
    session = botocore.session.get_session()
    for statement in policy["Statement"]:
        assert statement["Resource"] != ["*"] or statement["Sid"] in UNNAMED
        for action in statement["Action"]:
            service, _, operation = action.partition(":")
            known = [each for client in CLIENTS.get(service, (service,)) for each in session.get_service_model(client).operation_names]
            assert operation in known or action in NO_CALLS, action


def test_a_role_that_is_made_has_what_its_deployment_wants_and_no_more() -> None:
    def sids(**own: object) -> set[str]:
        spec = DeploySpec.model_validate({"name": "a", "target": "lambda", "model": "a.mar", "lambda": own})
        return {each["Sid"] for each in execution(spec, "1", "eu-west-1")["Statement"]}

    queue = {"arn": "arn:aws:sqs:eu-west-1:1:q", "results": "s3://answers/x"}
    assert sids() == {"Logs"}
    assert sids(queue=queue, subnets=["s"]) == {"Logs", "Queue", "Results", "Network"}
    spec = DeploySpec.model_validate({"name": "a", "target": "lambda", "model": "a.mar"})
    assert "arn:aws-cn:logs" in json.dumps(execution(spec, "1", "cn-north-1"))
