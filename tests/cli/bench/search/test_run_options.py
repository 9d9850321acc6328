"""Options that `tsx bench` refuses, and the configurations that the options select."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.support.models import make_model
from tsx_archiver import ModelConfig
from tsx_archiver.metadata.forms import FormRecord
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.results import Figure, Latency, OfferedLoad, Point, Trial
from tsx_cli.bench.report.journal import Journal, read_journal
from tsx_cli.bench.search.options import BenchOptions, configurations, seconds, share
from tsx_cli.bench.search.search import baseline
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.run_directory import NAME

HANDLER = "def handle(data, context):\n    return None if data is None else ['ok'] * len(data)\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("", "name an archive: tsx bench model.mar"),
        ("m.mar --slo fast", "'fast' is not a bound"),
        ("m.mar --batch-sizes 0..4", "--batch-sizes: '0..4' is not a number from 1"),
        ("m.mar --workers many", "--workers: 'many' is not a number from 1"),
        ("m.mar --threads 8..4", "--threads: '8..4' is not a number"),
        ("m.mar --devices tpu", "--devices: 'tpu' is not one of cpu, cuda"),
        ("m.mar --precision fp8", "--precision: 'fp8' is not one of fp32, fp16, bf16"),
        ("m.mar --compile yes", "--compile: 'yes' is not one of off, on"),
        ("m.mar --tolerance some", "--tolerance: 'some' is not a tolerance"),
        ("m.mar --tolerance exact --same-top 1", "--tolerance and --same-top"),
        (f"m.mar --batch-sizes {'9' * 5000}", "--batch-sizes: '999"),
        (f"m.mar --slo p99<{'9' * 400}ms", "is not a bound"),
        (f"m.mar --duration {'9' * 400}", "is not a time"),
        ("m.mar --duration 5m --input a.txt", "one round of 300 s is longer"),
        ("m.mar --content-type 'a\r\nb: c'", "--content-type: 'a"),
        ("m.mar --duration soon", "--duration: 'soon' is not a time; write 30s, 10m or 1h"),
        ("m.mar --time-limit 0s", "--time-limit: '0s' is not a time"),
        ("m.mar --confidence-width 200%", "--confidence-width: '200%' is not a share"),
        ("m.mar --rate 100", "--rate is for an open loop"),
        ("m.mar --mode open --connections 8", "--connections is for a closed loop"),
        ("m.mar --arrivals constant", "--arrivals is for an open loop"),
        ("m.mar --connections 1,two", "--connections: '1,two' is not a list of numbers above 0"),
        ("m.mar --connections 1.5", "--connections: '1.5' is not a list of numbers"),
        ("m.mar --mode ajar", "'ajar' is not one of"),
        ("m.mar --rounds 0", "--rounds"),
        ("m.mar", "m.mar has no samples"),
        ("flow.war", "is a workflow"),
        ("--resume here --slo 'p99<1s'", "leave --slo out"),
    ],
)
def test_invalid_options_are_refused(run: Run, options: str, problem: str) -> None:
    make_model(Path("m.mar"), HANDLER)
    Path("a.txt").write_text("a")
    Path("flow.war").write_bytes(b"")
    result = run("bench", *shlex.split(options))
    assert result.code == 2
    assert problem in result.err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("missing.mar", "there is no file 'missing.mar'"),
        ("m.mar --input missing.txt", "there is no input"),
        ("--resume missing", "cannot be read"),
        ("torn.mar --input a.txt", "Copy or download it again"),
    ],
)
def test_missing_and_damaged_files_are_reported(run: Run, options: str, problem: str) -> None:
    make_model(Path("m.mar"), HANDLER)
    Path("a.txt").write_text("a")
    Path("torn.mar").write_bytes(Path("m.mar").read_bytes()[:100])
    result = run("bench", *shlex.split(options))
    assert result.code == 1
    assert problem in result.err


def test_a_directory_that_holds_a_run_is_not_overwritten(run: Run) -> None:
    make_model(Path("m.mar"), HANDLER)
    Path("out").mkdir()
    Path("out", NAME).write_text("{}\n{}\n")
    assert "--resume out goes on with it" in run("bench", "m.mar", "-o", "out").err
    Path("out", NAME).write_text("{}\n")
    assert "--input FILE" in run("bench", "m.mar", "-o", "out").err


def test_two_runs_cannot_use_one_directory(tmp_path: Path) -> None:
    first = Journal(tmp_path, new=True)
    for new in (True, False):
        with pytest.raises(CliError, match="another run of tsx bench writes into"):
            Journal(tmp_path, new=new)
    first.close()
    Journal(tmp_path).close()


def test_a_journal_on_a_full_disk_ends_the_run(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with Path("/dev/full").open("a") as full:
        journal._file = full
        with pytest.raises(CliError, match=r"No space left on device.*tsx bench --resume"):
            journal.begin(BenchOptions(), Path("m.mar"), sha256=None)
        journal.close()


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="nothing else is read-only for root")
def test_an_unwritable_archive_is_reported_before_the_run(run: Run) -> None:
    assert (
        "--write: /proc/version cannot be written"
        in run("bench", "/proc/version", "--input-kind", "text", "--write").err
    )


@pytest.mark.slow
def test_the_options_select_every_configuration_of_the_available_devices() -> None:
    options = BenchOptions(
        batch_sizes="1..4", workers="1,2", precisions="fp32,bf16", compiled="off,on", threads="1"
    )
    space = configurations(options, ModelConfig(), 2, 0)
    assert len(space) == len(set(space)) == 3 * 2 * 2 * 2
    assert space[0] == Configuration("cpu", "fp32", False, 1, 1, 1)
    assert {
        configuration.workers
        for configuration in configurations(BenchOptions(), ModelConfig(), 6, 0)
    } == {1, 2, 4, 6}
    assert {
        configuration.device
        for configuration in configurations(BenchOptions(), ModelConfig(), 6, 1)
    } == {"cuda"}
    shares = {
        (configuration.workers, configuration.threads)
        for configuration in configurations(BenchOptions(workers="1..16"), ModelConfig(), 16, 0)
    }
    assert shares == {
        (1, None),
        (1, 1),
        (1, 4),
        (2, None),
        (2, 1),
        (2, 4),
        (4, None),
        (4, 1),
        (8, None),
        (8, 1),
        (16, None),
    }
    assert {
        configuration.threads
        for configuration in configurations(BenchOptions(), ModelConfig(threads=1), 16, 0)
    } == {None}, "the archive settles it"
    assert {
        configuration.threads
        for configuration in configurations(BenchOptions(), ModelConfig(), 16, 1)
    } == {None}
    assert {
        configuration.device
        for configuration in configurations(BenchOptions(), ModelConfig(device_type="cpu"), 6, 1)
    } == {"cpu"}
    assert {
        configuration.batch_size
        for configuration in configurations(BenchOptions(), ModelConfig(), 6, 0, batches=False)
    } == {1}
    too_many_values = ",".join(map(str, range(1, 300)))
    with pytest.raises(UsageError, match="178802 configurations, more than 20000"):
        configurations(
            BenchOptions(
                batch_sizes=too_many_values, workers=too_many_values, compiled="off,on", threads="1"
            ),
            ModelConfig(),
            6,
            0,
        )
    with pytest.raises(UsageError, match="no GPU is visible here"):
        configurations(BenchOptions(devices="cpu,cuda"), ModelConfig(), 6, 0)


KEPT_FORMS = [
    FormRecord("int8-static", {"device": "cpu"}),
    FormRecord("tensorrt", {"device": "cuda"}),
    FormRecord("bf16", {"device": "cpu"}),
]


def test_kept_forms_are_tried_in_addition_to_the_reference() -> None:
    def forms(
        records: Sequence[FormRecord] = KEPT_FORMS, **options: Any
    ) -> list[tuple[str | None, str]]:
        space = configurations(
            BenchOptions(workers="1", batch_sizes="1", threads="1", **options),
            ModelConfig(),
            2,
            0,
            records,
        )
        return [(configuration.form, configuration.precision) for configuration in space]

    as_it_is = ("reference", "as is")
    assert forms() == [as_it_is, ("int8-static", "as is"), ("bf16", "as is")], (
        "what was built for a GPU is not for this CPU"
    )
    assert forms(precisions="fp32,bf16") == [
        ("reference", "fp32"),
        ("reference", "bf16"),
        ("int8-static", "as is"),
        ("bf16", "as is"),
    ]
    assert forms(forms="reference") == [as_it_is]
    assert forms(forms="bf16, reference") == [as_it_is, ("bf16", "as is")]
    assert forms(forms="bf16") == [("bf16", "as is")]
    assert forms([]) == forms([], forms="reference") == [(None, "as is")]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"forms": "int4"}, "--forms: 'int4' is not one of reference, int8-static, tensorrt, bf16"),
        ({"forms": "tensorrt"}, "--forms: tensorrt was not built for cpu"),
        (
            {"forms": "bf16", "precisions": "fp16"},
            "--precision and --compile are for the reference",
        ),
    ]
    for options, problem in refused:
        with pytest.raises(UsageError, match=problem):
            forms(**options)
    with pytest.raises(UsageError, match="the archive keeps no forms"):
        forms([], forms="bf16")


def test_the_baseline_is_always_the_reference_with_one_worker() -> None:
    options = BenchOptions(workers="2", batch_sizes="4,8", threads="1", forms="bf16")
    space = configurations(options, ModelConfig(), 2, 0, KEPT_FORMS)
    assert baseline(space) == Configuration(threads=1, form="reference")
    assert str(baseline(space)) == "cpu, reference, 1 worker, 1 thread, batch 1"
    assert str(space[0]) == "cpu, bf16, 2 workers, 1 thread, batch 4"
    assert baseline([Configuration(workers=3, batch_size=8)]) == Configuration()


def test_durations_and_fractions_have_units() -> None:
    assert [seconds(text, "") for text in ("500ms", "90", "1.5 m", "2h")] == [0.5, 90, 90, 7200]
    assert [share(text, "") for text in ("5%", "0.05")] == [0.05, 0.05]


def test_a_journal_with_a_truncated_end_returns_its_entries(tmp_path: Path) -> None:
    options = BenchOptions(slo="p99<5ms", inputs=("a", "b"), loads=(1, 8))
    figure = Figure(value=1, low=1, high=1)
    points = [
        Point(
            offered=OfferedLoad(connections=n), throughput=figure, latency=Latency(), p99_ms=figure
        )
        for n in (1, 2)
    ]
    trial = Trial(
        configuration=Configuration(batch_size=4).as_json(),
        points=points,
        reason="a\u2028b\x85c\udcff",
    )
    journal = Journal(tmp_path)
    model = tmp_path / "m.mar"
    journal.begin(options, model, sha256=None, fingerprint="f", started="now")
    journal.write_trial(0, trial.model_copy(update={"state": "failed"}))
    journal.write_point(0, 0, points[1])
    journal.write_point(0, 0, points[0])
    journal.write_point(0, 1, points[1])
    journal.write_trial(0, trial)
    journal.close()
    path = tmp_path / NAME
    text = path.read_text()
    for truncated in (0, 7):
        path.write_text(text + text[:truncated])
        Journal(tmp_path).close()
        previous_run = read_journal(tmp_path)
        assert previous_run.trials == [trial]
        assert previous_run.arguments(tmp_path, BenchOptions) == (model, options)
    for damaged in (
        "",
        2 * (100_000 * "[" + "\n"),
        text.replace('"kind":"begin","format":1', '"kind":"begin","format":9'),
        text.replace('"at":0', '"at":"x"', 1),
    ):
        path.write_text(damaged)
        with pytest.raises(CliError, match="start a new run without --resume"):
            read_journal(tmp_path)
    path.write_bytes(b"\xff\n" + text.encode())
    with pytest.raises(CliError, match="line 1, is damaged"):
        read_journal(tmp_path)


def test_a_run_with_other_options_is_not_resumed(run: Run) -> None:
    Path("out").mkdir()
    for options in (
        {},
        {"model": "m.mar", "later": 1},
        {"model": "m.mar", "slo": 5},
        {"model": "m.mar", "batch_sizes": "x"},
    ):
        journal = Journal(Path("out"), new=True)
        entry = {"format": Journal.format, "asked": options, "sha256": None}
        journal.write("begin", **entry, fingerprint="f", started="now")
        journal.close()
        result = run("bench", "--resume", "out")
        assert result.code == 1
        assert "cannot be read" in result.err
