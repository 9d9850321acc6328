"""A double of AWS in this process: moto, and the parts of SageMaker that moto lacks.

Calls of boto3 are answered without a socket. moto has no `UpdateEndpoint`, knows the instance types
of 2020, and creates endpoints at once. Here an endpoint changes for as many polls as a test says,
may fail with a reason, and then returns to its last configuration.
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
# Operations whose permission has another name.
IAM_ACTION_BY_OPERATION = {
    "lambda:Invoke": "lambda:InvokeFunction",
    "s3:HeadBucket": "s3:ListBucket",
    "s3:HeadObject": "s3:GetObject",
    "s3:ListObjectsV2": "s3:ListBucket",
    "s3:GetPublicAccessBlock": "s3:GetBucketPublicAccessBlock",
    "s3:PutPublicAccessBlock": "s3:PutBucketPublicAccessBlock",
    "sagemaker-runtime:InvokeEndpoint": "sagemaker:InvokeEndpoint",
}


@dataclass
class Scenario:
    """The behaviour of AWS that a test sets, and the calls that were made.

    A changing endpoint is ready after `polls` descriptions of it, or fails if `failure` is set.
    """

    polls: int = 0
    failure: str = ""
    polls_left: dict[str, int] = field(default_factory=dict)
    # The next configuration of each endpoint, and whether it is a creation or an update.
    target: dict[str, tuple[str, str]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)  # operations of SageMaker, in order
    # The provisioned concurrency of each `function:alias`.
    provisioned: dict[str, dict[str, Any]] = field(default_factory=dict)
    providers: dict[str, dict[str, Any]] = field(default_factory=dict)
    components: dict[str, FakeComponent] = field(default_factory=dict)
    # The alarms that went off, with their times.
    alarmed: list[tuple[str, datetime]] = field(default_factory=list)
    # All operations in order, as `service:Operation`.
    operations: list[str] = field(default_factory=list)
    # Functions that are called with each operation and the text of its request, before and after
    # the operation is carried out.
    before: Callable[[str, str], None] = lambda operation, call: None
    after: Callable[[str, str], None] = lambda operation, call: None
    last_request: str = ""  # the text of the last request
    # The account that each S3 operation expected to own the bucket.
    owners: dict[str, str] = field(default_factory=dict)


class Account:
    """The account that boto3 finds in the environment; `emptied` removes everything in it."""

    def __init__(self) -> None:
        self.scenario = Scenario()

    def emptied(self) -> Scenario:
        from moto.moto_api._internal.models import moto_api_backend

        moto_api_backend.reset()
        self.scenario = Scenario()
        return self.scenario


@contextmanager
def aws() -> Generator[Account, None, None]:
    """Yield one account and one session of boto3 for many tests.

    A session reads the descriptions of the services, which takes half a second.
    """
    from moto.sagemaker.models import FakeEndpointConfig
    from moto.sagemaker.responses import SageMakerResponse

    account = Account()
    make = boto3.session.Session
    with pytest.MonkeyPatch.context() as patch:
        variables = {
            "ACCESS_KEY_ID": "a",
            "SECRET_ACCESS_KEY": "b",
            "DEFAULT_REGION": REGION,
            "REGION": REGION,
        }
        for name, value in variables.items():
            patch.setenv(f"AWS_{name}", value)
        for name in ("PROFILE", "ENDPOINT_URL"):
            patch.delenv(f"AWS_{name}", raising=False)
        patch.setattr(
            handlers, "BUILTIN_HANDLERS", [*handlers.BUILTIN_HANDLERS, ("before-send", _answer)]
        )
        patch.setattr(boto3, "DEFAULT_SESSION", None)
        patch.setattr(
            "boto3.session.Session",
            cache(lambda **options: _report_calls(make(**options), account)),
        )
        patch.setattr(
            FakeEndpointConfig, "validate_instance_type", lambda self, instance_type: None
        )
        patch.setattr(
            SageMakerResponse,
            "update_endpoint",
            lambda self: _update(self, account.scenario),
            raising=False,
        )
        for name in ("create_endpoint", "describe_endpoint"):
            patch.setattr(
                SageMakerResponse,
                name,
                _endpoint_operation(name, getattr(SageMakerResponse, name), account),
            )
        patch_lambda(patch, account)
        patch_components(patch, account)
        try:
            yield account
        finally:
            account.emptied()


def _answer(request: AWSPreparedRequest, **options: Any) -> AWSResponse | None:
    """Return moto's response, or None for an address outside AWS, to which botocore connects."""
    from moto.core.botocore_stubber import BotocoreStubber, MockRawResponse

    answer = BotocoreStubber().process_request(request)
    if answer is None:
        return None
    status, headers, body = answer
    return AWSResponse(request.url, status, headers, MockRawResponse(body))


