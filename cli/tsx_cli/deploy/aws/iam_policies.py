"""The execution role of a deployment, with the permissions that it needs.

infra/iam has these policies as files, and the policies of the deploying identity.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.engine.facts import Facts, owner_tags
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.spec import DeploySpec

Document = dict[str, Any]
Statement = tuple[str, str, list[str]]  # name, actions, resources
SERVICES = {"sagemaker": "sagemaker.amazonaws.com", "lambda": "lambda.amazonaws.com"}
RECORD_URL = "TSX_RECORD_URL"  # the setting of a server that uploads recordings
POLICY = "tsx"  # the name of the only policy of a created role
PARTITIONS = {"cn-": "aws-cn", "us-gov-": "aws-us-gov"}  # region prefix -> partition
ALL = ["*"]
PULL_ACTIONS = "ecr:BatchCheckLayerAvailability ecr:BatchGetImage ecr:GetDownloadUrlForLayer"
LOG_ACTIONS = "logs:CreateLogGroup logs:CreateLogStream logs:DescribeLogStreams logs:PutLogEvents"
QUEUE_ACTIONS = "sqs:DeleteMessage sqs:GetQueueAttributes sqs:ReceiveMessage"
# Actions for network interfaces in the user's VPC.
NETWORK_ACTIONS = (
    "ec2:CreateNetworkInterface ec2:DeleteNetworkInterface ec2:DescribeNetworkInterfaces"
    " ec2:DescribeSecurityGroups ec2:DescribeSubnets ec2:DescribeVpcs"
)


def role_name(name: str, target: str) -> str:
    return f"tsx-{name}-{target}"


def role(spec: DeploySpec, facts: Facts, tags: Mapping[str, str], bucket: str = "") -> Resource:
    """Return the execution role to create.

    Raises:
        UsageError: No role is given, and `create_role` is off.
    """
    if not spec.create_role:
        deployment = {"sagemaker": "endpoint", "lambda": "function"}[spec.target]
        raise UsageError(
            f"{spec.target}.role is not given: the ARN of the role that the {deployment} runs with"
            " (--role); infra/iam has what it needs, and --create-role makes one"
        )
    policy = execution_policy(spec, facts.account, facts.region, bucket)
    properties = {
        "AssumeRolePolicyDocument": trust_policy(spec.target),
        "Policies": [{"PolicyName": POLICY, "PolicyDocument": policy}],
    }
    return Resource(
        "Role",
        "AWS::IAM::Role",
        role_name(spec.name, spec.target),
        properties,
        tags=owner_tags(tags),
    )


def trust_policy(target: str) -> Document:
    service = {"Service": SERVICES[target]}
    return _document([{"Effect": "Allow", "Principal": service, "Action": "sts:AssumeRole"}])


def execution_policy(spec: DeploySpec, account: str, region: str, bucket: str = "") -> Document:
    """Return the least permissions that the deployment needs."""
    scope = f"{region}:{account}"
    statements = (
        _function(spec, scope) if spec.target == "lambda" else _endpoint(spec, scope, bucket)
    )
    allow_statements = [
        {"Sid": sid, "Effect": "Allow", "Action": actions.split(), "Resource": resources}
        for sid, actions, resources in statements
    ]
    partition = next(
        (name for prefix, name in PARTITIONS.items() if region.startswith(prefix)), "aws"
    )
    text = json.dumps(_document(allow_statements)).replace('"arn:aws:', f'"arn:{partition}:')
    return dict(json.loads(text))


def _endpoint(spec: DeploySpec, scope: str, bucket: str) -> Iterator[Statement]:
    settings = spec.sagemaker
    asynchronous = spec.sagemaker.asynchronous
    prefix = f"{bucket}/tsx/{spec.name}/"
    yield "Model", "s3:GetObject", [f"arn:aws:s3:::{prefix}*"]
    yield "Bucket", "s3:ListBucket", [f"arn:aws:s3:::{bucket}"]
    yield "SignInToEcr", "ecr:GetAuthorizationToken", ALL
    yield "Image", PULL_ACTIONS, [f"arn:aws:ecr:{scope}:repository/*"]
    yield "BatchAnswers", "s3:PutObject", [f"arn:aws:s3:::{prefix}batch/*"]
    groups = [f"Endpoints/{spec.name}", "TransformJobs"]
    groups += [f"InferenceComponents/{spec.name}"] if settings.component else []
    yield _logs(scope, *(f"/aws/sagemaker/{group}" for group in groups))
    yield "Metrics", "cloudwatch:PutMetricData", ALL
    if spec.canary is not None:
        yield "LookAtAlarms", "cloudwatch:DescribeAlarms", ALL
    outputs = [] if asynchronous is None else [asynchronous.output, asynchronous.failures]
    outputs += [] if settings.data_capture is None else [settings.data_capture.to]
    yield from _results(*outputs, spec.env.get(RECORD_URL))
    if asynchronous is not None:
        if topics := [
            topic for topic in (asynchronous.success_topic, asynchronous.error_topic) if topic
        ]:
            yield "Tell", "sns:Publish", topics
        # The endpoint reads from any bucket, because senders choose where their requests are.
        yield "Requests", "s3:GetObject", ["arn:aws:s3:::*/*"]
    if settings.subnets:
        yield "Network", NETWORK_ACTIONS, ALL


def _function(spec: DeploySpec, scope: str) -> Iterator[Statement]:
    queue = spec.lambda_.queue
    yield _logs(scope, f"/aws/lambda/{spec.name}")
    results = "" if queue is None else queue.results or ""
    locations = (results if results.startswith("s3://") else None, spec.env.get(RECORD_URL))
    yield from _results(*locations)
    if queue is not None:
        yield "Queue", QUEUE_ACTIONS, [queue.arn]
        if results.startswith("https://"):  # https://sqs.REGION.amazonaws.com/ACCOUNT/NAME
            host, owner, name = results.removeprefix("https://").split("/", 2)
            yield "Answers", "sqs:SendMessage", [f"arn:aws:sqs:{host.split('.')[1]}:{owner}:{name}"]
    if spec.lambda_.subnets:
        yield "Network", NETWORK_ACTIONS, ALL


def _logs(scope: str, *groups: str) -> Statement:
    names = [f"{group}{suffix}" for group in groups for suffix in ("", ":*")]
    return "Logs", LOG_ACTIONS, [f"arn:aws:logs:{scope}:log-group:{name}" for name in names]


def _results(*locations: str | None) -> Iterator[Statement]:
    """Yield the permission to write to locations of the form s3://bucket/prefix."""
    prefixes = [location.removeprefix("s3://").rstrip("/") for location in locations if location]
    arns = [f"arn:aws:s3:::{prefix}/*" for prefix in prefixes]
    if arns:
        yield "Results", "s3:PutObject", arns


def _document(statements: list[Document]) -> Document:
    return {"Version": "2012-10-17", "Statement": statements}
