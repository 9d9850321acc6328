"""AWS in this process: moto, with what it lacks of SageMaker and is documented filled in.

A call of boto3 is answered without a socket.

`UpdateEndpoint` is not there, instance types are those of 2020, and what is created is there at
once: here endpoints take as many looks as a test says, fail with a reason, and go back where a test
says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from typing import Any

import boto3
import pytest
from botocore import handlers
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.exceptions import ClientError

from tests.support.platforms.aws_components import FakeComponent, patch_components
from tests.support.platforms.aws_lambda import patch_lambda

REGION, ACCOUNT = "eu-central-1", "123456789012"
NAMED_OTHERWISE = {  # by IAM than by the API
    "lambda:Invoke": "lambda:InvokeFunction",
    "s3:HeadBucket": "s3:ListBucket",
    "s3:HeadObject": "s3:GetObject",
    "s3:ListObjectsV2": "s3:ListBucket",
    "s3:GetPublicAccessBlock": "s3:GetBucketPublicAccessBlock",
    "s3:PutPublicAccessBlock": "s3:PutBucketPublicAccessBlock",
    "sagemaker-runtime:InvokeEndpoint": "sagemaker:InvokeEndpoint",
}


@dataclass
class Course:
    """How endpoints get on: for how many looks they are changing, and whether they then fail."""

    looks: int = 0
    failure: str = ""
    left: dict[str, int] = field(default_factory=dict)
    target: dict[str, tuple[str, str]] = field(
        default_factory=dict
    )  # by endpoint: the configuration it moves to, and its way
    calls: list[str] = field(default_factory=list)  # operations of SageMaker, in order
    provisioned: dict[str, dict[str, Any]] = field(default_factory=dict)  # by function:alias
    providers: dict[str, dict[str, Any]] = field(default_factory=dict)
    components: dict[str, FakeComponent] = field(default_factory=dict)
    alarmed: list[tuple[str, datetime]] = field(
        default_factory=list
    )  # alarms that went off, and when
    asked: list[str] = field(
        default_factory=list
    )  # what tsx asked of AWS, as `service:Operation`, in order
    # Called with each of these and with what it says.
    before: Callable[[str, str], None] = lambda operation, what: None
    # Once it is carried out, and before its answer is known.
    after: Callable[[str, str], None] = lambda operation, what: None
    said: str = ""  # by the last of them
    owners: dict[str, str] = field(
        default_factory=dict
    )  # by operation of S3: the account that its bucket had to belong to


class Account:
    """What boto3 finds by the environment; `emptied` begins anew."""

    def __init__(self) -> None:
        self.course = Course()

    def emptied(self) -> Course:
        from moto.moto_api._internal.models import moto_api_backend

        moto_api_backend.reset()
        self.course = Course()
        return self.course


@contextmanager
def aws() -> Generator[Account, None, None]:
    """One account and one session of boto3, whose descriptions of the services take half a second
    to read, for many tests.
    """
    from moto.sagemaker.models import FakeEndpointConfig
    from moto.sagemaker.responses import SageMakerResponse

    account = Account()
    make = boto3.session.Session
    with pytest.MonkeyPatch.context() as patch:
        given = {
            "ACCESS_KEY_ID": "a",
            "SECRET_ACCESS_KEY": "b",
            "DEFAULT_REGION": REGION,
            "REGION": REGION,
        }
        for name, value in given.items():
            patch.setenv(f"AWS_{name}", value)
        for name in ("PROFILE", "ENDPOINT_URL"):
            patch.delenv(f"AWS_{name}", raising=False)
        patch.setattr(
            handlers, "BUILTIN_HANDLERS", [*handlers.BUILTIN_HANDLERS, ("before-send", _answer)]
        )
        patch.setattr(boto3, "DEFAULT_SESSION", None)
        patch.setattr(
            "boto3.session.Session", cache(lambda **which: _heard(make(**which), account))
        )
        patch.setattr(
            FakeEndpointConfig, "validate_instance_type", lambda self, instance_type: None
        )
        patch.setattr(
            SageMakerResponse,
            "update_endpoint",
            lambda self: _update(self, account.course),
            raising=False,
        )
        for name in ("create_endpoint", "describe_endpoint"):
            patch.setattr(
                SageMakerResponse, name, _watched(name, getattr(SageMakerResponse, name), account)
            )
        patch_lambda(patch, account)
        patch_components(patch, account)
        try:
            yield account
        finally:
            account.emptied()


def _answer(request: AWSPreparedRequest, **rest: Any) -> AWSResponse | None:
    """What moto answers; None for an address outside AWS, which botocore then calls."""
    from moto.core.botocore_stubber import BotocoreStubber, MockRawResponse

    answer = BotocoreStubber().process_request(request)
    if answer is None:
        return None
    status, headers, body = answer
    return AWSResponse(request.url, status, headers, MockRawResponse(body))


def _heard(session: Any, account: Account) -> Any:
    """Tells the test what is asked of AWS."""

    def before(model: Any, params: Any, **rest: Any) -> None:
        operation, course = f"{model.service_model.service_name}:{model.name}", account.course
        course.asked.append(operation)
        course.said = f"{operation} {params['url_path']} {params['query_string']} {params['body'] if isinstance(params['body'], bytes) else ''}"
        if operation.startswith("s3:"):
            _check_owner(course, model, params["headers"].get("x-amz-expected-bucket-owner", ""))
        course.before(operation, course.said)

    def after(model: Any, **rest: Any) -> None:
        account.course.after(
            f"{model.service_model.service_name}:{model.name}", account.course.said
        )

    make = session.client
    made: dict[Any, Any] = {}

    def client(service: str, **how: Any) -> Any:
        place = how.get("region_name"), how.get("endpoint_url")
        which = (
            service,
            *place,
            os.environ.get("AWS_ENDPOINT_URL"),
            os.environ.get("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME"),
        )
        if which not in made:  # it takes as long to make as to use ten times
            made[which] = make(service, **how)
        return made[which]

    session.client = client
    session.events.register("before-call", before)
    session.events.register("after-call", after)
    return session


def _check_owner(course: Course, model: Any, expected: str) -> None:
    """https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucket-owner-condition.html: every
    bucket here is ACCOUNT's.
    """
    if "ExpectedBucketOwner" in model.input_shape.members:
        course.owners[model.name] = expected
    if expected not in ("", ACCOUNT):
        code = (
            ("403", "Forbidden")
            if model.http["method"] == "HEAD"
            else ("AccessDenied", "Access Denied")
        )
        raise ClientError({"Error": {"Code": code[0], "Message": code[1]}}, model.name)


def _endpoint(response: Any) -> Any:
    name = response._get_param("EndpointName")
    response.sagemaker_backend.describe_endpoint(name)  # raises where there is none
    return response.sagemaker_backend.endpoints[name]


def _update(response: Any, course: Course) -> Any:
    """https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_UpdateEndpoint.html"""
    from moto.core.responses import ActionResult
    from moto.sagemaker.exceptions import ValidationError

    endpoint, config = _endpoint(response), response._get_param("EndpointConfigName")
    found = response.sagemaker_backend.describe_endpoint_config(config)
    name = endpoint.endpoint_name
    if course.left.get(name):
        raise ValidationError(f"Cannot update in-progress endpoint {name}.")
    course.calls.append(f"UpdateEndpoint {config}")
    course.target[name] = (config, "update")
    if not response._get_param("RetainAllVariantProperties") and not course.failure:
        endpoint.production_variants = endpoint._process_production_variants(
            found["ProductionVariants"]
        )
    _begin(endpoint, course, "Updating")
    return ActionResult({"EndpointArn": endpoint.arn})


def _watched(name: str, real: Any, account: Account) -> Any:
    def create_endpoint(response: Any) -> Any:
        answer, course = real(response), account.course
        endpoint = _endpoint(response)
        course.calls.append(f"CreateEndpoint {endpoint.endpoint_config_name}")
        course.target[endpoint.endpoint_name] = (endpoint.endpoint_config_name, "create")
        _begin(endpoint, course, "Creating")
        return answer

    def describe_endpoint(response: Any) -> Any:
        endpoint, course = _endpoint(response), account.course
        name = endpoint.endpoint_name
        if course.left.get(name, 0) > 0:
            course.left[name] -= 1
        elif name in course.target:
            _settle(endpoint, course, *course.target.pop(name))
        return real(response)

    return create_endpoint if name == "create_endpoint" else describe_endpoint


def _begin(endpoint: Any, course: Course, status: str) -> None:
    endpoint.endpoint_status = status
    endpoint.pending_deployment_summary = {
        "EndpointConfigName": course.target[endpoint.endpoint_name][0]
    }
    course.left[endpoint.endpoint_name] = course.looks


def _settle(endpoint: Any, course: Course, config: str, way: str) -> None:
    """A creation that fails is Failed; an update that fails goes back, and says why."""
    endpoint.pending_deployment_summary = None
    if course.failure:
        endpoint.endpoint_status = "Failed" if way == "create" else "InService"
        endpoint.failure_reason = course.failure
        return
    endpoint.endpoint_status, endpoint.endpoint_config_name, endpoint.failure_reason = (
        "InService",
        config,
        None,
    )
