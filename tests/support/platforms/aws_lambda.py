"""A double of the documented parts of Lambda that moto lacks, and of CloudWatch's alarm history.

Updates take time, versions are immutable, and version numbers are never reused. There are
provisioned concurrency, capacity providers, and responses of images.
"""

from __future__ import annotations

import base64
import copy
import json
from types import SimpleNamespace
from typing import Any

import boto3
import pytest

TRUST = {
    "Statement": [
        {
            "Effect": "Allow",
            "Principal": {"Service": "lambda.amazonaws.com"},
            "Action": "sts:AssumeRole",
        }
    ]
}


def make_role(name: str = "deployed") -> None:
    """Create a role that a function can run with."""
    boto3.client("iam").create_role(RoleName=name, AssumeRolePolicyDocument=json.dumps(TRUST))


def patch_lambda(patch: pytest.MonkeyPatch, account: Any) -> None:
    """Patch the operations of https://docs.aws.amazon.com/lambda/latest/api/API_Operations.html."""
    from moto.awslambda import models, urls
    from moto.awslambda.responses import LambdaResponse
    from moto.cloudwatch.responses import CloudWatchResponse

    for path in (
        "functions/(?P<function_name>[\\w_:%-]+)/provisioned-concurrency/?$",
        "capacity-providers/?$",
        "capacity-providers/(?P<provider>[\\w_-]+)$",
    ):
        patch.setitem(urls.url_paths, "{0}/(?P<api_version>[^/]+)/" + path, LambdaResponse.dispatch)
    _patch_functions(patch, account, models)
    for name, call in (*_concurrency(account).items(), *_providers(account).items()):
        patch.setattr(LambdaResponse, name, call, raising=False)
    patch.setattr(LambdaResponse, "invoke", _invoke)
    tagged = models.LambdaBackend._get_resource_by_arn
    patch.setattr(
        models.LambdaBackend,
        "_get_resource_by_arn",
        lambda self, arn: _provider(account, arn) or tagged(self, arn),
    )
    patch.setattr(
        CloudWatchResponse, "describe_alarm_history", lambda self: _history(account), raising=False
    )


def _patch_functions(patch: pytest.MonkeyPatch, account: Any, models: Any) -> None:
    function, storage = models.LambdaFunction, models.LambdaStorage
    original_update, original_code_update, original_configuration = (
        function.update_configuration,
        function.update_function_code,
        function.get_configuration,
    )
    deleted, initialize = storage.del_function, function.__init__

    def create(self: Any, account_id: str, spec: dict[str, Any], *more: Any, **also: Any) -> None:
        initialize(self, account_id, spec, *more, **also)
        self.extra = {
            key: spec[key] for key in ("CapacityProviderConfig", "AcceleratorConfig") if key in spec
        }
        self.failed = account.scenario.failure
        if self.failed:
            self.state = "Failed"
        account.scenario.polls_left[self.function_name] = account.scenario.polls

    def change(self: Any, real: Any, request: dict[str, Any]) -> Any:
        if account.scenario.polls_left.get(self.function_name, 0) > 0:
            raise _error(
                "ResourceConflictException",
                f"An update is in progress for resource: {self.function_arn}",
            )
        account.scenario.polls_left[self.function_name] = account.scenario.polls
        self.failed = account.scenario.failure
        return original_configuration(self) if self.failed else real(self, request)

    def configure(self: Any, request: dict[str, Any]) -> Any:
        if "EphemeralStorage" in request:
            self.ephemeral_storage = request["EphemeralStorage"]["Size"]
        self.extra |= {
            key: request[key]
            for key in ("CapacityProviderConfig", "AcceleratorConfig")
            if key in request
        }
        return original_update(self, request)

    def configuration(self: Any, on_create: bool = False) -> dict[str, Any]:
        config: dict[str, Any] = {**original_configuration(self, on_create), **self.extra}
        polls = account.scenario.polls_left.get(self.function_name, 0)
        if polls:
            account.scenario.polls_left[self.function_name] = polls - 1
            config["LastUpdateStatus"] = "InProgress"
        elif self.failed:
            config |= {
                "LastUpdateStatus": "Failed",
                "LastUpdateStatusReason": self.failed,
                "StateReason": self.failed,
            }
        return config

    def publish(self: Any, name: str, description: str = "") -> Any:
        latest = self.get_function_by_name_or_arn_forbid_qualifier(name)
        versions = self._functions[latest.function_name]["versions"]
        if versions and not latest.code_or_config_updated:
            return versions[-1]
        latest.code_or_config_updated = False
        latest.published = getattr(latest, "published", 0) + 1
        version = copy.copy(latest)
        version.code = dict(latest.code)
        version.set_version(latest.published)
        versions.append(version)
        self._arns[version.function_arn] = version
        return version

    def delete(self: Any, name: str, qualifier: str | None = None) -> None:
        aliases = self._get_function_aliases(name)
        if any(
            qualifier in (alias.function_version, *_weights(alias)) for alias in aliases.values()
        ):
            raise _error("ResourceConflictException", f"an alias points to version {qualifier}")
        deleted(self, name, qualifier)
        if qualifier is None:
            aliases.clear()

    patch.setattr(function, "__init__", create)
    patch.setattr(
        function, "update_configuration", lambda self, request: change(self, configure, request)
    )
    patch.setattr(
        function,
        "update_function_code",
        lambda self, request: change(self, original_code_update, request),
    )
    patch.setattr(function, "get_configuration", configuration)
    patch.setattr(storage, "publish_version", publish)
    patch.setattr(storage, "del_function", delete)
    # moto carries out an update of the code twice, and an update may publish a version in between.
    # Here the update is carried out once.
    patch.setattr(
        models.LambdaBackend,
        "update_function_code",
        lambda self, name, qualifier, body: self.get_function(name).update_function_code(body),
    )


