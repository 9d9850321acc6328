"""The IAM permissions of a deployment: of the deploying identity, and of the execution role.
infra/iam has them as files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.engine.facts import lasting
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.spec import DeploySpec

Document = dict[str, Any]
SERVICES = {"sagemaker": "sagemaker.amazonaws.com", "lambda": "lambda.amazonaws.com"}
POLICY = "tsx"  # the name of the one policy of a role that is made
READS = re.compile(r"[\w-]+:(Get|Describe|List|BatchGet|BatchCheck)")
PULL = ("ecr:BatchCheckLayerAvailability", "ecr:GetDownloadUrlForLayer", "ecr:BatchGetImage")
PUSH = (
    "InitiateLayerUpload",
    "UploadLayerPart",
    "CompleteLayerUpload",
    "PutImage",
    "DescribeRepositories",
)
OWN_IMAGES = (
    "ecr:CreateRepository",
    "ecr:TagResource",
    "ecr:ListTagsForResource",
    "ecr:DeleteRepository",
)
INTERFACES = (  # of a network of one's own
    "ec2:CreateNetworkInterface",
    "ec2:DeleteNetworkInterface",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeSubnets",
    "ec2:DescribeVpcs",
    "ec2:DescribeSecurityGroups",
)


def role_name(name: str, target: str) -> str:
    return f"tsx-{name}-{target}"


def role(
    spec: DeploySpec, account: str, region: str, tags: Mapping[str, str], bucket: str = ""
) -> Resource:
    """The execution role, made where that is asked for.

    Raises UsageError where it is not, as a deployment needs one.
    """
    if not spec.create_role:
        what = {"sagemaker": "endpoint", "lambda": "function"}[spec.target]
        raise UsageError(
            f"{spec.target}.role is not given: the ARN of the role that the {what} runs with"
            " (--role); infra/iam has what it needs, and --create-role makes one"
        )
    policies = [{"PolicyName": POLICY, "PolicyDocument": execution(spec, account, region, bucket)}]
    properties = {"AssumeRolePolicyDocument": trust(spec.target), "Policies": policies}
    return Resource(
        "Role", "AWS::IAM::Role", role_name(spec.name, spec.target), properties, tags=lasting(tags)
    )


def trust(target: str) -> Document:
    return _document(
        [
            {
                "Effect": "Allow",
                "Principal": {"Service": SERVICES[target]},
                "Action": "sts:AssumeRole",
            }
        ]
    )


def execution(spec: DeploySpec, account: str, region: str, bucket: str = "") -> Document:
    """What runs may do: no more than what is wanted takes."""
    makers = {"sagemaker": _endpoint, "lambda": _function}
    text = json.dumps(_document(makers[spec.target](spec, account, region, bucket)))
    partition = (
        "aws-cn"
        if region.startswith("cn-")
        else "aws-us-gov"
        if region.startswith("us-gov-")
        else "aws"
    )
    return dict(json.loads(text.replace('"arn:aws:', f'"arn:{partition}:')))


def deployer(target: str, account: str, region: str) -> Document:
    """What the commands of `tsx deploy` ask of AWS."""
    own = _deploys_endpoints if target == "sagemaker" else _deploys_functions
    place = f"{region}:{account}"
    service = {"StringEquals": {"iam:PassedToService": SERVICES[target]}}
    roles = ["CreateRole", "GetRole", "DeleteRole", "TagRole", "UpdateAssumeRolePolicy"]
    roles += ["PutRolePolicy", "GetRolePolicy", "DeleteRolePolicy", "ListRolePolicies"]
    shared = [
        _allow("Who", ["sts:GetCallerIdentity"]),
        _allow("GiveItsRole", ["iam:PassRole"], [f"arn:aws:iam::{account}:role/*"], service),
        _allow("LookAtItsRole", ["iam:GetRole"], [f"arn:aws:iam::{account}:role/*"]),
        _allow(
            "CreateRoleOnly",
            [f"iam:{each}" for each in roles],
            [f"arn:aws:iam::{account}:role/tsx-*"],
        ),
        _allow("SignInToEcr", ["ecr:GetAuthorizationToken"]),
        _allow(
            "Images",
            [*PULL, "ecr:DescribeImages", *(f"ecr:{each}" for each in PUSH)],
            [f"arn:aws:ecr:{place}:repository/*"],
        ),
        _allow(
            "PurgeImages",
            ["ecr:ListImages", "ecr:BatchDeleteImage"],
            [f"arn:aws:ecr:{place}:repository/*"],
        ),
        _allow("OwnImages", OWN_IMAGES, [f"arn:aws:ecr:{place}:repository/tsx/{target}/*"]),
        *_watches(place),
    ]
    return _document([*shared, *own(account, place)])


def planner(target: str, account: str, region: str) -> Document:
    """What a plan asks of AWS: of a deployer's permissions those that only read."""
    found = [
        {**each, "Action": [action for action in each["Action"] if READS.match(action)]}
        for each in deployer(target, account, region)["Statement"]
    ]
    return _document(
        [
            each
            for each in found
            if each["Action"]
            and each["Sid"] not in ("LookAtItsRole", "PurgeImages", "Logs", "SignInToEcr")
        ]
    )


