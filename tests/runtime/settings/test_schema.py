"""Every setting has one value with a known origin."""

from __future__ import annotations

import os
import re
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tsx_archiver import inspect_archive
from tsx_archiver.errors import ArchiveTooLarge
from tsx_archiver.metadata.modelconfig import CacheConfig
from tsx_runtime.errors import SettingError
from tsx_runtime.settings.schema import REMOVED, ModelSettings, Settings
from tsx_runtime.settings.sources import accepted, find_config, load_settings
from tsx_runtime.shared.memory import container_memory
from tsx_runtime.shared.suggestions import suggestion
from tsx_runtime.wire import MAX_FIELD


def write(directory: Path, text: str) -> Path:
    path = directory / "tsx.toml"
    path.write_text(text)
    return path


def load_error(
    cli: dict[str, object] | None = None,
    env: dict[str, str] | None = None,
    toml: Path | None = None,
) -> str:
    with pytest.raises(SettingError) as exc_info:
        load_settings(cli or {}, env or {}, toml)
    return exc_info.value.message


def test_without_sources_all_settings_have_defaults() -> None:
    settings, origins = load_settings({}, {"PATH": "/bin"})
    assert settings == Settings()
    assert set(origins) == set(Settings.model_fields)
    assert set(origins.values()) == {"default"}


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("in_env", [True, False])
@pytest.mark.parametrize("on_command_line", [True, False])
def test_command_line_overrides_environment_overrides_file(
    tmp_path: Path, in_file: bool, in_env: bool, on_command_line: bool
) -> None:
    toml = write(tmp_path, "job_queue_size = 2" if in_file else "")
    env = {"TSX_JOB_QUEUE_SIZE": "3"} if in_env else {}
    cli: dict[str, object] = {"job_queue_size": 4} if on_command_line else {}
    settings, origins = load_settings(cli, env, toml)
    sources = [
        (on_command_line, 4, "command line"),
        (in_env, 3, "environment variable TSX_JOB_QUEUE_SIZE"),
        (in_file, 2, str(toml)),
        (True, 100, "default"),
    ]
    value, origin = next((value, origin) for is_set, value, origin in sources if is_set)
    assert (settings.job_queue_size, origins["job_queue_size"]) == (value, origin)


def test_environment_text_is_converted_to_the_settings_type() -> None:
    env = {
        "TSX_LIMIT_MAX_IMAGE_PIXELS": "false",
        "TSX_WORKER_PRELOAD": "0",
        "TSX_NUMBER_OF_GPU": "2",
        "TSX_MODEL_STORE": "models",
        "TSX_LOAD_MODELS": "digits.mar, noop=x.mar",
        "TSX_INFERENCE_ADDRESS": "http://[::1]:80",
    }
    settings, _ = load_settings({}, env)
    assert settings.limit_max_image_pixels is False
    assert settings.worker_preload is False
    assert settings.number_of_gpu == 2
    assert settings.model_store == Path("models")
    assert settings.load_models == ["digits.mar", "noop=x.mar"]
    assert settings.inference_address == "http://[::1]:80"


def test_relative_paths_in_the_file_are_relative_to_it(tmp_path: Path) -> None:
    settings, _ = load_settings(
        {}, {}, write(tmp_path, 'model_store = "models"\ncache_dir = "/cache"')
    )
    assert settings.model_store == tmp_path / "models"
    assert settings.cache_dir == Path("/cache")


def test_sizes_and_durations_may_be_text_in_every_source(tmp_path: Path) -> None:
    toml = write(
        tmp_path,
        'max_request_size = "10MB"\nmax_job_size = "1MiB"\ndrain_timeout = "2m"\n'
        '[models.m]\nresponseTimeout = "1h"\n',
    )
    settings, _ = load_settings(
        {"max_response_size": "2 kB", "models.m.max_queue_bytes": "1GiB"},
        {"TSX_KEEP_ALIVE_TIMEOUT": "30s"},
        toml,
    )
    assert settings.max_request_size == 10_000_000
    assert settings.max_response_size == 2000
    assert settings.max_job_size == 1 << 20
    assert (settings.drain_timeout, settings.keep_alive_timeout) == (120, 30)
    assert settings.models["m"].response_timeout == 3600
    assert settings.models["m"].max_queue_bytes == 1 << 30
    assert type(settings.drain_timeout) is int