def _weights(alias: Any) -> dict[str, float]:
    return dict((alias.routing_config or {}).get("AdditionalVersionWeights") or {})


def _concurrency(account: Any) -> dict[str, Any]:
    """Return the operations of provisioned concurrency."""

    def alias_path(response: Any) -> str:
        name = response.path.split("/")[-2]
        response.backend.get_alias(
            response.querystring["Qualifier"][0], name
        )  # raises an error if there is none
        return f"{name}:{response.querystring['Qualifier'][0]}"

    def put(self: Any) -> Any:
        number = self.json_body["ProvisionedConcurrentExecutions"]
        numbers = dict.fromkeys(("Requested", "Available", "Allocated"), number)
        concurrency = {
            f"{key}ProvisionedConcurrentExecutions": value for key, value in numbers.items()
        } | {"Status": "READY"}
        account.scenario.provisioned[alias_path(self)] = concurrency
        return 202, {"status": 202}, json.dumps(concurrency)

    def get(self: Any) -> Any:
        concurrency = account.scenario.provisioned.get(alias_path(self))
        if concurrency is None:
            raise _error(
                "ProvisionedConcurrencyConfigNotFoundException",
                "No Provisioned Concurrency Config found for this function",
                404,
            )
        return json.dumps(concurrency)

    def delete(self: Any) -> Any:
        account.scenario.provisioned.pop(alias_path(self), None)
        return 204, {"status": 204}, ""

    suffix = "provisioned_concurrency_config"
    return {f"put_{suffix}": put, f"get_{suffix}": get, f"delete_{suffix}": delete}


def _providers(account: Any) -> dict[str, Any]:
    """Return the operations of capacity providers."""

    def provider_of(response: Any) -> dict[str, Any]:
        name = response.path.split("/")[-1]
        if name not in account.scenario.providers:
            raise _error("ResourceNotFoundException", f"no capacity provider {name} is found", 404)
        return dict(account.scenario.providers[name])

    def create(self: Any) -> Any:
        provider = dict(self.json_body)
        name = provider.pop("CapacityProviderName")
        arn = f"arn:aws:lambda:eu-central-1:123456789012:capacity-provider:{name}"
        account.scenario.providers[name] = {
            **provider,
            "CapacityProviderArn": arn,
            "State": "Active",
        }
        return (
            202,
            {"status": 202},
            json.dumps({"CapacityProvider": account.scenario.providers[name]}),
        )

    def get(self: Any) -> Any:
        return json.dumps({"CapacityProvider": provider_of(self)})

    def delete(self: Any) -> Any:
        gone = provider_of(self)
        del account.scenario.providers[self.path.split("/")[-1]]
        return 202, {"status": 202}, json.dumps({"CapacityProvider": gone})

    return {
        "create_capacity_provider": create,
        "get_capacity_provider": get,
        "delete_capacity_provider": delete,
    }


def _provider(account: Any, arn: str) -> Any:
    """Return the tags of the capacity provider with this ARN, or None."""
    provider = next(
        (
            candidate
            for candidate in account.scenario.providers.values()
            if candidate["CapacityProviderArn"] == arn
        ),
        None,
    )
    return None if provider is None else SimpleNamespace(tags=provider.get("Tags", {}))


def _invoke(response: Any) -> Any:
    """Answer as an image of tsx does: with the body of the event or an error."""
    event = json.loads(response.body)
    body = base64.b64decode(event["body"])
    if body == b"raise":
        error_body = json.dumps(
            {"errorMessage": "the model did not load", "errorType": "LoadFailed"}
        )
        return (
            200,
            {"content-type": "application/json", "x-amz-function-error": "Unhandled"},
            error_body,
        )
    status, headers = 400 if body == b"bad" else 200, {"content-type": "application/json"}
    return (
        200,
        {"content-type": "application/json"},
        json.dumps(
            {
                "statusCode": status,
                "headers": headers,
                "body": body.decode(),
                "isBase64Encoded": False,
            }
        ),
    )


def _history(account: Any) -> Any:
    """Answer DescribeAlarmHistory with the alarms of a test."""
    from moto.core.responses import ActionResult

    data = json.dumps({"newState": {"stateValue": "ALARM"}})
    items = [
        {
            "AlarmName": name,
            "Timestamp": time,
            "HistoryItemType": "StateUpdate",
            "HistoryData": data,
        }
        for name, time in account.scenario.alarmed
    ]
    return ActionResult({"AlarmHistoryItems": items})


def _error(code: str, message: str, status: int = 409) -> Exception:
    from moto.awslambda.exceptions import LambdaClientError

    error = LambdaClientError(code, message)
    error.code = status
    return error
