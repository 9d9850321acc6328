"""A container of the image: models, settings, health, and KServe's layout."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.support import forked
from tests.support.models import make_model
from tests.support.servers import DEADLINE, FreePorts, Running, clean, started
from tsx_runtime.errors import SettingError
from tsx_runtime.targets.image.environment import locate_model, read_settings

HANDLER = "def handle(data, context):\n    return data and [{'model': context.model_name} for _ in data]\n"


@contextmanager
def container(
    directory: Path, ports: list[int], **more: str
) -> Generator[tuple[Running, dict[str, str]], None, None]:
    """Start the image's entry point and wait until it serves."""
    environment = {
        "TSX_INFERENCE_ADDRESS": f"http://0.0.0.0:{ports[0]}",
        "TSX_METRICS_ADDRESS": f"http://0.0.0.0:{ports[0]}",
        "TSX_MANAGEMENT_ADDRESS": f"http://127.0.0.1:{ports[1]}",
        "TSX_DISABLE_TOKEN_AUTHORIZATION": "true",
        **more,
    }
    command = [
        sys.executable,
        "-c",
        "import os, sys; os.dup2(1, 2); from tsx_runtime.targets.entry import main; sys.exit(main([], os.environ))",
    ]
    with started(command, directory, environment, last_line="") as server_process:
        assert server_process.process.stdout is not None
        while f"at http://0.0.0.0:{ports[0]}" not in server_process.lines[-1]:
            line = server_process.process.stdout.readline()
            assert line, f"the container ended: {server_process.lines}"
            server_process.lines.append(line)
        yield server_process, environment


def health(directory: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tsx_runtime.targets.health"]
    options = {"capture_output": True, "text": True, "timeout": DEADLINE}
    return forked.run(command, cwd=directory, env=clean(environment), **options)


def predict(port: int, path: str, **body: object) -> Any:
    request = Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urlopen(request) as answer:
        return json.loads(answer.read())


@pytest.mark.usefixtures("processes")
def test_kserves_torchserve_layout_is_served_and_reports_health(
    short_path: Path, free_ports: FreePorts
) -> None:
    make_model(short_path / "model-store" / "digits.mar", HANDLER)
    (short_path / "config").mkdir()
    properties = "inference_address=http://0.0.0.0:8085\nmodel_store=/elsewhere\nenable_metrics_api=true\nservice_envelope=kserve\n"
    (short_path / "config" / "config.properties").write_text(properties)
    ports = free_ports(2)
    with container(short_path, ports, TSX_MODEL_DIR=str(short_path), TSX_MODEL_NAME="service") as (
        server_process,
        environment,
    ):
        assert predict(ports[0], "/v1/models/digits:predict", instances=[1]) == {
            "predictions": [{"model": "digits"}]
        }
        health_check = health(short_path, environment)
        assert (health_check.returncode, health_check.stdout, health_check.stderr) == (0, "", "")
        assert server_process.stop() == 0
    health_check = health(short_path, environment)
    assert health_check.returncode == 1
    assert health_check.stderr.startswith("not healthy: ")


def test_a_model_gets_the_name_of_its_kserve_service(tmp_path: Path) -> None:
    location = locate_model({"TSX_MODEL_DIR": str(tmp_path), "TSX_MODEL_NAME": "service"})
    assert (location.directory, location.name, location.store) == (tmp_path, "service", None)
    assert locate_model({}).directory == Path("/opt/ml/model")


def test_the_inference_address_is_public_unless_a_setting_changes_it(tmp_path: Path) -> None:
    default_settings = read_settings({}, locate_model({}), None, [])
    assert default_settings.inference_address == "http://0.0.0.0:8080"
    assert default_settings.management_address == "http://127.0.0.1:8081"
    file = tmp_path / "tsx.toml"
    file.write_text('inference_address = "http://0.0.0.0:9000"\n')
    settings = read_settings(
        {"TSX_METRICS_ADDRESS": "http://0.0.0.0:9001"}, locate_model({}), file, []
    )
    assert (settings.inference_address, settings.metrics_address) == (
        "http://0.0.0.0:9000",
        "http://0.0.0.0:9001",
    )
    notices: list[str] = []
    read_settings(
        {"TSX_MODEL_DIRECTORY": "x", "TSX_SERVICE_HOST": "10.0.0.1"},
        locate_model({}),
        None,
        notices,
    )
    (notice,) = notices
    assert "TSX_MODEL_DIRECTORY is no setting" in notice


def test_variables_and_files_override_container_defaults(tmp_path: Path) -> None:
    file = tmp_path / "tsx.toml"
    file.write_text("drain_timeout = 40\ndisable_token_authorization = false\n")
    defaults = {
        "TSX_DEFAULTS": "drain_timeout=25 shutdown_delay=5 disable_token_authorization=true"
    }

    def values(environment: dict[str, str], config: Path | None) -> tuple[float, float, bool]:
        notices: list[str] = []
        settings = read_settings(environment, locate_model({}), config, notices)
        assert notices == []
        return settings.drain_timeout, settings.shutdown_delay, settings.disable_token_authorization

    assert values(defaults, None) == (25, 5, True)
    assert values({**defaults, "TSX_SHUTDOWN_DELAY": "1"}, file) == (40, 1, False)
    with pytest.raises(SettingError, match="TSX_DEFAULTS is 'drain_timeout'"):
        read_settings({"TSX_DEFAULTS": "drain_timeout"}, locate_model({}), None, [])


def test_a_wrong_default_is_reported_with_its_variable() -> None:
    for environment, origin in (
        ({"TSX_DEFAULTS": "cpus=two"}, "entry 'cpus' of TSX_DEFAULTS"),
        ({"TSX_DEFAULTS": "cpus=1", "TSX_CPUS": "two"}, "environment variable TSX_CPUS"),
    ):
        with pytest.raises(SettingError, match=rf"cpus cannot be 'two' \(from {origin}\)"):
            read_settings(environment, locate_model({}), None, [])
    notices: list[str] = []
    read_settings({"TSX_DEFAULTS": "cpuz=2"}, locate_model({}), None, notices)
    (notice,) = notices
    assert "'cpuz'" in notice
    assert "TSX_CPUS?" in notice
