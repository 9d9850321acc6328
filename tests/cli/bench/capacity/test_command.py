"""`tsx plan`: replicas, latency and cost from a measured curve."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tsx_archiver.metadata.slo import Slo, latency_target
from tsx_cli.bench.capacity import planning
from tsx_cli.bench.capacity.planning import CapacityPlan
from tsx_cli.bench.model.configuration import Configuration
from tsx_cli.bench.model.predict import Timing
from tsx_cli.bench.model.replica import Replica, fitted, resimulated, served
from tsx_cli.bench.model.results import (
    Curve,
    CurvePoint,
    Environment,
    Figure,
    GeneratorSide,
    Inputs,
    Latency,
    ModelInfo,
    Observation,
    OfferedLoad,
    Point,
    Results,
    Round,
    ServedBatches,
    Trial,
)
from tsx_cli.bench.model.simulate import poisson, simulate
from tsx_cli.bench.model.slo import parse_slo
from tsx_cli.bench.storage.archive_record import record_of, tells
from tsx_cli.main import main
from tsx_runtime.core.placement.hardware import hardware
from tsx_runtime.core.scheduling.queue import BatchLimits
from tsx_runtime.recordings import Recorded, encode, file_head

pytestmark = pytest.mark.slow


WON = Configuration(workers=2, batch_size=4)
TIMING = Timing((1, 2, 4, 8), (12.0, 14.0, 18.0, 26.0), None, 0.05)


@pytest.fixture(autouse=True)
def _fewer_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Are simulated than for a plan that somebody relies on."""
    monkeypatch.setattr(planning, "REQUESTS", 6000)


def replica(configuration: Configuration = WON, scale: float = 1.0, queue: int = 100) -> Replica:
    return Replica(TIMING, configuration, 8, BatchLimits(max_items=configuration.batch_size), queue, scale)


def plan(replica: Replica, rate: float, slo: Slo | None, headroom: float = 0.0, moments: Sequence[float] = ()) -> CapacityPlan | None:
    return planning.plan(replica, rate, slo, headroom=headroom, moments=moments)


@pytest.mark.parametrize("rate", [20, 300, 1500])
def test_one_replica_less_would_not_keep_the_bound(rate: float) -> None:
    slo = parse_slo("p99<50ms")
    found = plan(replica(), rate, slo)
    assert found is not None
    assert found.at.p99_ms <= 50
    assert found.at.refused == 0
    if found.replicas > 1:
        fewer = simulate(replica().times, poisson(rate / (found.replicas - 1), 6000), workers=2, slow=replica().slow(0), spread=0.05)
        assert fewer.p99_ms > 49


def test_more_workers_and_larger_batches_take_no_more_replicas() -> None:
    slo = parse_slo("p99<80ms")
    small = plan(replica(Configuration()), 400, slo)
    large = plan(replica(Configuration(workers=2, batch_size=8)), 400, slo)
    assert small is not None
    assert large is not None
    assert large.replicas < small.replicas


def test_headroom_is_kept_free() -> None:
    slo = parse_slo("p99<50ms")
    tight, easy = plan(replica(), 900, slo), plan(replica(), 900, slo, headroom=0.5)
    assert tight is not None
    assert easy is not None
    assert easy.replicas > tight.replicas
    assert easy.at.utilisation < tight.at.utilisation
    assert easy.at.p99_ms < easy.with_headroom.p99_ms <= 50


def test_without_bounds_the_queue_may_not_grow_without_end() -> None:
    found = plan(replica(), 1000, None)
    assert found is not None
    assert found.at.utilisation <= 0.95
    assert found.at.refused == 0


def test_a_bound_that_one_request_breaks_has_no_plan() -> None:
    assert plan(replica(), 5, parse_slo("p99<12ms")) is None


def test_bursts_of_a_recording_take_more_replicas_than_even_chance() -> None:
    """A hundred requests at once every second."""
    moments = [second + number * 1e-4 for second in range(60) for number in range(100)]
    slo = parse_slo("p99<60ms")
    even, bursts = plan(replica(), 100, slo), plan(replica(), 100, slo, moments=moments)
    assert even is not None
    assert bursts is not None
    assert bursts.replicas > 2 * even.replicas


