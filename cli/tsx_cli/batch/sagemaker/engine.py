"""The batch engine in SageMaker, which uses a batch transform job.

It uploads the rows, waits for the job, and reads the job's output. The job's name is derived from
the archive and the inputs, so that the same command finds the job again.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from tsx_cli.batch.readers import InputReader
from tsx_cli.batch.rows import Position, Row, RowResult
from tsx_cli.batch.sagemaker.models import transform_model
from tsx_cli.common.client import error_text
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.deploy.aws.session import own_bucket, translate_errors
from tsx_cli.deploy.commands.spec_file import read_spec
from tsx_cli.deploy.engine.facts import read_archive
from tsx_cli.deploy.engine.resources import digest
from tsx_cli.deploy.sagemaker.resources import upload_prefix
from tsx_cli.deploy.sagemaker.target import TARGET
from tsx_runtime.targets.sagemaker import rows as lines
from tsx_runtime.targets.sagemaker.environment import PAYLOAD_MB

MAX_OBJECT_BYTES = 64 << 20  # Rows are in several objects, which are spread over the instances.
MAX_IN_FLIGHT_MB = 100  # SageMaker's limit for the requests of a container


class SageMakerEngine:
    """A `BatchEngine` in SageMaker.

    A job computes all rows of the inputs. A continued run skips the responses that the output
    already has.
    """

    poll = 15.0  # seconds between two requests for the state of a job

    def __init__(
        self,
        model: Path,
        reader: InputReader,
        workers: int | None,
        batch_size: int | None,
        stop: threading.Event,
        *,
        restart: bool,
    ) -> None:
        """Find the account, and read the facts of the model.

        With `restart`, an earlier complete job is ignored.

        Raises:
            UsageError: The rows come from standard input, or an option is wrong.
            CliError: AWS refuses a request.
            ArchiveError: The archive cannot be read.
        """
        if reader.total is None:
            raise UsageError(
                "--on sagemaker: standard input cannot be read again to find its job; write it to a"
                " file first"
            )
        self.batch_size: int | None = None  # The container chooses the batch size.
        self._spec = read_spec(None, {"model": str(model), "target": "sagemaker"})
        self._location = TARGET.locate(self._spec)
        self._cloud = self._location.cloud
        _, self._facts = read_archive(model, region=self._cloud.region)
        options = {"SAGEMAKER_MODEL_SERVER_WORKERS": workers, "SAGEMAKER_TS_BATCH_SIZE": batch_size}
        self._environment = {
            "TSX_SAGEMAKER_MODE": "transform",
            **{key: str(value) for key, value in options.items() if value is not None},
        }
        self._reader, self._stop, self._restart = reader, stop, restart
        self._bucket = self._spec.sagemaker.bucket or own_bucket(
            self._cloud.account, self._cloud.region
        )
        run_digest = digest([self._facts.sha256, reader.fingerprint], 16)
        self._name, self._prefix = (
            f"tsx-batch-{run_digest}-",
            f"{upload_prefix(self._spec.name)}batch/{run_digest}/",
        )

    def run(self, rows: Iterator[Row]) -> Generator[RowResult, None, None]:
        results: Iterator[RowResult] | None = None
        for row in rows:
            if row.error is not None:
                yield row.failed(400, row.error)
                continue
            if results is None:
                results = self._results(self._usable_job() or self._create_job())
            result = next((item for item in results if item.index >= row.index), None)
            if result is None or result.index != row.index:
                raise CliError(f"the job has no answer to {row.id}; start another with --restart")
            yield result

    def end_job(self) -> str:
        """Stop the job that the same command started, and return its name."""
        job = self._latest_job()
        if job is None or self._describe(job)["TransformJobStatus"] != "InProgress":
            raise CliError("no job of this command is under way")
        self._cloud.call("sagemaker", "stop_transform_job", f"stopping {job}", TransformJobName=job)
        return job

    def _latest_job(self) -> str | None:
        summaries = self._cloud.list_items(
            "sagemaker",
            "list_transform_jobs",
            "TransformJobSummaries",
            "listing transform jobs",
            NameContains=self._name,
        )
        names = [item["TransformJobName"] for item in summaries]
        return max(
            (name for name in names if name.startswith(self._name)), key=self._attempt, default=None
        )

    def _attempt(self, job: str) -> int:
        return int(job.removeprefix(self._name))

    def _usable_job(self) -> str | None:
        """Return the latest job if it is running or complete, or None."""
        job = self._latest_job()
        states = ["InProgress", "Stopping", *([] if self._restart else ["Completed"])]
        return (
            job if job is not None and self._describe(job)["TransformJobStatus"] in states else None
        )

    def _describe(self, job: str) -> dict[str, Any]:
        state: dict[str, Any] = self._cloud.call(
            "sagemaker", "describe_transform_job", f"looking at {job}", TransformJobName=job
        )
        return state

    def _create_job(self) -> str:
        model = transform_model(self._location, self._spec, self._facts)
        latest = self._latest_job()
        job = f"{self._name}{1 if latest is None else self._attempt(latest) + 1}"
        payload, section = (
            max(PAYLOAD_MB, math.ceil(self._upload() / (1 << 20))),
            self._spec.sagemaker,
        )
        answers = f"s3://{self._bucket}/{self._answer_prefix(job)}"
        request: dict[str, Any] = {
            "TransformJobName": job,
            "ModelName": model,
            "Environment": self._environment,
            "BatchStrategy": "MultiRecord",
            "ModelClientConfig": {"InvocationsMaxRetries": 3},
            "TransformInput": {
                "DataSource": {
                    "S3DataSource": {
                        "S3DataType": "S3Prefix",
                        "S3Uri": f"s3://{self._bucket}/{self._prefix}in/",
                    }
                },
                "ContentType": lines.TYPE,
                "SplitType": "Line",
            },
            "TransformOutput": {
                "S3OutputPath": answers.rstrip("/"),
                "Accept": lines.TYPE,
                "AssembleWith": "Line",
            },
            "TransformResources": {
                "InstanceType": section.instance_type,
                "InstanceCount": section.instances,
            },
            "Tags": [{"Key": "tsx:name", "Value": self._spec.name}],
        }
        if payload > PAYLOAD_MB:
            request |= {
                "MaxPayloadInMB": payload,
                "MaxConcurrentTransforms": max(1, MAX_IN_FLIGHT_MB // payload),
            }
        if section.kms_key is not None:
            request["TransformOutput"]["KmsKeyId"] = request["TransformResources"][
                "VolumeKmsKeyId"
            ] = section.kms_key
        self._cloud.call("sagemaker", "create_transform_job", f"creating {job}", **request)
        return job

    def _answer_prefix(self, job: str) -> str:
        return f"{self._prefix}out-{self._attempt(job)}/"

    def _upload(self) -> int:
        """Upload all readable rows, and return the size of the largest in bytes."""
        content, number, max_bytes = bytearray(), 0, 0

        def put_object() -> None:
            target = {"Bucket": self._bucket, "Key": f"{self._prefix}in/{number:06}.jsonl"}
            self._cloud.call(
                "s3",
                "put_object",
                f"uploading rows to s3://{self._bucket}/{self._prefix}",
                Body=bytes(content),
                **target,
            )

        with closing(self._reader.rows(Position(), 0)) as rows:
            for row in rows:
                if self._stop.is_set():
                    raise KeyboardInterrupt
                if row.error is not None:
                    continue
                line = (
                    lines.as_line(
                        row.body, index=row.index, id=row.id, content_type=row.content_type
                    )
                    + b"\n"
                )
                if len(line) > MAX_IN_FLIGHT_MB << 20:
                    raise CliError(
                        f"{row.id} has {len(line)} bytes as a line, and a batch transform job takes"
                        f" {MAX_IN_FLIGHT_MB} MB; leave it out"
                    )
                if content and len(content) + len(line) > MAX_OBJECT_BYTES:
                    put_object()
                    content, number = bytearray(), number + 1
                content += line
                max_bytes = max(max_bytes, len(line))
        put_object()
        return max_bytes

    def _wait(self, job: str) -> None:
        printed_text = ""
        while (state := self._describe(job))["TransformJobStatus"] in ("InProgress", "Stopping"):
            answered_objects, uploaded_objects = (
                len(self._object_keys(self._answer_prefix(job))),
                len(self._object_keys(f"{self._prefix}in/")),
            )
            text = (
                f"{job} is {state['TransformJobStatus']}; {answered_objects} of {uploaded_objects} objects are"
                " answered"
            )
            if text != printed_text:
                printed_text = text
                print(text, file=sys.stderr, flush=True)
            if self._stop.wait(self.poll):
                print(
                    f"{job} goes on; the same command waits for it, and ends it with --stop",
                    file=sys.stderr,
                )
                raise KeyboardInterrupt
        if state["TransformJobStatus"] != "Completed":
            reason = state.get("FailureReason") or "SageMaker gives no reason"
            log = "Its log is in /aws/sagemaker/TransformJobs; the same command tries again"
            raise CliError(f"{job} is {state['TransformJobStatus']}: {reason}. {log}")

    def _object_keys(self, prefix: str) -> list[str]:
        objects = self._cloud.list_items(
            "s3",
            "list_objects_v2",
            "Contents",
            f"listing {prefix}",
            Bucket=self._bucket,
            Prefix=prefix,
        )
        return sorted(item["Key"] for item in objects)

    def _results(self, job: str) -> Iterator[RowResult]:
        """Wait for the job, and yield the results in the order of the rows."""
        self._wait(job)
        for key in self._object_keys(self._answer_prefix(job)):
            action = f"reading s3://{self._bucket}/{key}"
            body = self._cloud.call("s3", "get_object", action, Bucket=self._bucket, Key=key)[
                "Body"
            ]
            with translate_errors(action):
                content = body.read()
            for line in content.splitlines():
                if line.strip():
                    yield _result(line, key)


def _result(line: bytes, key: str) -> RowResult:
    try:
        body, fields = lines.from_line(line)
        result = RowResult(
            fields["index"],
            fields["id"],
            fields["status"],
            fields["content_type"],
            body,
            fields["error"],
        )
    except (ValueError, KeyError) as error:
        raise CliError(
            f"{key} has no answers of tsx ({error}): is the image of an earlier version? Deploy the"
            " archive again"
        ) from error
    return (
        result._replace(error=error_text(body))
        if result.status >= 400 and result.error is None
        else result
    )