def _report_calls(session: Any, account: Account) -> Any:
    """Have a session report its calls to the test."""

    def before(model: Any, params: Any, **options: Any) -> None:
        operation, scenario = f"{model.service_model.service_name}:{model.name}", account.scenario
        scenario.operations.append(operation)
        scenario.last_request = f"{operation} {params['url_path']} {params['query_string']} {params['body'] if isinstance(params['body'], bytes) else ''}"
        if operation.startswith("s3:"):
            _check_owner(scenario, model, params["headers"].get("x-amz-expected-bucket-owner", ""))
        scenario.before(operation, scenario.last_request)

    def after(model: Any, **options: Any) -> None:
        account.scenario.after(
            f"{model.service_model.service_name}:{model.name}", account.scenario.last_request
        )

    make = session.client
    clients: dict[Any, Any] = {}

    def client(service: str, **options: Any) -> Any:
        address = options.get("region_name"), options.get("endpoint_url")
        client_key = (
            service,
            *address,
            os.environ.get("AWS_ENDPOINT_URL"),
            os.environ.get("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME"),
        )
        # Clients are cached, since creating one takes as long as ten calls.
        if client_key not in clients:
            clients[client_key] = make(service, **options)
        return clients[client_key]

    session.client = client
    session.events.register("before-call", before)
    session.events.register("after-call", after)
    return session


def _check_owner(scenario: Scenario, model: Any, expected: str) -> None:
    """Check the expected owner of a bucket; ACCOUNT owns all of them here.

    https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucket-owner-condition.html
    """
    if "ExpectedBucketOwner" in model.input_shape.members:
        scenario.owners[model.name] = expected
    if expected not in ("", ACCOUNT):
        code = (
            ("403", "Forbidden")
            if model.http["method"] == "HEAD"
            else ("AccessDenied", "Access Denied")
        )
        raise ClientError({"Error": {"Code": code[0], "Message": code[1]}}, model.name)


def _endpoint(response: Any) -> Any:
    name = response._get_param("EndpointName")
    response.sagemaker_backend.describe_endpoint(name)  # raises an error if there is none
    return response.sagemaker_backend.endpoints[name]


def _update(response: Any, scenario: Scenario) -> Any:
    """Answer UpdateEndpoint.

    https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_UpdateEndpoint.html
    """
    from moto.core.responses import ActionResult
    from moto.sagemaker.exceptions import ValidationError

    endpoint, config = _endpoint(response), response._get_param("EndpointConfigName")
    configuration = response.sagemaker_backend.describe_endpoint_config(config)
    name = endpoint.endpoint_name
    if scenario.polls_left.get(name):
        raise ValidationError(f"Cannot update in-progress endpoint {name}.")
    scenario.calls.append(f"UpdateEndpoint {config}")
    scenario.target[name] = (config, "update")
    if not response._get_param("RetainAllVariantProperties") and not scenario.failure:
        endpoint.production_variants = endpoint._process_production_variants(
            configuration["ProductionVariants"]
        )
    _begin(endpoint, scenario, "Updating")
    return ActionResult({"EndpointArn": endpoint.arn})


def _endpoint_operation(name: str, real: Any, account: Account) -> Any:
    def create_endpoint(response: Any) -> Any:
        answer, scenario = real(response), account.scenario
        endpoint = _endpoint(response)
        scenario.calls.append(f"CreateEndpoint {endpoint.endpoint_config_name}")
        scenario.target[endpoint.endpoint_name] = (endpoint.endpoint_config_name, "create")
        _begin(endpoint, scenario, "Creating")
        return answer

    def describe_endpoint(response: Any) -> Any:
        endpoint, scenario = _endpoint(response), account.scenario
        name = endpoint.endpoint_name
        if scenario.polls_left.get(name, 0) > 0:
            scenario.polls_left[name] -= 1
        elif name in scenario.target:
            _settle(endpoint, scenario, *scenario.target.pop(name))
        return real(response)

    return create_endpoint if name == "create_endpoint" else describe_endpoint


def _begin(endpoint: Any, scenario: Scenario, status: str) -> None:
    endpoint.endpoint_status = status
    endpoint.pending_deployment_summary = {
        "EndpointConfigName": scenario.target[endpoint.endpoint_name][0]
    }
    scenario.polls_left[endpoint.endpoint_name] = scenario.polls


def _settle(endpoint: Any, scenario: Scenario, config: str, outcome: str) -> None:
    """End a creation or an update.

    A failed update restores the last configuration and has a reason.
    """
    endpoint.pending_deployment_summary = None
    if scenario.failure:
        endpoint.endpoint_status = "Failed" if outcome == "create" else "InService"
        endpoint.failure_reason = scenario.failure
        return
    endpoint.endpoint_status, endpoint.endpoint_config_name, endpoint.failure_reason = (
        "InService",
        config,
        None,
    )