CLOSED, BUSY, CALM = OfferedLoad(connections=12), OfferedLoad(mode="open", rate=330), OfferedLoad(mode="open", rate=90)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.6])
def test_how_much_slower_the_server_was_than_its_curve_is_learned(factor: float) -> None:
    slower = replica(scale=factor)
    assert fitted(replica(), [seen(slower, CLOSED)]).scale == pytest.approx(factor, rel=0.03)
    busy = seen(slower, OfferedLoad(mode="open", rate=250))
    assert fitted(replica(), [busy]).scale == pytest.approx(factor, rel=0.03)
    assert fitted(replica(), [busy.model_copy(update={"served": None})]).scale == 1, "its latency hangs on how requests happened to come"


def test_what_batches_take_longer_on_a_worker_that_idled_and_the_way_to_it_are_distinguished() -> None:
    server = replica(scale=1.1)._replace(cold_ms=2.5, wake_ms=1.2)
    found = fitted(replica(), [seen(server, each) for each in (CLOSED, BUSY, CALM)])
    assert found.scale == pytest.approx(1.1, rel=0.04)
    assert found.cold_ms == pytest.approx(2.5, abs=0.7)
    assert found.wake_ms == pytest.approx(1.2, abs=0.7)
    for offered in (OfferedLoad(mode="open", rate=150), OfferedLoad(mode="open", rate=250)):
        assert resimulated(found, seen(server, offered)).p50_ms == pytest.approx(
            resimulated(server, seen(server, offered)).p50_ms, rel=0.06
        )


def test_rounds_of_a_machine_that_is_now_quicker_and_now_slower_tell_a_range() -> None:
    found = fitted(replica(), [seen(replica(scale=factor), CLOSED) for factor in (0.95, 1.0, 1.1)])
    assert found.scale == pytest.approx(1.015, rel=0.03)
    assert found.drift == pytest.approx(0.074, rel=0.1)
    low, high = found.quickest_and_slowest
    assert (low.scale, high.scale) == pytest.approx((found.scale / 1.155, found.scale * 1.155), rel=0.03)
    reported = plan(found, 330, parse_slo("p99<60ms"))
    assert reported is not None
    assert reported.quickest.p99_ms < reported.at.p99_ms < reported.slowest.p99_ms
    assert reported.replicas_at_slowest is not None
    assert reported.replicas_at_slowest >= reported.replicas


def test_what_single_requests_took_tells_how_batches_differ() -> None:
    alone = [10.5] * 90 + [20.5] * 10
    found = fitted(replica(), [], alone, 0.5)
    assert sorted(set(found.extra_ms)) == [0.0, 10.0]
    assert found.overhead_ms == 0.5
    assert found.capacity == pytest.approx(replica().capacity * 18 / 19), "a batch of four takes 18 ms, and one in ten is held up for 10 ms"
    assert fitted(replica(), [], [0.1, 0.2], 0.5).extra_ms == (), "the way took longer than the whole"


def test_what_holds_up_batches_longer_under_load_is_learned_from_the_tail_of_requests_that_come_at_random(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "REQUESTS", 12_000)
    alone = [12.5] * 95 + [16.5] * 5
    server = replica()._replace(extra_ms=(0.0,) * 95 + (4.0,) * 5, crowded=8.0, overhead_ms=0.5)
    found = fitted(replica(), [seen(server, each) for each in (CLOSED, BUSY, CALM)], alone, 0.5)
    assert 5 < found.crowded < 13
    slo = parse_slo("p99<60ms")
    truth = planning.highest(server, slo)
    assert planning.highest(found, slo) == pytest.approx(truth, rel=0.15)
    assert planning.highest(found._replace(crowded=0.0), slo) > 1.15 * truth, "what medians alone would promise"


