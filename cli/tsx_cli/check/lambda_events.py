"""Events of the services that invoke Lambda, in their documented formats.

The events are HTTP requests in each format, and messages of a queue.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

QUEUE = "arn:aws:sqs:eu-central-1:123456789012:digits"


def _body(body: bytes | str) -> dict[str, Any]:
    if isinstance(body, str):
        return {"body": body, "isBase64Encoded": False}
    return {"body": base64.b64encode(body).decode(), "isBase64Encoded": True}


def rest_api(
    path: str, body: bytes | str = "", method: str = "POST", headers: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Return an event of API Gateway, payload format 1.0.

    https://docs.aws.amazon.com/lambda/latest/dg/services-apigateway.html
    """
    multi_headers = {name: [value] for name, value in headers.items()}
    return {
        "resource": "/{proxy+}",
        "path": path,
        "httpMethod": method,
        "headers": {
            "Host": "70ixmpl4fl.execute-api.us-east-2.amazonaws.com",
            "X-Forwarded-Proto": "https",
            **headers,
        },
        "multiValueHeaders": {
            "Host": ["70ixmpl4fl.execute-api.us-east-2.amazonaws.com"],
            "X-Forwarded-Proto": ["https"],
            **multi_headers,
        },
        "queryStringParameters": None,
        "multiValueQueryStringParameters": None,
        "pathParameters": {"proxy": path[1:]},
        "stageVariables": None,
        "requestContext": {
            "accountId": "123456789012",
            "apiId": "70ixmpl4fl",
            "httpMethod": method,
            "identity": {"sourceIp": "52.255.255.12", "userAgent": "curl/8"},
            "path": f"/prod{path}",
            "protocol": "HTTP/1.1",
            "requestId": "e29f0b2c-0000-4f3c-8d6b-000000000000",
            "resourcePath": "/{proxy+}",
            "stage": "prod",
        },
        **_body(body),
    }


def function_url(
    path: str,
    body: bytes | str = "",
    method: str = "POST",
    headers: Mapping[str, str] = {},
    stage: str = "$default",
    query: str = "",
) -> dict[str, Any]:
    """Return an event of a function URL, payload format 2.0.

    With another stage it is an event of an HTTP API.
    https://docs.aws.amazon.com/lambda/latest/dg/urls-invocation.html
    """
    path = path if stage == "$default" else f"/{stage}{path}"
    return {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": path,
        "rawQueryString": query,
        "headers": {
            "host": "u123.lambda-url.eu-central-1.on.aws",
            "x-forwarded-proto": "https",
            "x-forwarded-port": "443",
            **headers,
        },
        "requestContext": {
            "accountId": "anonymous",
            "apiId": "u123",
            "domainName": "u123.lambda-url.eu-central-1.on.aws",
            "http": {
                "method": method,
                "path": path,
                "protocol": "HTTP/1.1",
                "sourceIp": "123.123.123.123",
                "userAgent": "curl/8",
            },
            "requestId": "id",
            "routeKey": "$default",
            "stage": stage,
            "time": "12/Mar/2026:19:03:58 +0000",
            "timeEpoch": 1783348638390,
        },
        **_body(body),
    }


def balancer(
    path: str, body: bytes | str = "", method: str = "POST", headers: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Return an event of an Application Load Balancer.

    https://docs.aws.amazon.com/lambda/latest/dg/services-alb.html
    """
    return {
        "requestContext": {
            "elb": {
                "targetGroupArn": (
                    "arn:aws:elasticloadbalancing:us-east-2:123456789012:targetgroup/lambda-279/49e9"
                )
            }
        },
        "httpMethod": method,
        "path": path,
        "queryStringParameters": {},
        "headers": {
            "host": "lambda-alb-123578498.us-east-2.elb.amazonaws.com",
            "x-forwarded-for": "72.12.164.125",
            **headers,
        },
        **_body(body),
    }


def messages(
    bodies: Iterable[str],
    attributes: Mapping[str, str] = {},
    groups: Iterable[str] = (),
    queue: str = QUEUE,
) -> dict[str, Any]:
    """Return an event of an SQS queue; with `groups`, of a FIFO queue.

    https://docs.aws.amazon.com/lambda/latest/dg/with-sqs.html
    """
    group_ids = list(groups)
    return {
        "Records": [
            {
                "messageId": f"message-{number}",
                "receiptHandle": "AQEBwJnKyrHigUMZj6rYigCgxlaS3SLy0a...",
                "body": body,
                "attributes": {
                    "ApproximateReceiveCount": "1",
                    "SentTimestamp": "1545082649183",
                    "SenderId": "AIDAIENQZJOLO23YVJ4VO",
                    "ApproximateFirstReceiveTimestamp": "1545082649185",
                    **({"MessageGroupId": group_ids[number]} if group_ids else {}),
                },
                "messageAttributes": {
                    name: {
                        "stringValue": value,
                        "stringListValues": [],
                        "binaryListValues": [],
                        "dataType": "String",
                    }
                    for name, value in attributes.items()
                },
                "md5OfBody": "e4e68fb7bd0e697a0ae8f1bb342846b3",
                "eventSource": "aws:sqs",
                "eventSourceARN": f"{queue}.fifo" if group_ids else queue,
                "awsRegion": "eu-central-1",
            }
            for number, body in enumerate(bodies)
        ]
    }