@pytest.mark.parametrize("text", ["500ms", "1.5", "soon", "10MB", "-1"])
def test_a_fractional_number_of_seconds_is_refused(text: str) -> None:
    message = load_error({"drain_timeout": text})
    assert message.endswith("at least 0, or a time such as 30s, 10m or 2h")


def test_every_integer_of_bytes_or_seconds_accepts_text() -> None:
    for name, field in (Settings.model_fields | ModelSettings.model_fields).items():
        unit = re.search(r"bytes|seconds|milliseconds|megabytes", field.description or "")
        # The description of max_batch_tokens mentions bytes, but its unit is tokens.
        if accepted(field).startswith("a whole number") and unit and name != "max_batch_tokens":
            assert (", or a " in accepted(field)) == (unit[0] in ("bytes", "seconds")), name


@pytest.mark.parametrize("name", ["max_request_size", "max_response_size"])
def test_a_limit_beyond_the_frame_size_is_refused(name: str) -> None:
    assert getattr(load_settings({name: "4294967295"}, {})[0], name) == MAX_FIELD
    message = load_error({name: "4294967296"})
    assert message.startswith(f"{name} cannot be '4294967296' (from command line)")
    assert "from 1 to 4294967295" in message


def test_an_unknown_setting_gets_a_suggestion_in_every_source(tmp_path: Path) -> None:
    toml = write(tmp_path, "job_queue_sise = 2")
    message = load_error(toml=toml)
    assert message.startswith(f"unknown setting 'job_queue_sise' in {toml}")
    assert message.endswith("did you mean 'job_queue_size'?")
    assert "did you mean 'drain_timeout'?" in load_error(cli={"drain_timout": "x"})
    assert "`tsx config show` lists all settings" in load_error(cli={"zz": "1"})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("workers", "models.NAME.workers, or --workers of tsx serve"),
        ("batch_size", "models.NAME.batch_size, or --batch-size of tsx serve"),
        ("batchSize", "models.NAME.batch_size"),
        ("slo", "models.NAME.slo"),
        ("timeout", "default_response_timeout"),
        ("log_level", "log_config"),
        ("model", "models"),
    ],
)
def test_another_servers_setting_name_gets_a_hint(name: str, hint: str) -> None:
    message = load_error(cli={name: "1"})
    assert message.startswith(f"unknown setting '{name}' in the command line")
    assert message.endswith(f"did you mean {hint}?")


def test_all_unknown_settings_of_a_file_are_reported_together(tmp_path: Path) -> None:
    toml = write(
        tmp_path,
        "zz = 1\n[model.digits]\nworkers = 2\n[models.a]\nworker = 2\n"
        "[models.'b.1']\nworkers = 1\nsloo = 'p99<1s'\n",
    )
    lines = load_error(toml=toml).splitlines()
    assert [line.partition(";")[0] for line in lines] == [
        f"unknown setting 'zz' in {toml}",
        f"unknown setting 'model' in {toml}",
        f"unknown setting 'worker' in [models.a] of {toml}",
        f"unknown setting 'sloo' in [models.b.1] of {toml}",
    ]
    assert len(load_error(cli={"zz": "1", "models.m.worker": "2"}).splitlines()) == 2


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("TSX_MODELSTORE", "did you mean TSX_MODEL_STORE?"),
        ("TSX_CONFIGS", "did you mean TSX_CONFIG?"),
        ("TSX_JOB_QUEUE_SISE", "did you mean TSX_JOB_QUEUE_SIZE?"),
        ("TSX_job_queue_size", "did you mean TSX_JOB_QUEUE_SIZE?"),
        ("TSX_MODELS", "`tsx config show` lists all settings"),
        ("TSX_ZZ", "`tsx config show` lists all settings"),
    ],
)
def test_an_unknown_variable_is_a_warning_with_a_suggestion(variable: str, hint: str) -> None:
    warnings: list[str] = []
    settings, _ = load_settings({}, {variable: "1"}, warn=warnings.append)
    assert settings == Settings()
    (warning,) = warnings
    assert variable in warning
    assert warning.endswith(hint)