@pytest.mark.parametrize("bound", ["p99<30ms", "p99<60ms", None])
def test_the_highest_rate_keeps_the_bounds_and_a_little_more_does_not(bound: str | None) -> None:
    slo = parse_slo(bound) if bound else None
    most = planning.highest(replica(), slo)
    assert 0 < most < replica().capacity
    fits, exceeds = plan(replica(), most, slo), plan(replica(), 1.05 * most, slo)
    assert fits is not None
    assert exceeds is not None
    assert (fits.replicas, exceeds.replicas) == (1, 2)


def test_a_model_with_a_latency_target_is_planned_with_the_batches_and_refusals_of_its_server() -> None:
    slo = parse_slo("p99<60ms")
    small = replica(Configuration(batch_size=1))
    target = small.under(latency_target("p99<60ms"))
    overloaded = served(target, poisson(3 * planning.highest(target, slo), 8000, 2), 2)
    assert overloaded.p99_ms < 66, "what would be late is refused"
    assert overloaded.refused > 0.4 * 8000
    assert max(overloaded.batch_sizes) > 4
    assert planning.highest(target, slo) > 2 * planning.highest(small, slo)


def test_a_benchmark_without_answers_and_of_another_configuration_teaches_nothing() -> None:
    nothing = Observation(workers=2, batch_size=4, offered=OfferedLoad(), throughput=0, p50_ms=0, p99_ms=0)
    other = seen(replica(Configuration(workers=1, batch_size=4)), CLOSED)
    assert fitted(replica(), [nothing, other]) == replica()


def test_an_open_loop_whose_generator_had_no_time_left_teaches_nothing_of_the_server() -> None:
    busy = Round(seconds=1, sent=9, ok=9, throughput=9, latency=Latency(), generator=GeneratorSide(cpu=0.6, starved=0.4))
    idle = busy.model_copy(update={"generator": GeneratorSide(cpu=0.3)})
    assert [tells(BUSY, busy), tells(BUSY, idle), tells(CLOSED, busy)] == [False, True, True]


def seen(server: Replica, offered: OfferedLoad) -> Observation:
    """A round on a server that is as this says."""
    if offered.mode == "open":
        reported = served(server, poisson(offered.rate or 0.0, 8000, seed=4), seed=4)
    else:
        reported = served(server, range(8000), seed=4, connections=offered.connections)
    how = server.configuration
    return Observation(
        workers=how.workers,
        batch_size=how.batch_size,
        offered=offered,
        throughput=reported.throughput,
        p50_ms=reported.p50_ms,
        p99_ms=reported.p99_ms,
        served=ServedBatches(batch_ms=reported.batch_ms, batches=reported.batch_sizes),
    )


def results(fingerprint: str = "another") -> Results:
    sizes, times = TIMING.sizes, TIMING.times
    points = [
        CurvePoint(batch_size=size, median_ms=time, low_ms=time, high_ms=time, samples=9) for size, time in zip(sizes, times, strict=True)
    ]
    figure, p99 = Figure(value=410, low=400, high=420), Figure(value=45, low=44, high=46)
    point = Point(offered=OfferedLoad(connections=12), throughput=figure, latency=Latency(p50_ms=28, p99_ms=45), p99_ms=p99)
    return Results(
        started="2026-11-21T10:00:00+00:00",
        model=ModelInfo(name="digits"),
        environment=Environment(fingerprint=fingerprint, cpu="Abacus 9", cores=2),
        inputs=Inputs(source="a.png", count=1),
        slo="p99<50ms",
        curves=[Curve(points=points, spread=0.05)],
        trials=[Trial(configuration=WON.as_json(), points=[point], best=0)],
        winner=0,
    )


@pytest.fixture
def results_file(tmp_path: Path) -> Path:
    file = tmp_path / "results.json"
    file.write_text(results().model_dump_json())
    return file


