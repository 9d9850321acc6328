"""A double of SageMaker's batch transform: records from S3 become requests to a container.

The responses are written to S3.
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-batch-code.html and
API_CreateTransformJob.html: the job's parameters override those of the container's
/execution-parameters, which override the defaults.
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
    """Run a job, and return the parameters of its requests.

    `started(model, **environment)` starts a container of the model.
    """
    job = boto3.client("sagemaker").describe_transform_job(TransformJobName=name)
    with started(job["ModelName"], SAGEMAKER_BATCH="true", **job.get("Environment", {})) as host:
        host.wait_until_healthy()
        parameters = json.loads(host.get("/execution-parameters").body)
        job_parameters = {key: job[key] for key in DEFAULTS if job.get(key)}
        job_parameters |= (
            {"BatchStrategy": STRATEGIES[job_parameters["BatchStrategy"]]}
            if "BatchStrategy" in job_parameters
            else {}
        )
        used = {**DEFAULTS, **parameters, **job_parameters}
        with ThreadPoolExecutor(used["MaxConcurrentTransforms"]) as pool:
            for key, body in _inputs(job["TransformInput"]["DataSource"]["S3DataSource"]):
                answers = pool.map(
                    lambda part: _invoke(host, job, part),
                    _requests(body, job["TransformInput"], used),
                )
                _put(job["TransformOutput"], key, list(answers))
        return used


def _inputs(source: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    assert source["S3DataType"] == "S3Prefix"
    bucket, _, prefix = source["S3Uri"].removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    for entry in client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
        yield entry["Key"], client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()


def _requests(
    body: bytes, transform_input: Mapping[str, Any], used: Mapping[str, Any]
) -> list[bytes]:
    """Return the bodies of requests, with one line each or as many lines as fit."""
    most = used["MaxPayloadInMB"] << 20
    if transform_input.get("SplitType", "None") == "None":
        return [body]
    assert transform_input["SplitType"] == "Line"
    parts = [b""]
    for line in body.splitlines(keepends=True):
        if parts[-1] and (
            used["BatchStrategy"] == "SINGLE_RECORD" or len(parts[-1]) + len(line) > most
        ):
            parts.append(b"")
        parts[-1] += line
    return parts


def _invoke(host: Host, job: Mapping[str, Any], part: bytes) -> bytes:
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