def test_a_removed_setting_is_a_warning_in_every_source(tmp_path: Path) -> None:
    toml = write(tmp_path, "frontends = 2\ndrain_timeout = 5")
    warnings: list[str] = []
    settings, _ = load_settings(
        {"jobs_share": "0.1"}, {"TSX_BODY_MIN_RATE": "9"}, toml, warnings.append
    )
    assert settings == Settings(drain_timeout=5)
    assert [warning.partition(" no longer exists")[0] for warning in warnings] == [
        f"{toml}: the setting frontends",
        "environment variable TSX_BODY_MIN_RATE: the setting body_min_rate",
        "the command line: the setting jobs_share",
    ]


def test_kubernetes_service_variables_are_ignored() -> None:
    # The last one produces the name of a setting: TSX_GRPC_INFERENCE_PORT.
    names = ("TSX", "TSX_CANARY", "TSX_GRPC_INFERENCE")
    links = {
        f"{name}_{part}": value
        for name in names
        for part, value in {
            "SERVICE_HOST": "10.0.0.1",
            "SERVICE_PORT": "80",
            "SERVICE_PORT_HTTP": "80",
            "PORT": "tcp://10.0.0.1:80",
            "PORT_80_TCP": "tcp://10.0.0.1:80",
            "PORT_80_TCP_PROTO": "tcp",
            "PORT_80_TCP_PORT": "80",
            "PORT_80_TCP_ADDR": "10.0.0.1",
        }.items()
    }
    warnings: list[str] = []
    assert load_settings({}, links, warn=warnings.append)[0] == Settings()
    assert warnings == []
    assert load_settings({}, {"TSX_GRPC_INFERENCE_PORT": "7171"})[0].grpc_inference_port == 7171


def test_variables_of_other_programs_are_ignored() -> None:
    load_settings({}, {"TS_CONFIG_FILE": "x", "XTSX_MODEL_STORE": "x"})


@pytest.mark.parametrize(
    ("variable", "text", "accepted_values"),
    [
        ("TSX_JOB_QUEUE_SIZE", "many", "a whole number, at least 1"),
        ("TSX_JOB_QUEUE_SIZE", "0", "a whole number, at least 1"),
        ("TSX_NUMBER_OF_GPU", "", "a whole number, at least 0"),
        ("TSX_WORKER_PRELOAD", "perhaps", "true or false"),
        ("TSX_SERVER_TIMING_SHARE", "7", "a number from 0 to 1"),
        ("TSX_OTLP_ENDPOINT", "nowhere", "a URL such as"),
        ("TSX_MODEL_STORE", "", "a path"),
        ("TSX_METRICS_ADDRESS", "localhost:8082", "an address: http://HOST:PORT"),
        ("TSX_METRICS_ADDRESS", "http://localhost:99999", "an address: http://HOST:PORT"),
    ],
)
def test_a_wrong_value_is_reported_with_its_origin_and_accepted_values(
    variable: str, text: str, accepted_values: str
) -> None:
    name = variable.removeprefix("TSX_").lower()
    message = load_error(env={variable: text})
    origin = f"(from environment variable {variable})"
    assert message.startswith(f"{name} cannot be {text!r} {origin}: it takes {accepted_values}")


