"""Multi-model endpoints: each deployment is an archive under one prefix in S3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.kit.deploy import endpoint_config, model_container, sagemaker_resources
from tests.support.deploying import HANDLER, OTHER_IMAGE, Deploy, actions
from tests.support.models import make_model
from tests.support.platforms.aws import Scenario

SHARED = "--set=sagemaker.multi_model.endpoint=shared"
BUCKET = "tsx-123456789012-eu-central-1"


@pytest.fixture
def member(deploy_to: Callable[..., Deploy]) -> Any:
    """Return a function that makes one of several deployments that share the endpoint."""
    return lambda name: deploy_to("sagemaker", SHARED, name=name)


def archives() -> list[str]:
    """List the names of the archives under the endpoint's prefix."""
    prefix = "tsx/shared/models/"
    objects = boto3.client("s3").list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
    return [entry["Key"].removeprefix(prefix) for entry in objects]


def target_model(deploy: Deploy) -> Any:
    return deploy.read_json("status")["target model"]


def test_the_first_model_creates_the_endpoint_and_others_add_archives(
    member: Any, scenario: Scenario
) -> None:
    scenario.polls = 2
    a, b = member("a"), member("b")
    assert set(actions(a.plan(code=2)).values()) == {"create"}
    a.apply(
        "--set=sagemaker.instances=2 --set=sagemaker.multi_model.cache=false",
        "--set=env.TSX_SAGEMAKER_MODELS_MEMORY=900",
    )
    [variant] = endpoint_config("shared")["ProductionVariants"]
    container = model_container(variant["ModelName"])
    assert (container["Mode"], container["MultiModelConfig"]) == (
        "MultiModel",
        {"ModelCacheSetting": "Disabled"},
    )
    assert container["ModelDataUrl"] == f"s3://{BUCKET}/tsx/shared/models/"
    assert container["Environment"] == {
        "TSX_TARGET": "sagemaker",
        "TSX_SAGEMAKER_MODELS_MEMORY": "900",
    }
    # The endpoint already has an image.
    b.image = ()
    changes = actions(b.plan(code=2))
    assert [changes[id] for id in ("ModelData", "ModelVersion", "TargetModel")] == ["create"] * 3
    assert [changes[id] for id in ("Model", "EndpointConfig", "Endpoint")] == ["same"] * 3
    b.apply()
    assert len(scenario.calls) == 1
    b.plan(code=0)
    status = b.read_json("status")
    assert (status["target model"], status["endpoint"]) == (archives()[1], "shared")
    assert (status["status"], status["instances"]) == ("InService", 2)
    assert status["model name"].startswith("tsx-b-")
    # The change applies to the endpoint and therefore to all of its models.
    a.apply("--image", OTHER_IMAGE, "--set=sagemaker.instances=3")
    assert [call.split()[0] for call in scenario.calls] == ["CreateEndpoint", "UpdateEndpoint"]
    b.plan(code=0)
    assert b.read_json("status")["instances"] == 3


def test_a_new_archive_has_its_own_key_and_old_ones_are_kept(member: Any, tmp_path: Path) -> None:
    a, b = member("a"), member("b")
    a.apply()
    b.apply()
    first = target_model(a)
    a.archive = make_model(tmp_path / "digits.mar", HANDLER + "# 2\n")
    a.apply()
    second = target_model(a)
    assert sorted(archives()) == sorted([first, second, target_model(b)])
    assert a.versions == [(1, False), (2, True)]
    a.verb("rollback", "--yes")
    assert target_model(a) == first
    assert actions(a.plan(code=2))["TargetModel"] == "update"
    a.apply()
    assert target_model(a) == second
    a.archive = make_model(tmp_path / "digits.mar", HANDLER + "# 3\n")
    a.apply("--set=keep=1")
    assert len(archives()) == 2
    assert [is_current for _, is_current in a.versions] == [True]
    a.plan("--set=keep=1", code=0)


def test_the_endpoint_is_destroyed_with_its_last_model(
    member: Any,
) -> None:
    a, b = member("a"), member("a-0123456789abcdef")
    a.apply()
    b.apply()
    a.verb("destroy", "--yes")
    assert archives() == [target_model(b)]
    b.plan(code=0)
    a.verb("status", code=1)
    b.verb("destroy", "--yes")
    assert archives() == []
    assert not sagemaker_resources()


def test_destroy_removes_an_endpoint_that_does_not_start(member: Any, scenario: Scenario) -> None:
    scenario.failure = "The primary container did not pass the ping health check."
    a = member("a")
    a.apply(code=1)
    a.verb("destroy", "--yes")
    assert archives() == []
    assert not sagemaker_resources()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--canary=10", "want (TargetModel)"),
        ("--set=sagemaker.instance_type=ml.g5.xlarge", "runs on CPUs with an image like this"),
        ("--set=sagemaker.autoscaling.max=3", "does not scale a multi-model endpoint"),
        ("--set=sagemaker.data_capture.to=s3://a/b", "sagemaker.data_capture: SageMaker offers"),
    ],
)
def test_unsupported_options_of_a_multi_model_endpoint_are_refused(
    member: Any, scenario: Scenario, arguments: str, error: str
) -> None:
    a = member("a")
    a.apply(arguments, code=2)
    assert error in a.err
    assert scenario.calls == []


def test_a_multi_model_endpoint_has_one_image_and_one_bucket(member: Any) -> None:
    a = member("a")
    a.image = ()
    a.apply(code=2)
    assert "run in one image" in a.err
    b = member("b")
    b.apply()
    a.apply("--set=sagemaker.bucket=other", code=1)
    assert f"the models of shared are in {BUCKET}" in a.err
    b.verb("promote", "--yes", code=1)
    assert "which has no canary" in b.err
