"""Images of `tsx deploy` to AWS: built, pushed to ECR, and deployed by their digests."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.kit.deploy import model_container, sagemaker
from tests.support.deploying import Deploy
from tests.support.platforms.aws import ACCOUNT, REGION, Scenario
from tests.support.platforms.aws_lambda import make_role
from tests.support.platforms.docker import Engine
from tests.support.wheels import make_wheel
from tsx_cli.deploy.image.programs import Builder

HOST = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com"
MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


def put_image(repository: str, tag: str, config: str) -> None:
    """Put an image into moto's ECR."""
    boto3.client("ecr").put_image(
        repositoryName=repository,
        imageManifest=json.dumps({"schemaVersion": 2, "config": {"digest": f"sha256:{config}"}}),
        imageManifestMediaType=MANIFEST,
        imageTag=tag,
    )


@pytest.fixture
def docker(scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Install a double of docker that pushes to moto's ECR."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    push = Builder.push

    def push_and_put(builder: Builder, reference: str) -> None:
        push(builder, reference)
        repository, _, tag = reference.partition("/")[2].rpartition(":")
        put_image(repository, tag, tag)

    monkeypatch.setattr(Builder, "push", push_and_put)
    return Engine(tmp_path / "bin").here(monkeypatch)


def planned_changes(deploy: Deploy, *arguments: str, code: int) -> dict[str, Any]:
    """Return the changes of a plan by the ids of their resources."""
    return {change["id"]: change for change in deploy.plan(*arguments, code=code)["changes"]}


@pytest.fixture
def without_image(tmp_path: Path, docker: Engine, deploy_to: Callable[..., Deploy]) -> Any:
    """Build the command for a target, without an image."""
    wheel = make_wheel(tmp_path / "wheels", "tsx_serve", "0.1.0")

    def build(target: str) -> Deploy:
        deploy = deploy_to(target, f"--set=build.wheel={wheel}")
        deploy.image = ()
        return deploy

    return build


@pytest.fixture
def deploy(without_image: Any) -> Any:
    return without_image("sagemaker")


def test_an_image_is_built_pushed_and_deployed_by_its_digest(
    deploy: Deploy, docker: Engine
) -> None:
    changes = planned_changes(deploy, code=2)
    ids = [id for id in changes if id in ("Repository", "Image", "Model")]
    assert ids == ["Repository", "Image", "Model"]
    assert changes["Image"]["name"].startswith(f"{HOST}/tsx/sagemaker/digits:tsx-")
    deploy.apply()
    assert [context["target"] for context in docker.state["contexts"]] == ["sagemaker"]
    assert docker.state["logins"][HOST][0] == "AWS"
    (model,) = sagemaker().list_models()["Models"]
    response = boto3.client("ecr").describe_images(repositoryName="tsx/sagemaker/digits")
    (pushed,) = response["imageDetails"]
    image = f"{HOST}/tsx/sagemaker/digits@{pushed['imageDigest']}"
    assert model_container(model["ModelName"])["Image"] == image
    deploy.plan(code=0)


def test_the_model_of_a_function_is_part_of_its_image(without_image: Any, docker: Engine) -> None:
    make_role()
    is_arm = platform.machine() in ("arm64", "aarch64")
    architecture, name = ("x86_64", "amd64") if is_arm else ("arm64", "arm64")
    deploy, argument = without_image("lambda"), f"--set=lambda.architecture={architecture}"
    deploy.apply(argument)
    (context,) = docker.state["contexts"]
    assert (context["target"], "model.mar" in context["files"]) == ("lambda", True)
    assert docker.calls("build")[0][-3:-1] == ["--platform", f"linux/{name}"]
    code = boto3.client("lambda").get_function(FunctionName="digits")["Code"]
    assert code["ImageUri"].startswith(f"{HOST}/tsx/lambda/digits@sha256:")
    deploy.apply(argument)
    assert len(docker.calls("build")) == 1


def test_another_image_and_its_model_have_new_names(deploy: Deploy, docker: Engine) -> None:
    deploy.apply()
    changes = planned_changes(deploy, "--set=build.torch=2.8.0", code=2)
    assert {id: changes[id]["action"] for id in ("Repository", "Image", "Model")} == {
        "Repository": "same", "Image": "create", "Model": "create"
    }  # fmt: skip


def test_a_failed_push_has_a_reason_and_can_continue(
    deploy: Deploy, docker: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Builder, "login", lambda *_: docker.set(logins={"other": ["a", "b"]}))
        deploy.apply(code=1)
    assert "no basic auth credentials" in deploy.err
    assert "Repository tsx/sagemaker/digits" in deploy.err
    deploy.apply()
    # The image is not built again.
    assert len(docker.calls("build")) == 1


def test_purge_removes_the_repository(deploy: Deploy, docker: Engine) -> None:
    deploy.apply()
    deploy.verb("destroy", "--yes", "--purge")
    assert boto3.client("ecr").describe_repositories()["repositories"] == []


def test_purge_keeps_foreign_images_in_a_shared_repository(deploy: Deploy, docker: Engine) -> None:
    client, foreign_tag = boto3.client("ecr"), "tsx-digits-2-0123456789ab"

    def tags() -> list[str]:
        return [
            image["imageTag"] for image in client.list_images(repositoryName="models")["imageIds"]
        ]

    client.create_repository(repositoryName="models")
    put_image("models", foreign_tag, "other")
    arguments = f"--set=repository={HOST}/models --set=keep=1"
    deploy.apply(arguments)
    deploy.apply(arguments, "--set=build.torch=2.8.0")
    assert len(sagemaker().list_models()["Models"]) == 1
    assert len(tags()) == 3
    deploy.verb("destroy", "--yes", arguments)
    deploy.verb("destroy", "--yes", "--purge", arguments)
    assert tags() == [foreign_tag]


def test_a_repository_outside_ecr_is_refused(deploy: Deploy, docker: Engine) -> None:
    deploy.apply("--set=repository=docker.io/me/digits", code=2)
    assert "takes images from ECR only" in deploy.err


def test_the_error_without_a_build_program_lists_remedies(
    deploy: Deploy, docker: Engine, tmp_path: Path
) -> None:
    (tmp_path / "bin" / "docker").unlink()
    deploy.apply(code=1)
    assert "docker is not installed; podman is" in deploy.err
    assert "--emit dockerfile DIR" in deploy.err


@pytest.mark.parametrize(("verb", "code"), [("--yes", 2), ("--plan", 1)])
@pytest.mark.parametrize(
    ("target", "setting", "error"),
    [
        ("sagemaker", "sagemaker.instances=1", "sagemaker.role is not given"),
        ("sagemaker", "sagemaker.component.endpoint=shared", "sagemaker.role is not given"),
        ("lambda", "lambda.memory=512", "lambda.role is not given"),
        ("container", "container.host=0.0.0.0", "which other machines can reach: set "),
    ],
)
def test_a_missing_setting_is_reported_before_searching_for_a_wheel(
    without_image: Any, verb: str, code: int, target: str, setting: str, error: str
) -> None:
    deploy = without_image(target)
    arguments = f"--target {target} --set {setting} --set=build.wheel=absent.whl {verb}"
    deploy(str(deploy.archive), arguments, code=code)
    assert error in deploy.err
