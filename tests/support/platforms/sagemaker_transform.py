"""SageMaker's batch transform in front of a container: files of S3 in records, requests of as many
records as fit, answers to S3.

https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-batch-code.html and
API_CreateTransformJob.html: what the job says goes before what the container's
/execution-parameters say, and that before the defaults.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3

from tests.support.platforms.sagemaker_host import Answered, Host

DEFAULTS = {"MaxConcurrentTransforms": 1, "BatchStrategy": "MULTI_RECORD", "MaxPayloadInMB": 6}
STRATEGIES = {"MultiRecord": "MULTI_RECORD", "SingleRecord": "SINGLE_RECORD"}


def run_job(name: str, started: Callable[..., Host]) -> dict[str, Any]:
    """What its requests were made with.

    `started(model, **environment)` is a container of the model.
    """
    job = boto3.client("sagemaker").describe_transform_job(TransformJobName=name)
    with started(job["ModelName"], SAGEMAKER_BATCH="true", **job.get("Environment", {})) as host:
        host.wait_until_healthy()
        said = json.loads(host.get("/execution-parameters").body)
        own = {key: job[key] for key in DEFAULTS if job.get(key)}
        own |= {"BatchStrategy": STRATEGIES[own["BatchStrategy"]]} if "BatchStrategy" in own else {}
        used = {**DEFAULTS, **said, **own}
        with ThreadPoolExecutor(used["MaxConcurrentTransforms"]) as pool:
            for key, body in _inputs(job["TransformInput"]["DataSource"]["S3DataSource"]):
                answers = pool.map(
                    lambda part: _asked(host, job, part),
                    _requests(body, job["TransformInput"], used),
                )
                _put(job["TransformOutput"], key, list(answers))
        return used


def _inputs(source: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    assert source["S3DataType"] == "S3Prefix"
    bucket, _, prefix = source["S3Uri"].removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    for found in client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
        yield found["Key"], client.get_object(Bucket=bucket, Key=found["Key"])["Body"].read()


def _requests(body: bytes, given: Mapping[str, Any], used: Mapping[str, Any]) -> list[bytes]:
    """As many lines as fit into a request, where the strategy allows several."""
    most = used["MaxPayloadInMB"] << 20
    if given.get("SplitType", "None") == "None":
        return [body]
    assert given["SplitType"] == "Line"
    parts = [b""]
    for line in body.splitlines(keepends=True):
        if parts[-1] and (
            used["BatchStrategy"] == "SINGLE_RECORD" or len(parts[-1]) + len(line) > most
        ):
            parts.append(b"")
        parts[-1] += line
    return parts


def _asked(host: Host, job: Mapping[str, Any], part: bytes) -> bytes:
    headers = {
        "Content-Type": job["TransformInput"]["ContentType"],
        "Accept": job["TransformOutput"].get("Accept", ""),
    }
    answered: Answered = host.post(
        "/invocations", part, {key: value for key, value in headers.items() if value}
    )
    assert answered.status == 200, answered.body
    return answered.body


def _put(output: Mapping[str, str], key: str, answers: list[bytes]) -> None:
    bucket, _, prefix = output["S3OutputPath"].removeprefix("s3://").partition("/")
    joint = (
        b"\n" if output.get("AssembleWith") == "Line" and not answers[0].endswith(b"\n") else b""
    )
    boto3.client("s3").put_object(
        Bucket=bucket,
        Key=f"{prefix.rstrip('/')}/{key.rpartition('/')[2]}.out",
        Body=joint.join(answers),
    )