def trusted_workflow() -> Document:
    """Who may take a role of a workflow's: the jobs of one environment of one repository, by the
    tokens that GitHub gives them.
    """
    issuer = "token.actions.githubusercontent.com"
    claims = {
        f"{issuer}:aud": "sts.amazonaws.com",
        f"{issuer}:sub": "repo:OWNER/REPOSITORY:environment:production",
    }
    whose = {"Federated": f"arn:aws:iam::ACCOUNT:oidc-provider/{issuer}"}
    statement = {
        "Effect": "Allow",
        "Principal": whose,
        "Action": "sts:AssumeRoleWithWebIdentity",
        "Condition": {"StringEquals": claims},
    }
    return _document([statement])


def documents() -> dict[str, Document]:
    """The files of infra/iam: ACCOUNT, REGION and NAME stand for what they say."""
    found: dict[str, Document] = {}
    for target in SERVICES:
        spec = DeploySpec.model_validate(
            {
                "name": "x-name-x",
                "target": target,
                "model": "x.mar",
                "canary": {},
                "sagemaker": {"component": {"endpoint": "e"}},
            }
        )
        text = json.dumps(execution(spec, "ACCOUNT", "REGION", "tsx-ACCOUNT-REGION")).replace(
            spec.name, "NAME"
        )
        found[f"deployer-{target}"] = deployer(target, "ACCOUNT", "REGION")
        found[f"planner-{target}"] = planner(target, "ACCOUNT", "REGION")
        found[f"execution-{target}"] = json.loads(text)
        found[f"trust-{target}"] = trust(target)
    caller = [
        _allow(
            "CallByUrl",
            ["lambda:InvokeFunctionUrl", "lambda:InvokeFunction"],
            ["arn:aws:lambda:REGION:ACCOUNT:function:NAME:live"],
        )
    ]
    return {**found, "caller-lambda": _document(caller), "trust-github": trusted_workflow()}


def _deploys_endpoints(account: str, place: str) -> list[Document]:
    kinds = ("model/tsx-*", "endpoint-config/tsx-*", "endpoint/*", "inference-component/*")
    named = ("Model", "EndpointConfig", "Endpoint", "InferenceComponent")
    verbs = [f"{verb}{kind}" for kind in named for verb in ("Create", "Describe", "Delete")]
    verbs += [
        "UpdateEndpoint",
        "UpdateInferenceComponent",
        "UpdateInferenceComponentRuntimeConfig",
        "InvokeEndpoint",
        "AddTags",
        "ListTags",
    ]
    scaling = f"arn:aws:iam::{account}:role/aws-service-role/sagemaker.application-autoscaling.amazonaws.com/*"
    bucket = "arn:aws:s3:::tsx-" + account + "-*"
    on_bucket = (
        "CreateBucket",
        "ListBucket",
        "GetBucketPublicAccessBlock",
        "PutBucketPublicAccessBlock",
        "PutBucketTagging",
    )
    jobs = (
        "CreateTransformJob",
        "DescribeTransformJob",
        "StopTransformJob",
        "AddTags",
    )  # of `tsx batch --on sagemaker`
    on_objects = ("GetObject", "PutObject", "DeleteObject", "AbortMultipartUpload")
    return [
        _allow(
            "Endpoints",
            [f"sagemaker:{each}" for each in verbs],
            [f"arn:aws:sagemaker:{place}:{kind}" for kind in kinds],
        ),
        _allow(
            "BatchJobs",
            [f"sagemaker:{each}" for each in jobs],
            [f"arn:aws:sagemaker:{place}:transform-job/tsx-batch-*"],
        ),
        _allow(
            "Lists",
            [
                f"sagemaker:List{kind}s"
                for kind in ("Model", "EndpointConfig", "InferenceComponent", "TransformJob")
            ],
        ),
        _allow("Bucket", [f"s3:{each}" for each in on_bucket], [bucket]),
        _allow("Models", [f"s3:{each}" for each in on_objects], [f"{bucket}/tsx/*"]),
        _allow("FirstScaling", ["iam:CreateServiceLinkedRole"], [scaling]),
        *_logs(place, "/aws/sagemaker/Endpoints/*", "/aws/sagemaker/InferenceComponents/*"),
    ]


