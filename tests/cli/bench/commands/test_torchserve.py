"""TorchServe's auto-benchmark: its configuration files, its runs, and its report's columns."""

from __future__ import annotations

import csv
import shlex
from pathlib import Path

import pytest

from tests.support.benchmarked import one_round, point
from tests.support.models import make_model
from tsx_cli.bench.command import AGAINST, COMPARE, TORCHSERVE, replacing_module
from tsx_cli.bench.commands import torchserve_report as logs
from tsx_cli.bench.commands import torchserve_run as run
from tsx_cli.bench.commands.torchserve_plan import Case, read_plan
from tsx_cli.bench.commands.torchserve_report import csv_text, row
from tsx_cli.bench.load.results import Trial, read_results
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.main import main

MODEL_CONFIG = """
echo:
  eager_mode:
    benchmark_engine: "ab"
    url: "{url}"
    workers: [1]
    batch_delay: 5
    batch_size: [1, 4]
    input: "./input.txt"
    requests: 20
    concurrency: 2
    backend_profiling: False
    exec_env: "local"
    processors:
      - "cpu"
      - "gpus": "all"
"""
BENCHMARK_CONFIG = """
ts_version:
  release: "0.12.0"
models:
  - "echo.yaml"
hardware: &hardware "cpu"
metrics_cmd:
  - "cmd": "aws cloudwatch put-metric-data"
  - "--namespace": ["torchserve_benchmark_nightly_", *hardware]
"""
COLUMNS = (
    "Benchmark,TS failed requests,TS throughput,TS latency P50,TS latency P90,TS latency P99,TS latency mean,TS error rate,Batch size,"
    "Batch delay,Workers,Model,Concurrency,Input,Requests,Model_p50,Model_p90,Model_p99,Queue time p50,Queue time p90,Queue time p99,"
    "predict_mean,handler_time_mean,waiting_time_mean,worker_thread_mean,cpu_percentage_mean,memory_percentage_mean,gpu_percentage_mean,"
    "gpu_memory_percentage_mean,gpu_memory_used_mean"
)
HANDLER = """
import time

def handle(data, context):
    time.sleep(0.002)
    return [str(len(row.get("data") or row.get("body"))) for row in data or []]
"""


def write_plan(
    directory: Path, model: str = MODEL_CONFIG, top: str = BENCHMARK_CONFIG, url: str = "echo.mar"
) -> Path:
    """Write the auto-benchmark's files as in TorchServe's repository, and return the main one."""
    (directory / "models_config").mkdir(parents=True)
    (directory / "models_config" / "echo.yaml").write_text(model.format(url=url))
    (directory / "input.txt").write_text("some words")
    (directory / "benchmark_config.yaml").write_text(top)
    return directory / "benchmark_config.yaml"


def test_a_file_has_one_case_per_number_of_workers_and_batch_size(tmp_path: Path) -> None:
    plan = read_plan(write_plan(tmp_path))
    assert [case.name for case in plan.cases] == ["eager_mode_echo_w1_b1", "eager_mode_echo_w1_b4"]
    case = plan.cases[0]
    assert (case.batch_delay, case.requests, case.concurrency, case.device, case.served_as) == (
        5,
        20,
        2,
        "cpu",
        "benchmark",
    )
    assert case.input == tmp_path / "input.txt"
    assert [note.split(":")[0] for note in plan.notes] == ["ts_version", "metrics_cmd"]


def test_a_models_file_can_be_read_without_the_main_file(tmp_path: Path) -> None:
    top = write_plan(tmp_path, top=BENCHMARK_CONFIG.replace('"cpu"', '"gpu"'))
    assert {case.device for case in read_plan(top).cases} == {"cuda"}
    single_plan = read_plan(tmp_path / "models_config" / "echo.yaml")
    assert {case.device for case in single_plan.cases} == {"cpu"}
    assert not single_plan.notes


