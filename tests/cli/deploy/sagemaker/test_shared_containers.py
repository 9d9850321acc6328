"""Models that share an endpoint, as boto3's clients and `tsx deploy invoke` reach them: the
containers are the real ones.

Each is started from what `tsx deploy` has left in SageMaker and S3: the archive at the model's
address, and its environment.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.support.deploying import Deploy
from tests.support.models import make_model
from tests.support.platforms.aws import Course
from tests.support.platforms.aws_components import count_failure_without_capacity, scale
from tests.support.platforms.sagemaker_host import Host, container
from tests.support.platforms.sagemaker_runtime import Loader, NoCapacity, runtime
from tests.support.platforms.sagemaker_transform import run_job

COMPONENT = ("--set=sagemaker.component.endpoint=shared",)
MULTI_MODEL = ("--set=sagemaker.multi_model.endpoint=shared",)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("processes")]


def archive(directory: Path, answer: str) -> Path:
    return make_model(
        directory / f"{answer}.mar",
        f"def handle(data, context):\n    return data and ['{answer}'] * len(data)\n",
    )


class Containers:
    """Containers of models, each started when it is first needed."""

    def __init__(
        self, directory: Path, stack: ExitStack, free_ports: Callable[[int], list[int]]
    ) -> None:
        self.directory, self.stack, self.free_ports = directory, stack, free_ports
        self.started: dict[str, Host] = {}

    def of_model(self, name: str, **more: str) -> Host:
        if name not in self.started:
            place, environment = self._place(name, "endpoint")
            self.started[name] = self.stack.enter_context(
                container(place, *self.free_ports(1), {**environment, **more})
            )
            self.started[name].wait_until_healthy()
        return self.started[name]

    def job(self, model: str, **environment: str) -> AbstractContextManager[Host]:
        """A container of its own, as a batch transform job has."""
        found = self._place(model, "job")
        return container(found[0], *self.free_ports(1), {**found[1], **environment})

    def _place(self, name: str, purpose: str) -> tuple[Path, dict[str, str]]:
        """The directory of a container of that model, and its environment."""
        model = boto3.client("sagemaker").describe_model(ModelName=name)["PrimaryContainer"]
        place = self.directory / f"{name}-{purpose}"
        (place / "model").mkdir(parents=True)
        if model["Mode"] == "SingleModel":
            with tarfile.open(fetched(model["ModelDataUrl"], place / "model.tar.gz")) as packed:
                packed.extractall(place / "model")
        return place, model["Environment"]

    def of_component(self, name: str) -> Host:
        """Raises NoCapacity, as SageMaker refuses the request, and counts it."""
        found = boto3.client("sagemaker").describe_inference_component(InferenceComponentName=name)
        if found["RuntimeConfig"]["CurrentCopyCount"] == 0:
            count_failure_without_capacity(name)
            raise NoCapacity
        return self.of_model(found["Specification"]["ModelName"])


def fetched(url: str, path: Path) -> Path:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    boto3.client("s3").download_file(bucket, key, str(path))
    return path


class PrefixLoader(Loader):
    """Takes the archives from the endpoint's prefix in S3."""

    def __init__(self, host: Host, prefix: str, place: Path) -> None:
        super().__init__(host, place, place / "models")
        self.prefix, self.place = prefix, place

    def _load(self, name: str, target: str) -> None:
        fetched(self.prefix + target, self.place / target)
        super()._load(name, target)


@pytest.fixture
def containers(short_path: Path, free_ports: Callable[[int], list[int]]) -> Iterator[Containers]:
    with ExitStack() as stack:
        yield Containers(short_path, stack, free_ports)


def asked(answer: Any) -> bytes:
    body: bytes = answer["Body"].read()
    return body


