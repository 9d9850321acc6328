"""Models that share an endpoint, called by boto3's clients and `tsx deploy invoke`.

The containers are real. Each starts with the archive and the environment that `tsx deploy` has
stored in SageMaker and S3.
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

from tests.kit.deploy import endpoint_config, model_container
from tests.support.deploying import Deploy
from tests.support.models import make_model
from tests.support.platforms.aws import Scenario
from tests.support.platforms.aws_components import count_failure_without_capacity, scale
from tests.support.platforms.sagemaker_host import Host, container
from tests.support.platforms.sagemaker_runtime import Loader, NoCapacity, runtime
from tests.support.platforms.sagemaker_transform import run_job

COMPONENT = ("--set=sagemaker.component.endpoint=shared",)
MULTI_MODEL = ("--set=sagemaker.multi_model.endpoint=shared",)


def archive(directory: Path, answer: str) -> Path:
    handler = f"def handle(data, context):\n    return data and ['{answer}'] * len(data)\n"
    return make_model(directory / f"{answer}.mar", handler)


class Containers:
    """Containers of models, each started when it is first needed."""

    def __init__(
        self, directory: Path, stack: ExitStack, free_ports: Callable[[int], list[int]]
    ) -> None:
        self.directory, self.stack, self.free_ports = directory, stack, free_ports
        self.started: dict[str, Host] = {}

    def of_model(self, name: str, **more: str) -> Host:
        """Start a model's container, unless it runs already."""
        if name not in self.started:
            directory, environment = self._prepare(name, "endpoint")
            self.started[name] = self.stack.enter_context(
                container(directory, *self.free_ports(1), {**environment, **more})
            )
            self.started[name].wait_until_healthy()
        return self.started[name]

    def job(self, model: str, **more: str) -> AbstractContextManager[Host]:
        """Start a new container, as a batch transform job has."""
        directory, environment = self._prepare(model, "job")
        return container(directory, *self.free_ports(1), {**environment, **more})

    def _prepare(self, name: str, purpose: str) -> tuple[Path, dict[str, str]]:
        """Prepare the directory of a model's container, and return it with its environment."""
        model = model_container(name)
        directory = self.directory / f"{name}-{purpose}"
        (directory / "model").mkdir(parents=True)
        if model["Mode"] == "SingleModel":
            file = download(model["ModelDataUrl"], directory / "model.tar.gz")
            with tarfile.open(file) as archive:
                archive.extractall(directory / "model")
        return directory, model["Environment"]

    def of_component(self, name: str) -> Host:
        """Start a component's container.

        Raises:
            NoCapacity: The component has no copy, which SageMaker refuses and counts.
        """
        component = boto3.client("sagemaker").describe_inference_component(
            InferenceComponentName=name
        )
        if component["RuntimeConfig"]["CurrentCopyCount"] == 0:
            count_failure_without_capacity(name)
            raise NoCapacity
        return self.of_model(component["Specification"]["ModelName"])


def download(url: str, path: Path) -> Path:
    bucket, _, key = url.removeprefix("s3://").partition("/")
    boto3.client("s3").download_file(bucket, key, str(path))
    return path


class PrefixLoader(Loader):
    """A loader that takes the archives from the endpoint's prefix in S3."""

    def __init__(self, host: Host, prefix: str, directory: Path) -> None:
        super().__init__(host, directory, directory / "models")
        self.prefix, self.directory = prefix, directory

    def _load(self, name: str, target: str) -> None:
        download(self.prefix + target, self.directory / target)
        super()._load(name, target)


@pytest.fixture
def containers(short_path: Path, free_ports: Callable[[int], list[int]]) -> Iterator[Containers]:
    with ExitStack() as stack:
        yield Containers(short_path, stack, free_ports)


def invoke(client: Any, **target: str) -> bytes:
    """Send a request to the endpoint `shared`, and return the body of its response."""
    response = client.invoke_endpoint(
        EndpointName="shared", Body=b"{}", ContentType="application/json", **target
    )
    body: bytes = response["Body"].read()
    return body


def test_two_components_of_one_endpoint_are_independent(
    containers: Containers,
    scenario: Scenario,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "in.json").write_text("{}")
    a, b = (Deploy(archive(tmp_path, name), "sagemaker", capsys, COMPONENT, name) for name in "ab")
    a.apply("--set=sagemaker.autoscaling.min=0")
    b.apply()
    # The host answers nothing itself.
    host = Host(None, 0, tmp_path)  # type: ignore[arg-type]
    with runtime(host, components=containers.of_component) as client:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", client.meta.endpoint_url)

        def ask(name: str) -> bytes:
            return invoke(client, InferenceComponentName=name)

        assert (ask("a"), ask("b")) == (b"a", b"b")
        assert (a.verb("invoke", "in.json"), b.verb("invoke", "in.json")) == ("a\n", "b\n")
        scale("a", 0)
        a.verb("invoke", "in.json", code=1)
        assert "it has no copy now" in a.err
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


def test_a_multi_model_endpoint_answers_by_the_key_in_the_status(
    containers: Containers,
    scenario: Scenario,
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
    name = endpoint_config("shared")["ProductionVariants"][0]["ModelName"]
    # SageMaker sets this variable for multi-model containers.
    host = containers.of_model(name, SAGEMAKER_MULTI_MODEL="true")
    prefix = model_container(name)["ModelDataUrl"]
    with runtime(host, PrefixLoader(host, prefix, tmp_path)) as client:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME", client.meta.endpoint_url)

        def ask(target: str) -> bytes:
            return invoke(client, TargetModel=target)

        first, second = (deploy.read_json("status")["target model"] for deploy in (a, b))
        assert (ask(first), ask(second), a.verb("invoke", "in.json")) == (b"a", b"b", "a\n")
        a.archive = archive(tmp_path, "a2")
        a.apply()
        # The change takes effect at once, although the earlier archive is still loaded.
        assert a.verb("invoke", "in.json") == "a2\n"
        assert (ask(first), ask(second)) == (b"a", b"b")
        a.verb("rollback", "--yes")
        assert a.verb("invoke", "in.json") == "a\n"


def test_the_guides_batch_transform_example_works(
    containers: Containers, scenario: Scenario, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Run the example of docs/guides/deploy/sagemaker.md with the model that status names."""
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
    name = a.read_json("status")["variants"][0]["ModelName"]
    exec(example().replace("tsx-digits-1a2b3c4d", name))
    job = run_job("digits-1", containers.job)
    assert job["BatchStrategy"] == "MULTI_RECORD"
    output = s3.get_object(Bucket="my-data", Key="out/1.jsonl.out")["Body"].read()
    lines = [json.loads(line) for line in output.splitlines()]
    assert [line["n"] for line in lines] == [2 * n for n in range(100)]
    assert max(line["together"] for line in lines) == 8


def example() -> str:
    """Return the Python of the guide's section about batch transform."""
    guide = Path(__file__).parents[4] / "docs" / "guides" / "deploy" / "sagemaker.md"
    section = guide.read_text().split("## Batch transform jobs\n")[1]
    lines = section.partition("\n## ")[0].splitlines()
    return "\n".join(line[4:] for line in lines if line.startswith("    "))
