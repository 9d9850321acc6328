"""A session with one AWS account and region: clients created on demand, and readable errors."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from tsx_cli.common.failure import CliError
from tsx_cli.deploy.engine.kind import CloudError

ABSENCE_CODES = frozenset(
    {
        "404",
        "NoSuchEntity",
        "NotFound",
        "NotFoundException",
        "NoSuchBucket",
        "NoSuchKey",
        "ResourceNotFound",
        "ResourceNotFoundException",
        "RepositoryNotFoundException",
        "ImageNotFoundException",
        "ObjectNotFoundException",
        "ProvisionedConcurrencyConfigNotFoundException",
        "QueueDoesNotExist",
    }
)
CREDENTIAL_CODES = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidClientTokenId",
        "UnrecognizedClientException",
        "InvalidAccessKeyId",
    }
)


class Cloud:
    """A session with one AWS account and region.

    Credentials, profile and endpoints (AWS_ENDPOINT_URL) come from the same sources as in other AWS
    tools.
    """

    def __init__(
        self, region: str | None = None, profile: str | None = None, bucket_owner: str | None = None
    ) -> None:
        import boto3  # boto3 is slow to import.

        with translate_errors("starting a session"):
            # boto3 does not read AWS_REGION, unlike other AWS tools.
            region_option = region or os.environ.get("AWS_REGION") or None
            self._session: Any = boto3.session.Session(
                region_name=region_option, profile_name=profile
            )
        region_name = self._session.region_name
        if not region_name:
            raise CliError("no region: give --region eu-central-1, or set AWS_REGION")
        self.region: str = region_name
        self._bucket_owner = bucket_owner
        self._clients: dict[str, Any] = {}

    def client(self, service: str) -> Any:
        if service not in self._clients:
            from botocore.config import Config

            config = Config(
                retries={"max_attempts": 8, "mode": "standard"}, connect_timeout=10, read_timeout=70
            )
            try:
                with translate_errors(f"reaching {service}"):
                    self._clients[service] = self._session.client(service, config=config)
                    # Bucket names are global. Every call names the expected owner, so that S3
                    # refuses a bucket of another account.
                    self._clients[service].meta.events.register(
                        "provide-client-params.s3", self._expect_owner
                    )
            except ValueError as error:  # The cause is an invalid AWS_ENDPOINT_URL.
                raise CliError(
                    f"{str(error).rstrip('.')}: AWS_ENDPOINT_URL must be an address such as"
                    " http://127.0.0.1:4566"
                ) from error
        return self._clients[service]

    def _expect_owner(self, params: Any, model: Any, **context: Any) -> None:
        if "ExpectedBucketOwner" in model.input_shape.members:
            is_own = params["Bucket"] == own_bucket(self.account, self.region)
            params["ExpectedBucketOwner"] = (
                self.account if is_own else self._bucket_owner or self.account
            )

    def call(self, service: str, operation: str, doing: str, **arguments: Any) -> Any:
        """Call a service.

        Raises:
            CloudError: The call failed; the message begins with `doing`.
        """
        with translate_errors(doing):
            return getattr(self.client(service), operation)(**arguments)

    def find(self, service: str, operation: str, doing: str, **arguments: Any) -> Any:
        """Call a service, and return None if AWS reports that the resource does not exist."""
        try:
            return self.call(service, operation, doing, **arguments)
        except CloudError as error:
            if is_absent(error):
                return None
            raise

    def list_items(
        self, service: str, operation: str, key: str, doing: str, **arguments: Any
    ) -> list[Any]:
        """Return the items under `key` of all pages; none if the resource does not exist.

        Raises:
            CloudError: The call failed.
        """
        pages = self.client(service).get_paginator(operation).paginate(**arguments)
        try:
            with translate_errors(doing):
                return [item for page in pages for item in page.get(key, [])]
        except CloudError as error:
            if is_absent(error):
                return []
            raise

    @cached_property
    def account(self) -> str:
        return str(
            self.call(
                "sts", "get_caller_identity", "checking the AWS identity (sts:GetCallerIdentity)"
            )["Account"]
        )


def own_bucket(account: str, region: str) -> str:
    """Return the name of the default bucket, for deployments that name none."""
    return f"tsx-{account}-{region}"


@contextmanager
def translate_errors(doing: str) -> Generator[None, None, None]:
    """Turn errors of boto3 into a CloudError with one sentence.

    The sentence begins with `doing`, and ends with the next step for the user if there is one.
    """
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        NoCredentialsError,
        ParamValidationError,
        ProfileNotFound,
    )

    try:
        yield
    except ClientError as error:
        code = error.response["Error"].get("Code", "")
        message = error.response["Error"].get("Message", "").rstrip(".")
        raise CloudError(
            f"{doing}: {code}: {message}{_advice(code, error.operation_name)}", code
        ) from error
    except ParamValidationError as error:
        raise CloudError(
            f"{doing}: AWS rejected the request: {error}", "ParamValidation"
        ) from error
    except NoCredentialsError as error:
        raise CloudError(
            f"{doing}: no AWS credentials were found; run `aws configure`, or set AWS_PROFILE or"
            " AWS_ACCESS_KEY_ID"
        ) from error
    except ProfileNotFound as error:
        raise CloudError(f"{doing}: {error}; `aws configure list-profiles` lists them") from error
    except (Boto3Error, BotoCoreError) as error:
        raise CloudError(f"{doing}: {str(error).rstrip('.')}") from error


def is_absent(error: CloudError) -> bool:
    """Tell whether the error says that the resource does not exist."""
    # SageMaker uses the same code for all invalid requests, so its message decides.
    absence_phrases = ("could not find", "does not exist", "not found", "cannot find")
    return error.code in ABSENCE_CODES or (
        error.code in ("ValidationException", "ValidationError")
        and any(phrase in error.message.lower() for phrase in absence_phrases)
    )


def _advice(code: str, operation: str) -> str:
    if code in CREDENTIAL_CODES:
        return ". Renew the credentials (`aws sso login`, or new keys)"
    if code == "403":  # S3 gives no reason in a response without a body.
        return (
            f". Either the deploying identity lacks the permission for {operation} (infra/iam has"
            " the policy), or the bucket belongs to another account: choose another with"
            " sagemaker.bucket, or name its owner with sagemaker.bucket_owner"
        )
    if "AccessDenied" in code or code == "UnauthorizedOperation":
        return (
            f". The deploying identity needs the permission for {operation}: infra/iam has the"
            " policy"
        )
    if code in ("ResourceLimitExceeded", "LimitExceededException"):
        return ". Request an increase in Service Quotas, or choose another size"
    return ""