def test_two_components_of_one_endpoint_answer_scale_change_and_go_by_themselves(
    containers: Containers,
    course: Course,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "in.json").write_text("{}")
    a, b = (Deploy(archive(tmp_path, name), "sagemaker", capsys, COMPONENT, name) for name in "ab")
    a.apply("--set=sagemaker.autoscaling.min=0")
    b.apply()
    with runtime(Host(None, 0, tmp_path), components=containers.of_component) as client:  # type: ignore[arg-type]  # it has none of its own
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", client.meta.endpoint_url)

        def ask(name: str) -> bytes:
            return asked(
                client.invoke_endpoint(
                    EndpointName="shared",
                    InferenceComponentName=name,
                    Body=b"{}",
                    ContentType="application/json",
                )
            )

        assert (ask("a"), ask("b"), a.verb("invoke", "in.json"), b.verb("invoke", "in.json")) == (
            b"a",
            b"b",
            "a\n",
            "b\n",
        )
        scale("a", 0)
        a.verb("invoke", "in.json", code=1)
        assert (
            "it has no copy now; where it scales from zero, this request starts one: send it again"
            in a.err
        )
        assert a.verb("invoke", "in.json") == "a\n"
        a.archive = archive(tmp_path, "a2")
        a.apply("--set=sagemaker.autoscaling.min=0")
        assert (ask("a"), ask("b")) == (b"a2", b"b")
        a.verb("rollback", "--yes")
        assert ask("a") == b"a"
        a.verb("destroy", "--yes")
        assert ask("b") == b"b"
        b.verb("destroy", "--yes")
    assert not boto3.client("sagemaker").list_endpoints()["Endpoints"]


def test_models_of_a_multi_model_endpoint_answer_by_the_key_that_status_says(
    containers: Containers,
    course: Course,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "in.json").write_text("{}")
    a, b = (
        Deploy(archive(tmp_path, name), "sagemaker", capsys, MULTI_MODEL, name) for name in "ab"
    )
    a.apply()
    b.apply()
    sagemaker = boto3.client("sagemaker")
    config = sagemaker.describe_endpoint(EndpointName="shared")["EndpointConfigName"]
    name = sagemaker.describe_endpoint_config(EndpointConfigName=config)["ProductionVariants"][0][
        "ModelName"
    ]
    host = containers.of_model(name, SAGEMAKER_MULTI_MODEL="true")  # which SageMaker sets
    prefix = sagemaker.describe_model(ModelName=name)["PrimaryContainer"]["ModelDataUrl"]
    with runtime(host, PrefixLoader(host, prefix, tmp_path)) as client:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", client.meta.endpoint_url)

        def ask(target: str) -> bytes:
            return asked(
                client.invoke_endpoint(
                    EndpointName="shared",
                    TargetModel=target,
                    Body=b"{}",
                    ContentType="application/json",
                )
            )

        first, other = (each.reported("status")["target model"] for each in (a, b))
        assert (ask(first), ask(other), a.verb("invoke", "in.json")) == (b"a", b"b", "a\n")
        a.archive = archive(tmp_path, "a2")
        a.apply()
        assert (
            a.verb("invoke", "in.json") == "a2\n"
        )  # at once, though the earlier one is still loaded
        assert (ask(first), ask(other)) == (b"a", b"b")
        a.verb("rollback", "--yes")
        assert a.verb("invoke", "in.json") == "a\n"


def test_the_model_of_a_deployment_runs_in_a_batch_transform_job_as_the_guide_shows(
    containers: Containers, course: Course, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The example of docs/guides/deploy/sagemaker.md, with the model that `tsx deploy status`
    names.
    """
    handler = "def handle(data, context):\n    return data and [{'n': row['body']['n'] * 2, 'together': len(data)} for row in data]\n"
    a = Deploy(
        make_model(tmp_path / "double.mar", handler, config="batchSize: 8\n"), "sagemaker", capsys
    )
    a.apply()
    s3 = boto3.client("s3")
    s3.create_bucket(
        Bucket="my-data", CreateBucketConfiguration={"LocationConstraint": "eu-central-1"}
    )
    s3.put_object(
        Bucket="my-data", Key="in/1.jsonl", Body=b"".join(b'{"n": %d}\n' % n for n in range(100))
    )
    name = a.reported("status")["variants"][0]["ModelName"]
    exec(example().replace("tsx-digits-1a2b3c4d", name))
    used = run_job("digits-1", containers.job)
    assert used["BatchStrategy"] == "MULTI_RECORD"
    lines = [
        json.loads(line)
        for line in s3.get_object(Bucket="my-data", Key="out/1.jsonl.out")["Body"]
        .read()
        .splitlines()
    ]
    assert [line["n"] for line in lines] == [2 * n for n in range(100)]
    assert max(line["together"] for line in lines) == 8


def example() -> str:
    """The Python of the section about batch transform."""
    section = (
        (Path(__file__).parents[4] / "docs" / "guides" / "deploy" / "sagemaker.md")
        .read_text()
        .split("## Batch transform jobs\n")[1]
    )
    lines = section.partition("\n## ")[0].splitlines()
    return "\n".join(line[4:] for line in lines if line.startswith("    "))
