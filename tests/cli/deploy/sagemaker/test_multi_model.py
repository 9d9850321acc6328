"""Multi-model endpoints: a deployment is an archive under the endpoint's prefix, with versions that
clients name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import boto3
import pytest

from tests.support.deploying import HANDLER, OTHER_IMAGE, Deploy, actions
from tests.support.models import make_model
from tests.support.platforms.aws import Course

pytestmark = pytest.mark.slow

SHARED = ("--set=sagemaker.multi_model.endpoint=shared",)
BUCKET = "tsx-123456789012-eu-central-1"


@pytest.fixture
def member(archive: Path, capsys: pytest.CaptureFixture[str], course: Course) -> Any:
    """One of several deployments."""
    return lambda name, *always: Deploy(archive, "sagemaker", capsys, always or SHARED, name)


def sagemaker() -> Any:
    return boto3.client("sagemaker")


def archives() -> list[str]:
    found = (
        boto3.client("s3")
        .list_objects_v2(Bucket=BUCKET, Prefix="tsx/shared/models/")
        .get("Contents", [])
    )
    return [each["Key"].rpartition("/")[2] for each in found]


def test_the_first_model_brings_the_endpoint_and_others_are_archives_beside_it(
    member: Any, course: Course
) -> None:
    course.looks = 2
    a, b = member("a"), member("b")
    assert set(actions(a.plan(code=2)).values()) == {"create"}
    a.apply(
        "--set=sagemaker.instances=2",
        "--set=sagemaker.multi_model.cache=false",
        "--set=env.TSX_SAGEMAKER_MODELS_MEMORY=900",
    )
    [variant] = sagemaker().describe_endpoint_config(
        EndpointConfigName=sagemaker().describe_endpoint(EndpointName="shared")[
            "EndpointConfigName"
        ]
    )["ProductionVariants"]
    container = sagemaker().describe_model(ModelName=variant["ModelName"])["PrimaryContainer"]
    assert (container["Mode"], container["MultiModelConfig"]) == (
        "MultiModel",
        {"ModelCacheSetting": "Disabled"},
    )
    assert container["ModelDataUrl"] == f"s3://{BUCKET}/tsx/shared/models/"
    assert container["Environment"] == {
        "TSX_TARGET": "sagemaker",
        "TSX_SAGEMAKER_MODELS_MEMORY": "900",
    }
    b.image = ()  # that of the endpoint
    joined = actions(b.plan(code=2))
    assert [joined[each] for each in ("ModelData", "ModelVersion", "TargetModel")] == ["create"] * 3
    assert [joined[each] for each in ("Model", "EndpointConfig", "Endpoint")] == ["same"] * 3
    b.apply()
    assert len(course.calls) == 1
    assert set(actions(b.plan(code=0)).values()) == {"same"}
    status = b.reported("status")
    assert (status["target model"], status["endpoint"], status["status"], status["instances"]) == (
        archives()[1],
        "shared",
        "InService",
        2,
    )
    assert status["model name"].startswith("tsx-b-")
    a.apply(
        "--image", OTHER_IMAGE, "--set=sagemaker.instances=3"
    )  # of the endpoint, and so of all of its models
    assert [call.split()[0] for call in course.calls] == ["CreateEndpoint", "UpdateEndpoint"]
    assert set(actions(b.plan(code=0)).values()) == {"same"}
    assert b.reported("status")["instances"] == 3


def test_a_new_archive_has_a_key_of_its_own_and_earlier_ones_stay_until_they_are_not_kept(
    member: Any, tmp_path: Path
) -> None:
    a, b = member("a"), member("b")
    a.apply()
    b.apply()
    first = a.reported("status")["target model"]
    a.archive = make_model(tmp_path / "digits.mar", HANDLER + "# 2\n")
    a.apply()
    second = a.reported("status")["target model"]
    assert sorted(archives()) == sorted([first, second, b.reported("status")["target model"]])
    assert [each["is_current"] for each in a.reported("history")] == [False, True]
    a.verb("rollback", "--yes")
    assert a.reported("status")["target model"] == first
    assert actions(a.plan(code=2))["TargetModel"] == "update"
    a.apply()
    assert a.reported("status")["target model"] == second
    a.archive = make_model(tmp_path / "digits.mar", HANDLER + "# 3\n")
    a.apply("--set=keep=1")
    assert len(archives()) == 2
    assert [each["is_current"] for each in a.reported("history")] == [True]
    assert set(actions(a.plan("--set=keep=1", code=0)).values()) == {"same"}


def test_destroy_removes_a_models_archives_and_with_the_last_the_endpoint(member: Any) -> None:
    a, b = member("a"), member("a-0123456789abcdef")
    a.apply()
    b.apply()
    a.verb("destroy", "--yes")
    assert archives() == [b.reported("status")["target model"]]
    assert set(actions(b.plan(code=0)).values()) == {"same"}
    a.verb("status", code=1)
    b.verb("destroy", "--yes")
    assert archives() == []
    assert not [
        *sagemaker().list_models()["Models"],
        *sagemaker().list_endpoint_configs()["EndpointConfigs"],
    ]
    assert not sagemaker().list_endpoints()["Endpoints"]


def test_an_endpoint_that_does_not_start_is_found_by_destroy(member: Any, course: Course) -> None:
    course.failure = "The primary container did not pass the ping health check."
    a = member("a")
    a.apply(code=1)
    a.verb("destroy", "--yes")
    assert archives() == []
    assert not [*sagemaker().list_models()["Models"], *sagemaker().list_endpoints()["Endpoints"]]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--canary=10"],
            "canary: the clients of a multi-model endpoint name the version that they want (TargetModel)",
        ),
        (
            ["--set=sagemaker.instance_type=ml.g5.xlarge"],
            "a multi-model endpoint runs on CPUs with an image like this",
        ),
        (
            ["--set=sagemaker.autoscaling.max=3"],
            "tsx deploy does not scale a multi-model endpoint; set sagemaker.instances",
        ),
        (
            ["--set=sagemaker.data_capture.to=s3://a/b"],
            "sagemaker.data_capture: SageMaker offers that for",
        ),
    ],
)
def test_what_a_multi_model_endpoint_does_not_have_is_refused(
    member: Any, course: Course, words: list[str], said: str
) -> None:
    a = member("a")
    a.apply(*words, code=2)
    assert said in a.err
    assert course.calls == []


def test_the_endpoint_of_several_models_has_one_image_and_one_bucket(member: Any) -> None:
    a = member("a")
    a.image = ()
    a.apply(code=2)
    assert "image is not given: all models of the endpoint shared run in one image" in a.err
    b = member("b")
    b.apply()
    a.apply("--set=sagemaker.bucket=other", code=1)
    assert (
        f"sagemaker.bucket is other, and the models of shared are in {BUCKET}: remove sagemaker.bucket"
        in a.err
    )
    b.verb("promote", "--yes", code=1)
    assert "b is a model of the multi-model endpoint 'shared', which has no canary" in b.err