def _deploys_functions(account: str, place: str) -> list[Document]:
    function = (
        "CreateFunction",
        "GetFunction",
        "UpdateFunctionCode",
        "UpdateFunctionConfiguration",
        "DeleteFunction",
        "InvokeFunction",
    )
    version = (
        "PublishVersion",
        "ListVersionsByFunction",
        "CreateAlias",
        "GetAlias",
        "UpdateAlias",
        "DeleteAlias",
    )
    url = (
        "CreateFunctionUrlConfig",
        "GetFunctionUrlConfig",
        "UpdateFunctionUrlConfig",
        "DeleteFunctionUrlConfig",
    )
    who = ("AddPermission", "GetPolicy", "RemovePermission", "TagResource", "ListTags")
    ready = [f"{verb}ProvisionedConcurrencyConfig" for verb in ("Put", "Get", "Delete")]
    verbs = [
        *function,
        *version,
        *url,
        *who,
        *ready,
        "PutFunctionConcurrency",
        "DeleteFunctionConcurrency",
    ]
    queues = [f"{verb}EventSourceMapping" for verb in ("Create", "Get", "Update", "Delete")] + [
        "TagResource",
        "ListTags",
    ]
    instances = [
        f"{verb}CapacityProvider" for verb in ("Create", "Get", "Update", "Delete", "Pass")
    ] + ["TagResource", "ListTags"]
    scaling = f"arn:aws:iam::{account}:role/aws-service-role/lambda.application-autoscaling.amazonaws.com/*"
    return [
        _allow(
            "Functions",
            [f"lambda:{each}" for each in verbs],
            [f"arn:aws:lambda:{place}:function:*"],
        ),
        _allow(
            "Queues",
            [f"lambda:{each}" for each in queues],
            [f"arn:aws:lambda:{place}:event-source-mapping:*"],
        ),
        _allow("Lists", ["lambda:ListEventSourceMappings"]),
        _allow(
            "ManagedInstances",
            [f"lambda:{each}" for each in instances],
            [f"arn:aws:lambda:{place}:capacity-provider:*"],
        ),
        # For a repository of the same account, Lambda grants itself access with the permissions of
        # the caller that creates the function.
        _allow(
            "LetLambdaPull",
            ["ecr:GetRepositoryPolicy", "ecr:SetRepositoryPolicy"],
            [f"arn:aws:ecr:{place}:repository/*"],
        ),
        _allow("FirstScaling", ["iam:CreateServiceLinkedRole"], [scaling]),
        *_logs(place, "/aws/lambda/*"),
    ]


def _watches(place: str) -> list[Document]:
    scaling = ["RegisterScalableTarget", "DeregisterScalableTarget", "DescribeScalableTargets"]
    scaling += ["PutScalingPolicy", "DeleteScalingPolicy", "DescribeScalingPolicies"]
    alarms = [
        f"cloudwatch:{each}"
        for each in ("PutMetricAlarm", "DeleteAlarms", "TagResource", "ListTagsForResource")
    ]
    return [
        _allow("Scaling", [f"application-autoscaling:{each}" for each in scaling]),
        _allow(
            "Alarms",
            alarms,
            [f"arn:aws:cloudwatch:{place}:alarm:{name}" for name in ("tsx-*", "TargetTracking-*")],
        ),
        _allow("LookAtAlarms", ["cloudwatch:DescribeAlarms", "cloudwatch:DescribeAlarmHistory"]),
    ]


def _logs(place: str, *groups: str) -> list[Document]:
    verbs = [
        "DescribeLogStreams",
        "FilterLogEvents",
        "GetLogEvents",
        "StartLiveTail",
        "CreateLogGroup",
        "DeleteLogGroup",
    ]
    verbs += ["PutRetentionPolicy", "TagResource"]
    return [
        _allow(
            "Logs",
            [f"logs:{each}" for each in verbs],
            [f"arn:aws:logs:{place}:log-group:{each}" for each in groups],
        ),
        _allow(
            "FindLogs",
            ["logs:DescribeLogGroups", "logs:ListTagsForResource"],
            [f"arn:aws:logs:{place}:log-group:*"],
        ),
    ]