@pytest.mark.parametrize(
    "line",
    [
        'job_queue_size = "2"',
        "job_queue_size = true",
        "job_queue_size = 1.5",
        "model_store = 3",
        'load_models = "a"',
        "worker_preload = 1",
    ],
)
def test_values_in_the_file_must_have_the_right_type(tmp_path: Path, line: str) -> None:
    toml = write(tmp_path, line)
    assert f"(from {toml})" in load_error(toml=toml)


def test_errors_never_contain_a_secret() -> None:
    message = load_error(cli={"management_token": 5})
    assert message.startswith("management_token cannot be what was given (from command line)")
    message = load_error(env={"TSX_INFERENCE_TOKEN": ""})
    assert "from environment variable TSX_INFERENCE_TOKEN" in message


def test_an_unreadable_or_invalid_toml_file_is_reported(tmp_path: Path) -> None:
    message = load_error(toml=tmp_path / "none.toml")
    assert f"'{tmp_path}/none.toml': No such file or directory" in message
    toml = tmp_path / "tsx.toml"
    for content in (b"a = = 1", b"a = '\xff'"):
        toml.write_bytes(content)
        assert load_error(toml=toml).startswith(f"'{toml}' is not valid TOML: ")


def test_the_file_comes_from_argument_environment_or_working_directory(tmp_path: Path) -> None:
    assert find_config(None, {}, tmp_path) is None
    settings_file = write(tmp_path, "")
    assert find_config(None, {}, tmp_path) == settings_file
    assert find_config(None, {"TSX_CONFIG": "a.toml"}, tmp_path) == Path("a.toml")
    assert find_config(Path("b.toml"), {"TSX_CONFIG": "a.toml"}, tmp_path) == Path("b.toml")


def test_a_model_may_have_settings_of_its_own(tmp_path: Path) -> None:
    toml = write(
        tmp_path, '[models.resnet]\nbatch_size = 8\ndevice = "cpu"\n[models."a.b"]\nworkers = 2\n'
    )
    settings, origins = load_settings(
        {"models.resnet.batch_size": "9", "models.a.b.max_batch_delay": "0"}, {}, toml
    )
    assert settings.models == {
        "resnet": ModelSettings(batch_size=9, device="cpu"),
        "a.b": ModelSettings(workers=2, max_batch_delay=0),
    }
    assert origins["models.resnet.batch_size"] == "command line"
    assert origins["models.resnet.device"] == str(toml)


def test_a_models_cache_setting_is_a_table_or_json(tmp_path: Path) -> None:
    toml = write(
        tmp_path,
        '[models.a.cache]\nsize = "2MiB"\nkey = ["X-User"]\n[models.b]\ncache = {ttl = 5}\n',
    )
    settings, _ = load_settings({"models.b.cache": '{"size": 0}'}, {}, toml)
    assert settings.models["a"].cache == CacheConfig(2 << 20, 60.0, ("x-user",))
    assert settings.models["b"].cache == CacheConfig(size=0)
    assert settings.model_dump(mode="json")["models"]["b"]["cache"] == {
        "size": 0,
        "ttl": 60.0,
        "key": [],
    }


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            '[models.m.cache]\nsize = "big"',
            "models.m.cache cannot be {{'size': 'big'}} (from {toml})",
        ),
        ("[models.m]\nbatchsize = 1", "unknown setting 'batchsize' in [models.m] of {toml}; did"),
        ("[models.m]\nbatch_size = -1", "models.m.batch_size cannot be -1 (from {toml})"),
        ('[models.m]\ndevice = "tpu"', "models.m.device cannot be 'tpu' (from {toml})"),
        (
            "[models.m]\nbatch_buckets = [8, 0]",
            "models.m.batch_buckets cannot be [8, 0] (from {toml}) because of 0: it takes numbers",
        ),
        ("models = 1", "models in {toml} takes one table per model"),
        ("[models]\nm = 1", "models in {toml} takes one table per model"),
    ],
)
def test_a_wrong_model_setting_is_reported_with_its_model(
    tmp_path: Path, text: str, reason: str
) -> None:
    toml = write(tmp_path, text)
    assert load_error(toml=toml).startswith(reason.format(toml=toml))


