"""TorchServe's config.properties: each key works as there, or a warning says that it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tsx_runtime.errors import SettingError
from tsx_runtime.settings.schema import NESTED, Settings
from tsx_runtime.settings.sources import load_settings
from tsx_runtime.settings.torchserve import (
    JAVA_ONLY,
    KEYS,
    PERMISSION_KEYS,
    Snapshot,
    VersionSettings,
    interpret,
)

NOOP = VersionSettings(
    default_version=True,
    mar_name="noop.mar",
    min_workers=1,
    max_workers=2,
    batch_size=4,
    response_timeout=120,
)
NOOP_JSON = {
    "defaultVersion": True,
    "marName": "noop.mar",
    "minWorkers": 1,
    "maxWorkers": 2,
    "batchSize": "4",
    "responseTimeout": 120,
}


def load(
    directory: Path,
    text: str,
    env: dict[str, str] | None = None,
    cli: dict[str, object] | None = None,
) -> tuple[Settings, dict[str, str], list[str]]:
    """Read a file and return the settings, their origins and the warnings."""
    file = directory / "config.properties"
    file.write_text(text)
    warnings: list[str] = []
    settings, origins = load_settings(cli or {}, env or {}, file, warnings.append)
    return settings, origins, [line.replace(f"{file}: ", "") for line in warnings]


def load_error(directory: Path, text: str, env: dict[str, str] | None = None) -> str:
    with pytest.raises(SettingError) as exc_info:
        load(directory, text, env)
    return exc_info.value.message.replace(str(directory / "config.properties"), "FILE")


def test_keys_are_settings_with_the_lowest_precedence(tmp_path: Path) -> None:
    settings, origins, warnings = load(
        tmp_path,
        "inference_address = http://0.0.0.0:8080\nload_models=noop.mar, b=c.mar\n"
        "job_queue_size: 7 \ndecode_input_request FALSE\nmodel_store=models\n",
        {"TSX_JOB_QUEUE_SIZE": "8"},
        {"model_store": "others"},
    )
    assert settings.inference_address == "http://0.0.0.0:8080"
    assert settings.load_models == ["noop.mar", "b=c.mar"]
    for name, value, origin in (
        ("job_queue_size", 8, "environment variable TSX_JOB_QUEUE_SIZE"),
        ("decode_input_request", False, str(tmp_path / "config.properties")),
        ("model_store", Path("others"), "command line"),
    ):
        assert (getattr(settings, name), origins[name]) == (value, origin)
    assert warnings == []


def test_an_address_without_a_port_gets_its_schemes_port(tmp_path: Path) -> None:
    settings, _, _ = load(
        tmp_path,
        "inference_address=http://host\nmanagement_address=https://[::1]/\n"
        "metrics_address=unix:/tmp/a",
    )
    assert settings.inference_address == "http://host:80"
    assert settings.management_address == "https://[::1]:443"
    assert settings.metrics_address == "unix:/tmp/a"


def test_a_key_without_a_value_is_ignored(tmp_path: Path) -> None:
    settings, origins, _ = load(tmp_path, "load_models=\ncertificate_file=\nmodels=\n")
    assert settings == Settings()
    assert origins["load_models"] == "default"


def test_every_torchserve_key_is_a_setting_or_a_warning(tmp_path: Path) -> None:
    _, _, warnings = load(tmp_path, "".join(f"{key}=\n" for key in sorted(KEYS)))
    names = {name for line in warnings for name in line.partition(": ")[2].split(", ")}
    read = "models model_snapshot python version tsConfigFile ts_open_inference_protocol"
    settings = set(Settings.model_fields) - NESTED
    assert names == KEYS - settings - PERMISSION_KEYS - set(read.split())


def test_keys_without_effect_are_warned_of_with_the_reason(tmp_path: Path) -> None:
    _, _, warnings = load(
        tmp_path,
        "vmargs=-Xmx4g\nnumber_of_netty_threads=32\nasync_logging=true\nversion=0.12.0\n"
        "initial_distribution_port=29500\nkeystore_type=JKS\nipex_enable=true\n",
    )
    reasons = dict(line.rsplit(": ", 1)[::-1] for line in warnings)
    java = "async_logging, number_of_netty_threads, vmargs"
    assert list(reasons) == [java, "initial_distribution_port", "ipex_enable", "keystore_type"]
    assert all(reason.startswith("without effect here") for reason in reasons.values())
    assert "TorchServe's Java" in reasons[java]
    assert set(java.split(", ")) <= JAVA_ONLY


def test_an_unknown_key_is_ignored_with_a_suggestion(tmp_path: Path) -> None:
    text = "job_queue_sise=3\nmy_own=1\ndrain_timeout=4"
    settings, _, (suggestion_warning, unknown) = load(tmp_path, text)
    assert settings == Settings(drain_timeout=4)
    assert "'job_queue_sise' is unknown" in suggestion_warning
    assert suggestion_warning.endswith("did you mean 'job_queue_size'?")
    assert "'my_own' is unknown" in unknown


def test_a_wrong_value_is_reported_with_its_file(tmp_path: Path) -> None:
    message = load_error(tmp_path, "job_queue_size=many")
    assert message.startswith("job_queue_size cannot be 'many' (from FILE)")
    assert load_error(tmp_path, "store=c:\\users").startswith("'FILE' is not a valid properties")


def test_every_boolean_except_true_is_false(tmp_path: Path) -> None:
    # SageMaker's toolkit joins two lines by mistake; such files must still work.
    joined_lines = "truedefault_response_timeout=60"
    settings, _, (warning,) = load(
        tmp_path,
        f"enable_model_api={joined_lines}\ndecode_input_request=FALSE\nenable_metrics_api=TRUE",
    )
    assert settings.enable_model_api is settings.decode_input_request is False
    assert settings.enable_metrics_api is True
    assert warning.startswith(f"enable_model_api is '{joined_lines}', which means false")


def test_a_latin_1_file_is_read_as_java_does(tmp_path: Path) -> None:
    file = tmp_path / "config.properties"
    for encoding in ("latin-1", "utf-8-sig", "utf-8"):
        file.write_bytes("model_store=modèles".encode(encoding))
        assert load_settings({}, {}, file)[0].model_store == Path("modèles")


def test_dollar_delimited_variables_are_expanded(tmp_path: Path) -> None:
    settings, _, _ = load(tmp_path, "model_store=/data/$$STORE$$/$$STORE$$", {"STORE": "x"})
    assert settings.model_store == Path("/data/x/x")
    message = load_error(tmp_path, "model_store=$$STORE$$")
    assert message.startswith("model_store in FILE holds $$STORE$$")


def test_ts_variables_apply_if_the_file_enables_them(tmp_path: Path) -> None:
    env = {"TS_JOB_QUEUE_SIZE": "9", "TS_DRAIN_TIMEOUT": "1", "TS_ENABLE_ENVVARS_CONFIG": "true"}
    assert load(tmp_path, "job_queue_size=8", env)[0].job_queue_size == 8
    settings, origins, _ = load(tmp_path, "job_queue_size=8\nenable_envvars_config=True", env)
    assert settings.job_queue_size == 9
    assert origins["job_queue_size"] == "environment variable TS_JOB_QUEUE_SIZE"
    # TorchServe has no such key.
    assert settings.drain_timeout == 30
    models = {**env, "TS_MODELS": json.dumps({"noop": {"1.0": NOOP_JSON}})}
    settings, origins, _ = load(tmp_path, "enable_envvars_config=true", models)
    assert settings.model_versions == {"noop": {"1.0": NOOP}}
    assert origins["model_versions"] == "environment variable TS_MODELS"


@pytest.mark.parametrize(
    ("lines", "by_variable"),
    [
        (["enable_envvars_config=true"], False),
        (["enable_envvars_config=true", "use_env_allowed_urls=true"], True),
        (["use_env_allowed_urls=true"], False),
    ],
)
def test_a_variable_extends_allowed_urls_only_if_the_file_permits(
    lines: list[str], by_variable: bool
) -> None:
    values = dict(line.split("=") for line in [*lines, "allowed_urls=https://here/.*"])
    env = {"TS_ALLOWED_URLS": ".*", "TS_USE_ENV_ALLOWED_URLS": "true"}
    (key,), _ = interpret(values, env, {"allowed_urls"}, "file")
    assert (key.text, key.origin) == (
        (".*", "environment variable TS_ALLOWED_URLS")
        if by_variable
        else ("https://here/.*", "file")
    )


def test_the_models_key_configures_versions(tmp_path: Path) -> None:
    lines = json.dumps({"noop": {"1.0": NOOP_JSON, "2.0": {}}}, indent=2).replace("\n", "\\\n")
    settings, _, warnings = load(tmp_path, f"models={lines}\n")
    assert settings.model_versions == {"noop": {"1.0": NOOP, "2.0": VersionSettings()}}
    assert warnings == []
    _, _, (warning,) = load(tmp_path, 'models={"noop":{"1.0":{"batchSise":4}}}')
    assert warning.startswith("models.noop.1.0.batchSise has no effect")
    assert warning.endswith("did you mean 'batchSize'?")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("models={", "models cannot be '{' (from FILE): Invalid JSON"),
        ("models=[]", "models cannot be '[]' (from FILE): Input should be an object"),
        ('models={"noop": 1}', "models.noop cannot be '1' (from FILE): "),
        ('models={"noop": {"1.0": 1}}', "models.noop.1.0 cannot be '1' (from FILE): "),
        (
            'models={"noop": {"1.0": {"batchSize": -1}}}',
            "models.noop.1.0.batchSize cannot be '-1' (from FILE): Input should be greater",
        ),
        (
            'model_snapshot={"models": {"a": {"1": []}}}',
            "model_snapshot.models.a.1 cannot be '[]' (from FILE): ",
        ),
        (
            'model_snapshot={"modelCount": "x"}',
            "model_snapshot.modelCount cannot be 'x' (from FILE)",
        ),
    ],
)
def test_an_invalid_models_key_is_reported(tmp_path: Path, text: str, reason: str) -> None:
    assert load_error(tmp_path, text).startswith(reason)


# As TorchServe 0.9 wrote it.
SNAPSHOT = r"""#Saving snapshot
#Thu Feb 08 04:34:52 UTC 2024
python=/opt/conda/bin/python
model_snapshot={\n  "name"\: "20240208043452822-shutdown.cfg",\n  "modelCount"\: 1,\n  "created"\: 1707366892822,\n  "models"\: {\n    "noop"\: {\n      "1.0"\: {\n        "defaultVersion"\: true,\n        "marName"\: "noop.mar",\n        "minWorkers"\: 1,\n        "maxWorkers"\: 2,\n        "batchSize"\: 4,\n        "responseTimeout"\: 120\n      }\n    }\n  }\n}
tsConfigFile=logs/config/20240208043104864-shutdown.cfg
version=0.9.0
load_models=mnist\=mnist.mar
model_store=model_store
number_of_gpu=0
"""


def test_a_snapshot_of_torchserve_is_read(tmp_path: Path) -> None:
    settings, _, warnings = load(tmp_path, SNAPSHOT)
    name = "20240208043452822-shutdown.cfg"
    assert settings.model_snapshot == Snapshot(
        name=name, model_count=1, created=1707366892822, models={"noop": {"1.0": NOOP}}
    )
    assert settings.load_models == ["mnist=mnist.mar"]
    assert (settings.model_store, settings.number_of_gpu) == (Path("model_store"), 0)
    assert warnings == []


KSERVE = """inference_address=http://0.0.0.0:8085
management_address=http://0.0.0.0:8085
metrics_address=http://0.0.0.0:8082
grpc_inference_port=7070
grpc_management_port=7071
enable_metrics_api=true
metrics_mode=prometheus
number_of_netty_threads=4
job_queue_size=10
enable_envvars_config=true
install_py_dep_per_model=true
service_envelope=kservev2
model_store=/mnt/models/model-store
model_snapshot={"name":"startup.cfg","modelCount":1,"models":{"mnist":{"1.0":{"defaultVersion":true,"marName":"mnist.mar","minWorkers":1,\
"maxWorkers":5,"batchSize":1,"maxBatchDelay":10,"responseTimeout":120}}}}
"""

SAGEMAKER = """enable_envvars_config=true
decode_input_request=false
load_models=ALL
disable_token_authorization=true
enable_model_api=true
model_store=/.sagemaker/ts/models
inference_address=http://0.0.0.0:8080
management_address=http://0.0.0.0:8080
default_service_handler=sagemaker_pytorch_serving_container.handler_service:handle
models={\\
  "model": {\\
    "1.0": {\\
      "defaultVersion": true,\\
      "marName": "model.mar",\\
      "minWorkers": 1,\\
      "maxWorkers": 4,\\
      "batchSize": 8,\\
      "maxBatchDelay": 100,\\
      "responseTimeout": 60\\
    }\\
  }\\
}
"""


def test_kserves_and_sagemakers_files_are_understood(tmp_path: Path) -> None:
    settings, _, _ = load(tmp_path, KSERVE)
    assert settings.inference_address == settings.management_address == "http://0.0.0.0:8085"
    assert settings.model_snapshot is not None
    assert settings.model_snapshot.models["mnist"]["1.0"].max_workers == 5
    settings, _, _ = load(tmp_path, SAGEMAKER)
    assert settings.load_models == ["ALL"]
    assert settings.disable_token_authorization is True
    handler = "sagemaker_pytorch_serving_container.handler_service:handle"
    assert settings.default_service_handler == handler
    assert settings.model_versions["model"]["1.0"].batch_size == 8


# The defaults of TorchServe, where tsx has the same.
DEFAULTS = {
    "inference_address": "http://127.0.0.1:8080",
    "management_address": "http://127.0.0.1:8081",
    "metrics_address": "http://127.0.0.1:8082",
    "grpc_inference_address": "127.0.0.1",
    "grpc_management_address": "127.0.0.1",
    "grpc_inference_port": 7070,
    "grpc_management_port": 7071,
    "enable_grpc_ssl": False,
    "model_store": None,
    "workflow_store": None,
    "load_models": [],
    "default_workers_per_model": 0,
    "default_response_timeout": 120,
    "default_startup_timeout": 120,
    "unregister_model_timeout": 120,
    "job_queue_size": 100,
    "number_of_gpu": None,
    "max_request_size": 6553500,
    "max_response_size": 6553500,
    "limit_max_image_pixels": True,
    "decode_input_request": True,
    "default_service_handler": None,
    "service_envelope": None,
    "metrics_config": None,
    "disable_system_metrics": False,
    "system_metrics_cmd": None,
    "metric_time_interval": 60,
    "enable_metrics_api": True,
    "disable_token_authorization": False,
    "token_expiration_min": 60,
    "install_py_dep_per_model": False,
    "blacklist_env_vars": None,
    "cors_allowed_origin": None,
    "cors_allowed_methods": None,
    "cors_allowed_headers": None,
    "keystore": None,
    "keystore_pass": "changeit",
    "certificate_file": None,
    "private_key_file": None,
    "cpu_launcher_enable": False,
}


def test_settings_with_torchserves_names_have_its_defaults() -> None:
    assert {name: getattr(Settings(), name) for name in DEFAULTS} == DEFAULTS


def test_each_key_can_be_overridden_from_the_environment(tmp_path: Path) -> None:
    numbers = {name: value for name, value in DEFAULTS.items() if isinstance(value, int)}
    values = {
        name: str(not value).lower() if isinstance(value, bool) else str(value + 1)
        for name, value in numbers.items()
    }
    text = "".join(f"{name}={value}\n" for name, value in numbers.items())
    env = {f"TS_{name.upper()}": value for name, value in values.items()}
    settings, origins, warnings = load(tmp_path, f"enable_envvars_config=true\n{text}", env)
    for name, value in values.items():
        assert str(getattr(settings, name)).lower().removesuffix(".0") == value
        assert origins[name] == f"environment variable TS_{name.upper()}"
    assert warnings == []