def test_keys_without_effect_are_reported_once(tmp_path: Path) -> None:
    model_text = (
        MODEL_CONFIG.replace("    exec_env: local", "")
        + '    docker_runtime: "nvidia"\n    backend_profiling: True\n'
    )
    plan = read_plan(write_plan(tmp_path, model=model_text, top=BENCHMARK_CONFIG + "colour: red\n"))
    assert [
        note
        for note in plan.notes
        if note.startswith(("docker_runtime", "backend_profiling", "colour"))
    ] == [
        "colour: tsx does not know this key",
        "backend_profiling: it has no effect",
        "docker_runtime: it has no effect",
    ]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("workers: [1]", "workers: [0]", "workers is \\[0\\]"),
        ("batch_size: [1, 4]", "batch_size: many", "batch_size is 'many'"),
        ("requests: 20", "requests: [1, 2]", "requests is \\[1, 2\\]"),
        ("./input.txt", "./absent.txt", "absent.txt does not exist"),
        ('url: "{url}"', "", "has no url of an archive"),
        ('"{url}"', "nlp.war", "contains no load"),
        ('"gpus": "all"', '"tpu"', "processors is"),
        (
            "benchmark_engine:",
            "content_type: [a]\n    benchmark_engine:",
            "content_type is \\['a'\\]",
        ),
        (
            "benchmark_engine:",
            "inference_model_url: v1/x\n    benchmark_engine:",
            "the URL of a model is predictions/NAME",
        ),
    ],
)
def test_an_invalid_file_is_reported_with_the_key(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    assert old in MODEL_CONFIG
    with pytest.raises(UsageError, match=problem):
        read_plan(write_plan(tmp_path, model=MODEL_CONFIG.replace(old, new)))


def test_missing_and_unreadable_files_are_reported(tmp_path: Path) -> None:
    top = write_plan(tmp_path, top=BENCHMARK_CONFIG.replace("echo.yaml", "bert.yaml"))
    with pytest.raises(CliError, match=r"bert\.yaml does not exist"):
        read_plan(top)
    for text, problem in (
        ("a: [", "is not valid YAML"),
        ("a: 2020-13-01", "is not valid YAML"),
        ("../../a:\n  b:\n    url: x", "must not contain a /"),
        ("- 1", "it must contain keys"),
        ("models: 3", "must be a list"),
        ("models: []\nhardware: neuron", "cpu and gpu"),
    ):
        top.write_text(text)
        with pytest.raises(UsageError, match=problem):
            read_plan(top)


def a_case(**changes: object) -> Case:
    case = Case(
        "mnist",
        "eager_mode",
        "https://h/mnist.mar",
        4,
        2,
        100,
        Path("0.png"),
        None,
        1000,
        10,
        "cpu",
        False,
        "benchmark",
    )
    return case._replace(**changes)  # type: ignore[arg-type]  # of its own fields


def test_the_ab_report_is_two_lines_with_torchserves_columns(tmp_path: Path) -> None:
    position = logs.log_position(tmp_path)
    lines = [
        f"2026-05-30T21:46:03,626 - QueueTime.Milliseconds:{value}|#Level:Host|#hostname:box,timestamp:1"
        for value in range(10)
    ]
    (tmp_path / "ts_metrics.log").write_text("\n".join(lines) + "\n")
    (tmp_path / "model_metrics.log").write_text(
        "2026-05-30T21:46:03,626 [INFO ] W-9000 TS_METRICS - PredictionTime.Milliseconds:2.5|#ModelName:mnist,Level:Model|#hostname:box\n"
        "2026-05-30T21:46:03,626 - ts_handler_inference.ms:1.5|#ModelName:mnist|#hostname:box\nnot one of them\n"
    )
    log_values = logs.values_since(position)
    columns = row(a_case(), point(10, [one_round(100, 10, 1, errors=10)]), log_values)
    text = csv_text(columns)
    assert text.splitlines()[0] == COLUMNS
    assert len(text.splitlines()) == 2
    values = next(csv.DictReader(text.splitlines()))
    assert (values["Benchmark"], values["Model"], values["Input"]) == (
        "AB",
        "[.mar](https://h/mnist.mar)",
        "[input](0.png)",
    )
    assert (values["TS failed requests"], values["Workers"], values["Batch size"]) == (
        "10",
        "4",
        "2",
    )
    assert float(values["TS error rate"]) == pytest.approx(1, abs=0.1)
    assert (values["Queue time p50"], values["Queue time p90"], values["waiting_time_mean"]) == (
        "5.0",
        "9.0",
        "4.5",
    )
    assert (values["Model_p99"], values["predict_mean"], values["gpu_percentage_mean"]) == (
        "2.5",
        "2.5",
        "0.0",
    )
    profiled_row = row(a_case(profiled=True), point(10, [one_round(100, 10, 1)]), log_values)
    assert list(profiled_row)[-3:] == [
        "handler_preprocess_mean",
        "handler_inference_mean",
        "handler_postprocess_mean",
    ]
    assert profiled_row["handler_inference_mean"] == 1.5


def test_only_new_lines_of_a_log_are_read(tmp_path: Path) -> None:
    line = "2026-05-30T21:46:03,626 - QueueTime.Milliseconds:{}|#Level:Host|#hostname:box\n"
    log = tmp_path / "ts_metrics.log"
    log.write_text(line.format(1) + line.format(2))
    position = logs.log_position(tmp_path)
    log.write_text(log.read_text() + line.format(3))
    assert logs.values_since(position) == {"QueueTime": [3.0]}
    log.write_text(line.format(7))
    assert logs.values_since(position) == {"QueueTime": [7.0]}, "the log was replaced"


def test_the_duration_of_a_load_follows_from_the_pilots_rate() -> None:
    assert [run.round_seconds(100, rate, max_s=60.0) for rate in (10.0, 1000.0, 0.5, 0.0)] == [
        10.0,
        1.0,
        60.0,
        60.0,
    ]


def test_the_arguments_decide_which_command_runs() -> None:
    assert replacing_module(["compare", "a", "b"]) == COMPARE
    assert replacing_module(["config.yaml", "--against", "http://h"]) == TORCHSERVE
    assert replacing_module(["--against", "http://h", "config.yml"]) == TORCHSERVE
    assert replacing_module(["--against=http://h", "config.yml"]) == TORCHSERVE
    assert replacing_module(["--against", "http://h", "--input", "body.yaml"]) == AGAINST
    assert replacing_module(["--torchserve-config=c"]) == TORCHSERVE
    assert replacing_module(["model.mar", "--slo", "p99<1s"]) is None
    assert replacing_module([]) is None


@pytest.mark.parametrize(
    ("inference", "management"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8081"),
        ("https://host:8443/up", "https://host:8444"),
        ("http://[::1]:80", "http://[::1]:81"),
        ("127.0.0.1:7000", "http://127.0.0.1:7001"),
    ],
)
def test_the_management_port_follows_the_inference_port(inference: str, management: str) -> None:
    assert run.management_of(inference) == management


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code", "problem"),
    [
        ("--token t", 2, "go with --against"),
        ("--certificate c", 2, "go with --against"),
        ("--against unix:/run/tsx.sock", 2, "give it with --management URL"),
        ("--against http://h --certificate c", 2, "is not an https address"),
        ("--against ftp://h", 2, "is not the address of a server"),
        ("--against http://h --logs gone", 1, "--logs: there is no directory 'gone'"),
        (
            "--against http://h --management-token @gone",
            1,
            "--management-token: gone cannot be read",
        ),
        ("--time-limit soon", 2, "--time-limit: 'soon' is not a time"),
        ("other.yaml", 2, "unexpected extra argument"),
    ],
)
def test_an_invalid_option_gets_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, code: int, problem: str
) -> None:
    assert main(["bench", str(write_plan(tmp_path)), *shlex.split(options)]) == code
    assert problem in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_a_run_with_the_finished_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure_case(case: Case, *_: object) -> run.CaseResult:
        if case.batch_size == 4:
            raise KeyboardInterrupt
        load_point = point(2, [one_round(100, 10, 1)])
        trial = Trial(configuration=case.configuration.as_json(), points=[load_point], best=0)
        return run.CaseResult(case, trial, row(case, load_point, {}))

    monkeypatch.setattr(run, "_measure_case", measure_case)
    assert main(["bench", str(write_plan(tmp_path)), "-o", str(tmp_path / "out")]) == 130
    assert (tmp_path / "out" / "eager_mode_echo_w1_b1" / "ab_report.csv").exists()
    assert not read_results(tmp_path / "out" / "eager_mode_echo" / "results.json").complete


