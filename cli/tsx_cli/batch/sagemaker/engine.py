"""The engine in SageMaker: the rows are uploaded, a batch transform job answers them, and its output is read.

A job's name is made of the archive, the inputs and the numbers of its rows, so that the same command finds it again.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import typer

from tsx_cli.batch.readers import RowReader
from tsx_cli.batch.rows import Row, RowResult
from tsx_cli.batch.sagemaker.models import transform_model
from tsx_cli.common.client import error_text
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.deploy.aws.session import own_bucket
from tsx_cli.deploy.commands.locations import Location, place
from tsx_cli.deploy.commands.spec_file import read_spec
from tsx_cli.deploy.engine.facts import Facts, look_at
from tsx_cli.deploy.engine.resources import digest
from tsx_cli.deploy.sagemaker.resources import uploads
from tsx_cli.deploy.spec import DeploySpec
from tsx_runtime.targets.sagemaker import rows as lines
from tsx_runtime.targets.sagemaker.environment import PAYLOAD

PART = 64 << 20  # bytes of an object of rows; the instances of a job share the objects
MOST = 100  # MB that all requests to a container at a time may have


class TransformJob(NamedTuple):
    """Of the rows `first` to `last` of a run; `attempt` counts from 1."""

    run: str
    first: int
    last: int
    attempt: int

    @property
    def name(self) -> str:
        return f"tsx-batch-{self.run}-{self.first}-{self.last}-{self.attempt}"


@contextmanager
def open_sagemaker(
    model: Path, reader: RowReader, workers: int | None, batch_size: int | None, stop: threading.Event, *, restart: bool, end_job: bool
) -> Iterator[SageMakerEngine]:
    """`end_job`: in place of a run. Raises UsageError, CliError, ArchiveError; typer.Exit once a job is ended."""
    if reader.total is None:
        raise UsageError("--on sagemaker: standard input cannot be read again to find the job that answers it; write it to a file first")
    spec = read_spec(None, {"model": str(model), "target": "sagemaker"})
    where = place(spec)
    _, facts = look_at(model, region=where.cloud.region)
    chosen = {"SAGEMAKER_MODEL_SERVER_WORKERS": workers, "SAGEMAKER_TS_BATCH_SIZE": batch_size}
    environment = {"TSX_SAGEMAKER_MODE": "transform", **{key: str(value) for key, value in chosen.items() if value is not None}}
    run = digest([facts.sha256, reader.fingerprint], 16)
    engine = SageMakerEngine(where, spec, facts, run, environment, stop, restart=restart)
    if end_job:
        print(f"{engine.end_job()} is stopped", file=sys.stderr)
        raise typer.Exit
    yield engine


class SageMakerEngine:
    """See `Engine`. It takes all rows before the first result: a job has its whole input when it begins."""

    poll = 15.0  # seconds between two looks at a job, which SageMaker has to be asked about

    def __init__(
        self,
        where: Location,
        spec: DeploySpec,
        facts: Facts,
        run: str,
        environment: dict[str, str],
        stop: threading.Event,
        *,
        restart: bool,
    ) -> None:
        self.batch_size: int | None = None  # the container chooses it
        self._where, self._cloud, self._spec, self._facts = where, where.cloud, spec, facts
        self._run, self._environment, self._stop, self._restart = run, environment, stop, restart
        self._bucket = spec.sagemaker.bucket or own_bucket(self._cloud.account, self._cloud.region)

    def run(self, rows: Iterator[Row]) -> Generator[RowResult, None, None]:
        head = next(rows, None)
        if head is None:
            return
        rows = chain([head], rows)
        job = self._found(head.index)
        if job is None:
            yield from self._results(self._begun(head.index, rows))
            return
        for result in self._results(job):
            if result.index < head.index:
                continue  # the output has it
            row = next(rows, None)
            if row is None:  # the run is to stop
                return
            if row.index != result.index:
                raise CliError(f"the job {job.name} has other rows; begin another with --restart")
            yield result

    def end_job(self) -> str:
        """Has SageMaker stop the job of the same command. Its name."""
        for job in self._jobs():
            if self._described(job)["TransformJobStatus"] == "InProgress":
                self._cloud.call("sagemaker", "stop_transform_job", f"stopping {job.name}", TransformJobName=job.name)
                return job.name
        raise CliError("no job of this command is under way")

    def _jobs(self) -> list[TransformJob]:
        """The latest first."""
        beginning = f"tsx-batch-{self._run}-"
        found = self._cloud.listed(
            "sagemaker", "list_transform_jobs", "TransformJobSummaries", "listing transform jobs", NameContains=beginning
        )
        numbers = [[int(number) for number in each["TransformJobName"].removeprefix(beginning).split("-")] for each in found]
        return sorted((TransformJob(self._run, *each) for each in numbers), key=lambda job: -job.attempt)

    def _found(self, index: int) -> TransformJob | None:
        """The job that answers that row, or has; a failed one is tried again."""
        job = next((each for each in self._jobs() if each.first <= index <= each.last), None)
        states = ["InProgress", "Stopping", *([] if self._restart else ["Completed"])]
        self._restart = False
        return job if job is not None and self._described(job)["TransformJobStatus"] in states else None

    def _described(self, job: TransformJob) -> dict[str, Any]:
        found: dict[str, Any] = self._cloud.call(
            "sagemaker", "describe_transform_job", f"looking at the job {job.name}", TransformJobName=job.name
        )
        return found

    def _begun(self, first: int, rows: Iterator[Row]) -> TransformJob:
        model = transform_model(self._where, self._spec, self._facts)
        last, largest = self._upload(f"{self._place(first)}in/", first, rows)
        if self._stop.is_set():
            raise KeyboardInterrupt
        payload, own = max(PAYLOAD, math.ceil(largest / (1 << 20))), self._spec.sagemaker
        job = TransformJob(self._run, first, last, 1 + max((each.attempt for each in self._jobs() if each.first == first), default=0))
        wanted: dict[str, Any] = {
            "TransformJobName": job.name,
            "ModelName": model,
            "Environment": self._environment,
            "BatchStrategy": "MultiRecord",
            "ModelClientConfig": {"InvocationsMaxRetries": 3},
            "TransformInput": {
                "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": f"s3://{self._bucket}/{self._place(first)}in/"}},
                "ContentType": lines.TYPE,
                "SplitType": "Line",
            },
            "TransformOutput": {"S3OutputPath": f"s3://{self._bucket}/{self._answers(job)}", "Accept": lines.TYPE, "AssembleWith": "Line"},
            "TransformResources": {"InstanceType": own.instance_type, "InstanceCount": own.instances},
            "Tags": [{"Key": "tsx:name", "Value": self._spec.name}],
        }
        if payload > PAYLOAD:
            wanted |= {"MaxPayloadInMB": payload, "MaxConcurrentTransforms": max(1, MOST // payload)}
        if own.kms_key is not None:
            wanted["TransformOutput"]["KmsKeyId"] = wanted["TransformResources"]["VolumeKmsKeyId"] = own.kms_key
        self._cloud.call("sagemaker", "create_transform_job", f"creating the job {job.name}", **wanted)
        return job

    def _place(self, first: int) -> str:
        return f"{uploads(self._spec.name)}batch/{self._run}/{first}/"

    def _answers(self, job: TransformJob) -> str:
        return f"{self._place(job.first)}out-{job.attempt}"

    def _upload(self, keys: str, first: int, rows: Iterator[Row]) -> tuple[int, int]:
        """The index of the last row, and the bytes of the largest."""
        part, number, last, largest = bytearray(), 0, first, 0

        def put() -> None:
            where = {"Bucket": self._bucket, "Key": f"{keys}{number:06}.jsonl"}
            self._cloud.call("s3", "put_object", f"uploading rows to s3://{self._bucket}/{keys}", Body=bytes(part), **where)

        for row in rows:
            line = lines.as_line(row.body, index=row.index, id=row.id, content_type=row.content_type) + b"\n"
            if len(line) > MOST << 20:
                raise CliError(f"{row.id} has {len(line)} bytes as a line, and a batch transform job takes {MOST} MB; leave it out")
            if part and len(part) + len(line) > PART:
                put()
                part, number = bytearray(), number + 1
            part += line
            last, largest = row.index, max(largest, len(line))
        put()
        return last, largest

    def _wait(self, job: TransformJob) -> None:
        shown = ""
        while (found := self._described(job))["TransformJobStatus"] in ("InProgress", "Stopping"):
            text = f"{job.name} is {found['TransformJobStatus']}; {len(self._keys(self._answers(job)))} of "
            text += f"{len(self._keys(f'{self._place(job.first)}in/'))} objects are answered"
            if text != shown:
                shown = text
                print(text, file=sys.stderr, flush=True)
            if self._stop.wait(self.poll):
                print(f"{job.name} goes on; the same command waits for it, and ends it with --stop", file=sys.stderr)
                raise KeyboardInterrupt
        if found["TransformJobStatus"] != "Completed":
            reason = found.get("FailureReason") or "SageMaker gives no reason"
            log = "Its log is in /aws/sagemaker/TransformJobs; the same command tries again"
            raise CliError(f"{job.name} is {found['TransformJobStatus']}: {reason}. {log}")

    def _keys(self, keys: str) -> list[str]:
        found = self._cloud.listed("s3", "list_objects_v2", "Contents", f"listing {keys}", Bucket=self._bucket, Prefix=keys)
        return sorted(each["Key"] for each in found)

    def _results(self, job: TransformJob) -> Iterator[RowResult]:
        """Waits for the job. In the order of the rows."""
        self._wait(job)
        for key in self._keys(self._answers(job)):
            body = self._cloud.call("s3", "get_object", f"reading s3://{self._bucket}/{key}", Bucket=self._bucket, Key=key)["Body"]
            for line in body.iter_lines(1 << 20):
                if line.strip():
                    yield _result(line, key)


def _result(line: bytes, key: str) -> RowResult:
    try:
        body, fields = lines.from_line(line)
        result = RowResult(fields["index"], fields["id"], fields["status"], fields["content_type"], body, fields["error"])
    except (ValueError, KeyError) as error:
        raise CliError(f"{key} has no answers of tsx ({error}): is the image of an earlier version? Deploy the archive again") from error
    return result._replace(error=error_text(body)) if result.status >= 400 and result.error is None else result
