"""`tsx config show` prints every setting with its origin, without secrets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tsx_runtime.settings.schema import Settings


def test_every_setting_is_shown_with_its_origin(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tsx.toml"
    file.write_text("drain_timeout = 5\n[models.resnet]\nworkers = 2\n")
    monkeypatch.setenv("TSX_JOB_QUEUE_SIZE", "7")
    settings = json.loads(run("config show --set number_of_gpu=0 --json").out)
    assert list(settings) == [
        *(name for name in Settings.model_fields if name != "models"),
        "models.resnet.workers",
    ]
    variable = "environment variable TSX_JOB_QUEUE_SIZE"
    for name, value, origin in (
        ("models.resnet.workers", 2, str(file)),
        ("drain_timeout", 5, str(file)),
        ("job_queue_size", 7, variable),
        ("number_of_gpu", 0, "command line"),
    ):
        assert settings[name] == {"value": value, "origin": origin}
    assert settings["max_request_size"]["origin"] == "default"
    assert f"job_queue_size 7 {variable}" in " ".join(run("config show").out.split())


def test_a_secret_is_hidden(run: Run) -> None:
    result = run("config show --set management_token=hunter2 --json")
    assert "hunter2" not in result.out
    assert json.loads(result.out)["management_token"]["value"] == "(hidden)"


def test_credentials_in_urls_are_hidden(run: Run) -> None:
    values = {
        "otlp_endpoint": "https://me:hunter2@collector:4318",
        "s3_endpoint_url": "http://me:hunter2@minio:9000",
        "allowed_urls": "https://hunter2@host/.*",
        "load_models": "https://host/m.mar?X-Amz-Signature=hunter2",
    }
    arguments = " ".join(f"--set {name}={value}" for name, value in values.items())
    for form in ("", "--json"):
        result = run(f"config show {arguments} {form}")
        assert "hunter2" not in result.out
        assert "***@collector:4318" in result.out
    refused = run("config show --set otlp_endpoint=ftp://me:hunter2@host")
    assert "otlp_endpoint cannot be 'ftp://***@host'" in refused.err


def test_another_file_can_be_given_on_the_command_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "tsx.toml").write_text("drain_timeout = 5\n")
    (tmp_path / "other.toml").write_text("drain_timeout = 6\n")
    settings = json.loads(run("config show --config other.toml --json").out)
    assert settings["drain_timeout"] == {"value": 6, "origin": "other.toml"}


def test_a_config_properties_is_shown_with_the_settings_that_have_no_effect(
    run: Run, tmp_path: Path
) -> None:
    lines = ["job_queue_size=7", "vmargs=-Xmx1g", 'models={"noop": {"1.0": {"batchSize": 4}}}']
    (tmp_path / "config.properties").write_text("\n".join(lines))
    result = run("config show --config config.properties --json")
    settings = json.loads(result.out)
    assert settings["job_queue_size"] == {"value": 7, "origin": "config.properties"}
    assert settings["model_versions"]["value"]["noop"]["1.0"]["batch_size"] == 4
    assert result.err.startswith("config.properties: without effect here")
    assert result.err.endswith(": vmargs\n")
    assert run("config show --config config.properties").code == 0


@pytest.mark.parametrize(
    "command", ["config show", "serve", "models list", "archive inspect x.mar"]
)
def test_every_command_refuses_an_unknown_setting(run: Run, tmp_path: Path, command: str) -> None:
    file = tmp_path / "tsx.toml"
    file.write_text("job_queue_sise = 7")
    result = run(command)
    assert result.code == 1
    assert f"'job_queue_sise' in {file}; did you mean 'job_queue_size'?" in result.err


def test_an_unknown_variable_gets_a_warning_except_for_kubernetes(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSX_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("TSX_PORT", "tcp://10.0.0.1:80")
    monkeypatch.setenv("TSX_JOB_QUEUE_SISE", "7")
    result = run("config show")
    assert result.code == 0
    (warning,) = result.err.splitlines()
    assert "TSX_JOB_QUEUE_SISE is no setting and is ignored" in warning
    assert "did you mean TSX_JOB_QUEUE_SIZE?" in warning


def test_an_assignment_without_a_value_is_a_usage_error(run: Run) -> None:
    result = run("config show --set drain_timeout")
    assert (result.code, result.err) == (2, "Error: --set takes NAME=VALUE, not 'drain_timeout'\n")


def test_config_without_a_verb_shows_help(run: Run) -> None:
    assert "show" in run("config").out
