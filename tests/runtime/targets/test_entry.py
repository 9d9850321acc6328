"""The entry point of an image: its platform, its model, and SageMaker's variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models import make_model
from tests.support.platforms.sagemaker_host import container, unpack
from tests.support.servers import DEADLINE, FreePorts, clean
from tsx_runtime.errors import SettingError
from tsx_runtime.targets.entry import choose_target, main
from tsx_runtime.targets.image.model_discovery import find_model
from tsx_runtime.targets.sagemaker.environment import read_environment

ECHO = "def handle(data, context):\n    return data\n"


@pytest.mark.parametrize(
    ("env", "platform"),
    [
        ({}, "container"),
        ({"SAGEMAKER_REGION": "x"}, "sagemaker"),
        ({"SAGEMAKER_REGION": "x", "TSX_TARGET": "Container"}, "container"),
    ],
)
def test_the_platform_is_detected_from_variables_unless_set(
    env: dict[str, str], platform: str
) -> None:
    assert choose_target(env) == platform


def test_an_unknown_platform_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(SettingError, match="TSX_TARGET is 'sagmaker'; did you mean 'sagemaker'"):
        choose_target({"TSX_TARGET": "sagmaker"})


def test_sagemaker_toolkit_variables_become_model_settings() -> None:
    environment = read_environment(
        {
            "SAGEMAKER_BIND_TO_PORT": "7777",
            "SAGEMAKER_MODEL_SERVER_WORKERS": "2",
            "SAGEMAKER_TS_BATCH_SIZE": "8",
            "SAGEMAKER_TS_MAX_BATCH_DELAY": "20",
            "SAGEMAKER_TS_MAX_WORKERS": "1",
            "SAGEMAKER_MODEL_SERVER_TIMEOUT": "30",
            "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "40",
            "SAGEMAKER_STARTUP_TIMEOUT": "",
        }
    )
    addresses = (environment.variables[f"TSX_{role}_ADDRESS"] for role in ("INFERENCE", "METRICS"))
    assert set(addresses) == {"http://0.0.0.0:7777"}
    assert environment.order == {
        "initial_workers": 2,
        "batch_size": 8,
        "max_batch_delay": 20,
        "max_workers": 2,
        "response_timeout": 40,
    }
    assert environment.notices == []


def test_variables_without_effect_are_reported() -> None:
    notices = read_environment(
        {
            "SAGEMAKER_TS_BATCHSIZE": "8",
            "SAGEMAKER_MODEL_SERVER_VMARGS": "-Xmx1g",
            "SAGEMAKER_REGION": "x",
        }
    ).notices
    java, unknown = notices
    assert java.startswith("SAGEMAKER_MODEL_SERVER_VMARGS ")
    assert unknown.endswith("'SAGEMAKER_TS_BATCH_SIZE'?")


@pytest.mark.parametrize(
    ("name", "text"), [("SAGEMAKER_TS_BATCH_SIZE", "many"), ("SAGEMAKER_BIND_TO_PORT", "70000")]
)
def test_an_invalid_value_is_an_error(name: str, text: str) -> None:
    with pytest.raises(SettingError, match=f"{name} is .*{text}"):
        read_environment({name: text})


def test_a_directory_contains_one_archive_or_an_unpacked_model(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"holds nothing; it must hold one \.mar"):
        find_model(tmp_path / "model", {})
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(SettingError, match=r"holds no archive, but notes\.txt;"):
        find_model(tmp_path, {})
    first = make_model(tmp_path / "a.mar", ECHO)
    assert find_model(tmp_path, {}).path == first
    make_model(tmp_path / "b.mar", ECHO)
    with pytest.raises(SettingError, match=r"holds 2 archives: a\.mar, b\.mar;"):
        find_model(tmp_path, {})
    assert find_model(make_model(tmp_path / "c", ECHO), {}).path == tmp_path / "c"


@pytest.mark.usefixtures("processes")
def test_a_failed_load_ends_the_container_with_its_traceback(
    short_path: Path, free_ports: FreePorts
) -> None:
    unpack(make_model(short_path / "broken.mar", "raise RuntimeError('no weights')\n"), short_path)
    with container(short_path, *free_ports(1), {}) as host:
        assert host.process.wait(DEADLINE) == 1
        assert "Error: broken.mar does not load" in host.log
        assert "RuntimeError: no weights" in host.log


@pytest.mark.usefixtures("processes")
def test_any_argument_except_serve_is_run_as_a_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tsx_runtime.targets.entry", "echo", "a word"]
    output = subprocess.check_output(command, cwd=tmp_path, env=clean(os.environ), text=True)
    assert output == "a word\n"


def test_an_unknown_command_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["srve"], {}) == 127
    assert capsys.readouterr().err.startswith("Error: 'srve' cannot be started")


@pytest.mark.usefixtures("processes")
def test_an_invalid_archive_is_reported_without_a_traceback(
    tmp_path: Path, free_ports: FreePorts
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "digits.mar").write_text("no archive")
    with container(tmp_path, *free_ports(1), {}) as host:
        assert host.process.wait(DEADLINE) == 1
        assert host.log.startswith("Error: ") or "\nError: " in host.log
        assert "Traceback" not in host.log