def _endpoint(spec: DeploySpec, account: str, region: str, bucket: str) -> list[Document]:
    own = spec.sagemaker
    place = f"{region}:{account}"
    wanted = [_allow("Model", ["s3:GetObject"], [f"arn:aws:s3:::{bucket}/tsx/{spec.name}/*"])]
    wanted += [_allow("Bucket", ["s3:ListBucket"], [f"arn:aws:s3:::{bucket}"]), *_image(place)]
    wanted.append(
        _allow("BatchAnswers", ["s3:PutObject"], [f"arn:aws:s3:::{bucket}/tsx/{spec.name}/batch/*"])
    )
    groups = [f"/aws/sagemaker/Endpoints/{spec.name}", "/aws/sagemaker/TransformJobs"]
    groups += [f"/aws/sagemaker/InferenceComponents/{spec.name}"] if own.component else []
    wanted.append(_writes_logs(place, *groups))
    wanted.append(_allow("Metrics", ["cloudwatch:PutMetricData"]))
    if spec.canary is not None:
        wanted.append(_allow("LookAtAlarms", ["cloudwatch:DescribeAlarms"]))
    queued = own.asynchronous
    outputs = [queued.output, queued.failures] if queued is not None else []
    outputs += [own.data_capture.to] if own.data_capture is not None else []
    wanted += _writes([each for each in outputs if each])
    topics = (
        []
        if queued is None
        else [each for each in (queued.success_topic, queued.error_topic) if each]
    )
    wanted += [_allow("Tell", ["sns:Publish"], topics)] if topics else []
    if queued is not None:
        wanted.append(
            _allow("Requests", ["s3:GetObject"], ["arn:aws:s3:::*/*"])
        )  # they lie where their senders put them
    return wanted + ([_allow("Network", INTERFACES)] if own.subnets else [])


def _function(spec: DeploySpec, account: str, region: str, bucket: str) -> list[Document]:
    own = spec.lambda_
    wanted = [_writes_logs(f"{region}:{account}", f"/aws/lambda/{spec.name}")]
    if own.queue is not None:
        wanted.append(
            _allow(
                "Queue",
                ["sqs:ReceiveMessage", "sqs:DeleteMessage", "sqs:GetQueueAttributes"],
                [own.queue.arn],
            )
        )
        results = own.queue.results or ""
        wanted += _writes([results] if results.startswith("s3://") else [])
        if results.startswith("https://"):  # https://sqs.REGION.amazonaws.com/ACCOUNT/NAME
            where, whose, name = results.removeprefix("https://").split("/", 2)
            wanted.append(
                _allow(
                    "Answers",
                    ["sqs:SendMessage"],
                    [f"arn:aws:sqs:{where.split('.')[1]}:{whose}:{name}"],
                )
            )
    return wanted + ([_allow("Network", INTERFACES)] if own.subnets else [])


def _image(place: str) -> list[Document]:
    return [
        _allow("SignInToEcr", ["ecr:GetAuthorizationToken"]),
        _allow("Image", PULL, [f"arn:aws:ecr:{place}:repository/*"]),
    ]


def _writes_logs(place: str, *groups: str) -> Document:
    verbs = [
        "logs:CreateLogGroup",
        "logs:CreateLogStream",
        "logs:PutLogEvents",
        "logs:DescribeLogStreams",
    ]
    return _allow(
        "Logs",
        verbs,
        [f"arn:aws:logs:{place}:log-group:{group}{end}" for group in groups for end in ("", ":*")],
    )


def _writes(places: Sequence[str]) -> list[Document]:
    """`places` as s3://bucket/prefix."""
    arns = [f"arn:aws:s3:::{each.removeprefix('s3://').rstrip('/')}/*" for each in places]
    return [_allow("Results", ["s3:PutObject"], arns)] if arns else []


def _allow(
    sid: str,
    actions: Iterable[str],
    resources: Iterable[str] = ("*",),
    condition: Mapping[str, Any] | None = None,
) -> Document:
    statement: Document = {
        "Sid": sid,
        "Effect": "Allow",
        "Action": sorted(actions),
        "Resource": list(resources),
    }
    return statement if condition is None else {**statement, "Condition": dict(condition)}


def _document(statements: list[Document]) -> Document:
    return {"Version": "2012-10-17", "Statement": statements}