def test_a_wrong_model_setting_on_the_command_line_is_reported() -> None:
    for cli, expected in (
        ({"models.m.worker": "1"}, "did you mean 'workers'?"),
        ({"models": {}}, "unknown setting 'models' in the command line"),
        ({"models.m": "1"}, "unknown setting 'models.m' in the command line"),
        ({"models.m.batch_buckets": "[0]"}, "because of 0: it takes numbers of requests"),
    ):
        assert expected in load_error(cli=cli)


@pytest.mark.parametrize("text", ["8,16", "[8, 16]"])
def test_a_list_on_the_command_line_is_json_or_comma_separated(text: str) -> None:
    settings, _ = load_settings({"models.m.batch_buckets": text}, {}, None)
    assert settings.models["m"].batch_buckets == [8, 16]


def test_settings_constructed_in_code_refuse_unknown_names() -> None:
    invalid_settings: dict[str, Any] = {"job_queue": 1}
    with pytest.raises(ValidationError, match="job_queue"):
        Settings(**invalid_settings)


def test_every_setting_has_a_description_and_accepted_values() -> None:
    for name, field in [*Settings.model_fields.items(), *ModelSettings.model_fields.items()]:
        assert field.description, name
        assert accepted(field), name


def test_suggestions_are_made_only_for_similar_names() -> None:
    assert suggestion("resnet", ["resnet18", "bert"]) == "; did you mean 'resnet18'?"
    assert suggestion("zzz", ["resnet18", "bert"]) == ""


def test_the_archive_size_limit_follows_the_machines_memory(tmp_path: Path) -> None:
    path = tmp_path / "constant.mar"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("handler.py", "")
        archive.writestr("weights.pt", bytes(70 << 20))
    assert Settings().archive_limits().ratio_floor == container_memory() // 2
    inspect_archive(path, limits=Settings().archive_limits())
    with pytest.raises(ArchiveTooLarge, match="Raise max_dense_archive_size"):
        inspect_archive(path, limits=Settings(max_dense_archive_size=1 << 20).archive_limits())


def test_the_archive_cache_obeys_its_limits(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path, max_cache_size="1KB", max_cache_age="12h")
    cache = Settings(cache_dir=tmp_path).archive_cache()
    now = time.time()

    def make(letter: str, size: int, age: float) -> Path:
        entry = cache.open(
            letter * 64, lambda files: {"data": (files / "data").write_bytes(bytes(size))}
        )
        entry.lock.close()
        os.utime(entry.files.parent / "complete.json", (now - age, now - age))
        return entry.files.parent

    kept_archive, excess_archive, old_archive = (
        make("a", 600, 0),
        make("b", 600, 3600),
        make("c", 1, 13 * 3600),
    )
    settings.archive_cache().clean()
    assert [entry.exists() for entry in (kept_archive, excess_archive, old_archive)] == [
        True,
        False,
        False,
    ]
    assert load_error({"max_cache_size": "much"}).startswith("max_cache_size")


def test_the_product_sets_no_removed_setting() -> None:
    root = Path(__file__).parents[3]
    folders = ("cli", "infra", "runtime", "templates")
    variables = {
        (path.name, name)
        for folder in folders
        for path in (root / folder).rglob("*")
        if path.suffix in {".py", ".j2", ".yaml", ".yml", ".toml", ".json", ".sh"}
        for name in re.findall(r"\bTSX_([A-Z_]+)", path.read_text(encoding="utf-8"))
    }
    assert not {(file, name) for file, name in variables if name.lower() in REMOVED}
