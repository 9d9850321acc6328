"""`--emit ray`: files with Ray's own schema, and a RayService with room for its replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from tests.support.deploying import HANDLER
from tests.support.models import make_model
from tsx_cli.main import main
from tsx_runtime.targets.ray.config import parse_application


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return make_model(tmp_path / "digits.mar", HANDLER)


def run(archive: Path, *arguments: str) -> int:
    out = str(archive.parent / "out")
    return main(["deploy", str(archive), "--target", "ray", *arguments, "--emit", "ray", out])


def emit_files(archive: Path, *arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    out = archive.parent / "out"
    assert run(archive, *arguments) == 0
    return tuple(
        yaml.safe_load((out / name).read_text())
        for name in ("serve-config.yaml", "rayservice.yaml")
    )  # type: ignore[return-value]  # There are always two files.


def test_the_config_matches_ray_serves_schema(
    archive: Path,
) -> None:
    arguments = (
        "--set=ray.archives=s3://bucket/models --set=ray.grpc=true --set=env.A=b --image own/ray:1"
    )
    config, service = emit_files(archive, *arguments.split())
    deployment = ServeDeploySchema.model_validate(config)
    (application,) = deployment.applications
    assert (application.name, application.route_prefix) == ("digits", "/digits")
    assert application.runtime_env == {"env_vars": {"A": "b"}}
    assert parse_application(application.args).surge == 25
    model = parse_application(application.args).models[0]
    assert model.source.startswith("s3://bucket/models/digits/")
    assert len(deployment.grpc_options.grpc_servicer_functions) == 1
    assert yaml.safe_load(service["spec"]["serveConfigV2"]) == config


def test_a_service_has_room_for_its_replicas_during_an_update(
    archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = "archives=path min_replicas=0 max_replicas=4 num_gpus=0.5 num_cpus=1.5 memory=8Gi"
    config, service = emit_files(
        archive, *(f"--set=ray.{argument}" for argument in settings.split())
    )
    cluster = service["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    assert (service["kind"], cluster["enableInTreeAutoscaling"]) == ("RayService", True)
    assert (workers["minReplicas"], workers["maxReplicas"]) == (0, 5)
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "2", "memory": "8Gi", "nvidia.com/gpu": 1}
    assert container["image"].startswith("rayproject/ray:")
    assert config["applications"][0]["runtime_env"]["pip"][0].startswith("tsx-serve[ray]==")
    assert f"the model digits at {archive}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "the archive into the cluster's memory"),
        (("--set=ray.archives=path", "--canary=10%"), "the files are of one version"),
    ],
)
def test_options_that_files_cannot_express_are_refused(
    archive: Path, arguments: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(archive, *arguments) == 2
    assert error in capsys.readouterr().err