def test_a_plan_tells_replicas_latency_and_cost(results_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--rps", "900", "--results", str(results_file), "--price-per-hour", "0.5", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["slo"] == "p99<50ms"  # the benchmark's own
    assert reported["describes"] == str(WON)
    assert reported["replicas"] >= 3
    assert reported["p50_ms"] < reported["p99_ms"] <= 50
    assert reported["cost_per_million"] == pytest.approx(0.5 * reported["replicas"] / (900 * 3600) * 1e6, rel=1e-4)
    assert reported["p99_range_ms"][0] <= reported["p99_ms"] <= reported["p99_range_ms"][1]
    assert reported["replicas_at_slowest"] >= reported["replicas"]
    measured = {name: reported["measured"][name] for name in ("date", "on", "here")}
    assert measured == {"date": "2026-11-21T10:00:00+00:00", "on": "2 cores of Abacus 9", "here": False}
    assert reported["measured"]["batches_from"] < 1 < reported["measured"]["batches_to"]


def test_a_plan_for_people_says_where_its_curve_is_from(results_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--rps", "300", "--slo", "p99<70ms", "--workers", "1", "--batch-size", "8", "--headroom", "20%"]
    assert main([*command, "--results", str(results_file)]) == 0
    reported = capsys.readouterr().out
    assert "300 requests/s under p99<70ms" in reported
    assert "cpu, 1 worker, batch 8" in reported
    assert re.search(r"p99 with the headroom used up +\d+\.\d ms", reported)
    assert (
        "measured 2026-11-21 on 2 cores of Abacus 9. This machine is different: the figures are for machines like the measured one."
        in reported
    )
    assert re.search(r"latency p99 +\d+\.\d ms \(\d+\.\d ms to \d+\.\d ms\)", reported)
    assert "leave no core" not in reported
    results_file.write_text(results(hardware().fingerprint).model_dump_json())
    assert main([*command, "--results", str(results_file)]) == 0
    assert "This machine is different: the figures are for machines like the measured one." not in capsys.readouterr().out
    assert main(["plan", "--rps", "480", "--slo", "p99<40ms", "--results", str(results_file)]) == 0
    reported = capsys.readouterr().out
    assert "Its workers leave no core for the server itself" in reported


def test_what_the_archive_keeps_is_planned_from_with_its_own_queue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = archive(tmp_path, "jobQueueSize: 3\n")
    (directory / "tsx-bench.json").write_bytes(record_of(results()).content())
    assert main(["plan", str(directory), "--rps", "400", "--slo", "p99<500ms,errors<50%", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["refused"] > 0


def test_batches_that_a_plugin_decides_on_are_not_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = archive(tmp_path, "batchPolicy: greedy\n")
    (directory / "tsx-bench.json").write_bytes(record_of(results()).content())
    assert main(["plan", str(directory), "--rps", "40"]) == 1
    assert "batchPolicy: greedy is a plugin" in capsys.readouterr().err


def test_an_archive_that_was_never_measured_is_reported_how_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = archive(tmp_path, "batchSize: 2\n")
    assert main(["plan", str(directory), "--rps", "5"]) == 1
    assert "--write` measures it" in capsys.readouterr().err
    one = results()
    one.curves = []
    (directory / "tsx-bench.json").write_bytes(record_of(one).content())
    assert main(["plan", str(directory), "--rps", "5"]) == 1
    assert "was measured in one configuration, which gives no times by batch size" in capsys.readouterr().err


@pytest.mark.parametrize("threads", [1, 2])
def test_without_the_winners_own_curve_that_of_other_threads_is_planned_from(tmp_path: Path, threads: int) -> None:
    found = results()
    found.curves = [curve.model_copy(update={"threads": threads}) for curve in found.curves]
    (tmp_path / "results.json").write_text(found.model_dump_json())
    assert main(["plan", "--rps", "20", "--results", str(tmp_path / "results.json")]) == 0


def test_a_plan_without_a_curve_names_the_command_that_measures_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = results()
    found.curves = [curve.model_copy(update={"precision": "bf16"}) for curve in found.curves]
    (tmp_path / "results.json").write_text(found.model_dump_json())
    assert main(["plan", "--rps", "20", "--results", str(tmp_path / "results.json")]) == 1
    said = capsys.readouterr().err.strip()
    assert said.endswith("measures one: tsx bench digits.mar --devices=cpu --workers=2 --batch-sizes=1..4 --write")


def test_a_recording_has_its_own_rate(results_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.tsxrec"
    file.write_bytes(file_head("digits") + b"".join(encode(Recorded(number / 50, "1.0", "", (), b"")) for number in range(200)))
    assert main(["plan", "--recording", str(file), "--results", str(results_file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rps"] == pytest.approx(50)
    file.write_bytes(file_head("digits"))
    assert main(["plan", "--recording", str(file), "--results", str(results_file)]) == 1
    assert "too few requests" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ([], 2, "name an archive"),
        (["--results", "FILE"], 2, "--rps 300"),
        (["--results", "FILE", "--rps", "0"], 2, "--rps"),
        (["--results", "FILE", "--rps", "nan"], 2, "--rps"),
        (["--results", "FILE", "--rps", "5", "--price-per-hour", "inf"], 2, "--price-per-hour: inf is not a number"),
        (["--results", "FILE", "--rps", "5", "--headroom", "much"], 2, "--headroom"),
        (["--results", "FILE", "--rps", "5", "--headroom", "-5%"], 2, "--headroom"),
        (["--results", "FILE", "--rps", "5", "--slo", "fast"], 2, "--slo"),
        (["--results", "FILE", "--rps", "5", "--slo", "p99<2ms"], 1, "no number of replicas"),
        (["--results", "FILE", "--rps", "5", "--recording", "nowhere.tsxrec"], 1, "nowhere.tsxrec"),
        (["--results", "nowhere.json", "--rps", "5"], 1, "nowhere.json"),
        (["nowhere.mar", "--rps", "5"], 1, "nowhere.mar"),
        (["--results", "FILE", "--rps", "5", "--workers", "0"], 2, "--workers"),
    ],
)
def test_what_cannot_be_planned_is_reported(
    results_file: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, words: str
) -> None:
    assert main(["plan", *[str(results_file) if word == "FILE" else word for word in options]]) == code
    assert words in capsys.readouterr().err


def test_results_without_a_winner_are_reported(results_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results_file.write_text(results().model_copy(update={"winner": None}).model_dump_json())
    assert main(["plan", "--rps", "5", "--results", str(results_file)]) == 1
    assert "no winner" in capsys.readouterr().err


def archive(tmp_path: Path, config: str) -> Path:
    """An unpacked archive, which is as good as one."""
    directory = tmp_path / "digits"
    (directory / "MAR-INF").mkdir(parents=True)
    (directory / "handler.py").write_text("def handle(data, context):\n    return data\n")
    (directory / "model-config.yaml").write_text(config)
    model = {"modelName": "digits", "modelVersion": "1.0", "handler": "handler.py", "configFile": "model-config.yaml"}
    (directory / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"model": model}))
    return directory


def test_the_target_of_an_archive_is_the_bound_of_its_plan(results_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", str(archive(tmp_path, "slo: p99<60ms\n")), "--results", str(results_file), "--rps", "900", "--json"]
    assert main(command) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["slo"], reported["describes"]) == ("p99<60ms", "cpu, 2 workers, slo p99<60ms")
    assert reported["p99_ms"] <= 60
    assert reported["refused"] <= 0.01
    assert 900 / reported["replicas"] <= reported["most_rps_per_replica"]
    assert main([*command, "--batch-size", "4"]) == 0
    fixed = json.loads(capsys.readouterr().out)
    assert (fixed["slo"], fixed["describes"]) == ("p99<50ms", str(WON)), "without it, as it was measured"
    assert fixed["most_rps_per_replica"] < reported["most_rps_per_replica"]


def test_requests_leave_fewer_cores_to_the_workers() -> None:
    tight = replica()._replace(cores=2, overhead_ms=1.0)
    assert tight.slow(0)[2] == 1
    assert tight.slow(400)[2] == pytest.approx(2 / 1.6)
    assert tight.slow(1e6)[2] == 2