@pytest.mark.usefixtures("processes")
def test_a_file_runs_against_its_own_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path / "echo.mar", HANDLER)
    absent = MODEL_CONFIG.replace("echo:", "gone:").replace("[1, 4]", "[1]")
    file = write_plan(
        tmp_path,
        url=str(tmp_path / "echo.mar"),
        model=MODEL_CONFIG.replace("[1, 4]", "[4]"),
        top=BENCHMARK_CONFIG.replace('"echo.yaml"', '"echo.yaml", gone.yaml'),
    )
    file.write_text(
        file.read_text().replace('  - "echo.yaml", gone.yaml', '  - "echo.yaml"\n  - gone.yaml')
    )
    (tmp_path / "models_config" / "gone.yaml").write_text(absent.format(url="gone.mar"))
    monkeypatch.setattr(run, "PILOT_S", 0.3)
    monkeypatch.setenv("TSX_WORKER_PRELOAD", "false")
    assert main(["bench", str(file), "-o", str(tmp_path / "out")]) == 1, (
        "one of the two has no archive"
    )
    output = capsys.readouterr()
    assert "1 of 2: eager_mode_echo_w1_b4" in output.err
    assert "gone.mar does not exist" in output.out
    values = next(
        csv.DictReader(
            (tmp_path / "out" / "eager_mode_echo_w1_b4" / "ab_report.csv").read_text().splitlines()
        )
    )
    assert (values["TS failed requests"], values["Concurrency"], values["Batch size"]) == (
        "0",
        "2",
        "4",
    )
    assert float(values["TS throughput"]) > 0
    figures = {
        column: float(values[column])
        for column in ("predict_mean", "Model_p50", "memory_percentage_mean")
    }
    assert figures["predict_mean"] >= 2, "from the server's own log"
    assert min(figures.values()) > 0
    assert "eager" in (tmp_path / "out" / "eager_mode_echo" / "report.md").read_text()
    results = read_results(tmp_path / "out" / "eager_mode_echo" / "results.json")
    assert results.winner == 0
    assert not (tmp_path / "out" / "eager_mode_gone_w1_b1").exists()
