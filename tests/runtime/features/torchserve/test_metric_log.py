"""The lines of the metrics logs, which TorchServe's benchmark scripts split at colons."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.runtime.core.telemetry.test_metricsconfig import TYPICAL_FILE
from tests.support.batches import BATCH
from tests.support.logs import lines_of
from tsx_runtime.core.telemetry.metric_journal import BatchEntry, MetricJournal, ValueEntry
from tsx_runtime.core.telemetry.version_stats import HandlerMetric, Stats
from tsx_runtime.features.torchserve.feature import TorchServeFeature
from tsx_runtime.features.torchserve.metric_log import (
    ENTRIES_PER_TURN,
    MetricLog,
    _sanitize,
)
from tsx_runtime.metrics.host import System, SystemMetric, parse_lines
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.settings.schema import Settings

pytestmark = pytest.mark.anyio

VALUE = {"name": "A", "type": "gauge", "unit": "ms", "value": 1.0, "dimensions": {}}
SHAPE = re.compile(
    r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - (\w+)\.(\w*):([-0-9.e]+)\|#([^|]*)\|#"
    r"hostname:([^,]+),(?:requestID:([^:]*),)?timestamp:\d+$"
)


def log_of(server, counts=None):
    """Create a metrics log in the server's event loop."""
    counts, system = counts or ResponseCounts(), System(server.settings)
    return server.call(lambda: MetricLog(server.registry, counts, system))


def lines_by_metric(start_server, **settings):
    """Return the log of some requests, their ids, and the text of /metrics.

    The log maps each metric to (value as the scripts parse it, dimensions, request ids).
    """
    with lines_of("TS_METRICS", "MODEL_METRICS") as lines, start_server(**settings) as server:
        server.register("talker.mar", initial_workers=1)
        answers = [server.ask(x_do=action) for action in ("", "metrics", "raise")]
        ids = [answer.headers["x-request-id"] for answer in answers]
        server.inference.get("/nothing")
        counts = ResponseCounts()
        log = log_of(server, counts)
        counts.add(200)
        server.call(log.write)
        exposition = server.metrics.get("/metrics").text
    metrics: dict[str, list[tuple[float, str, str | None]]] = {}
    for line in lines:
        match = SHAPE.match(line)
        assert match, line
        # TorchServe's scripts parse the value in this way.
        value = float(line.split("|")[0].split(":")[3])
        assert value == float(match[3])
        metrics.setdefault(match[1], []).append((value, match[4], match[6]))
    return metrics, ids, exposition


@pytest.fixture(scope="module")
def log(start_server):
    return lines_by_metric(start_server, metrics_mode="log")


def test_each_batch_is_logged(log):
    metrics, _, _ = log
    for name in ("QueueTime", "WorkerThreadTime"):
        assert [dimensions for _, dimensions, _ in metrics[name]] == ["Level:Host"] * 3
        assert all(value >= 0 for value, _, _ in metrics[name])
    requests = metrics["ts_inference_requests_total"]
    assert requests == [(3, "model_name:talker,model_version:1.0", None)]
    latency, wait = (
        metrics[f"ts_{name}_latency_microseconds"][0][0] for name in ("inference", "queue")
    )
    assert latency > wait > 0
    assert (1, "Level:Host", None) in metrics["Requests2XX"]
    ((_, dimensions, _),) = metrics["WorkerLoadTime"]
    assert dimensions == "WorkerName:W-9000-talker_1.0,Level:Host"


def test_handler_metrics_name_the_requests_of_their_batch(log):
    metrics, ids, _ = log
    assert [request for _, _, request in metrics["PredictionTime"]] == ids
    assert metrics["Seen"] == [(2, "ModelName:talker,Level:Model", ids[1])]
    assert metrics["Took"] == [(3.5, "ModelName:talker,Level:Model", ids[1])]


def test_handler_text_cannot_change_the_line_format():
    assert _sanitize("Size") == "Size"
    assert _sanitize('a,b|c#d:e"\n\0\u2028') == 'a_b_c_d_e"___'


def test_system_metrics_are_logged_with_units(log):
    metrics, _, _ = log
    names = (
        "CPUUtilization MemoryUsed MemoryAvailable MemoryUtilization DiskUsage DiskAvailable "
        "DiskUtilization"
    )
    assert set(names.split()) <= set(metrics)


def test_a_configuration_selects_the_metrics(start_server, tmp_path):
    file = tmp_path / "metrics.yaml"
    file.write_text(TYPICAL_FILE)
    metrics, _, exposition = lines_by_metric(
        start_server, metrics_mode="legacy", metrics_config=file, model_metrics_auto_detect=False
    )
    assert set(metrics) == {"QueueTime", "Requests2XX", "Size"}
    # The handler's own counter of that name is not declared.
    assert metrics["Requests2XX"] == [(1, "Level:Host", None)]
    types = {line.split()[2] for line in exposition.splitlines() if line.startswith("# TYPE")}
    assert {"Requests2XX", "QueueTime", "Size", "tsx_workers"} <= types
    undeclared = "Seen Took PredictionTime WorkerThreadTime CPUUtilization"
    assert not {*undeclared.split(), "ts_inference_requests_total"} & types


def test_without_a_log_no_journal_is_kept(server):
    assert server.registry.find("talker").stats.journal is None


def test_a_histogram_has_torchserves_buckets():
    metric = HandlerMetric("histogram")
    for value in (0.004, 0.005, 0.3, 99):
        metric.add(value)
    assert metric.buckets[0] == 2
    assert metric.buckets[-1] == 1
    assert sum(metric.buckets) == metric.count == 4


def test_an_unread_journal_is_limited(monkeypatch):
    monkeypatch.setattr("tsx_runtime.core.telemetry.metric_journal.MAX_ENTRIES", 4)
    journal = MetricJournal()
    for number in range(3):
        journal.add_batch(BATCH, [b"%d" % number])
        journal.add_values([VALUE, VALUE], [b"%d" % number])
    entries = journal.take()
    assert [(type(entry), entry.request_ids) for entry in entries] == [
        (BatchEntry, b"0"),
        *[(ValueEntry, b"0")] * 2,
        (BatchEntry, b"1"),
    ]
    assert journal.take() == []
    assert Stats().journal is None


def test_writing_many_batches_yields_to_the_event_loop(start_server):
    """The lines keep the order of the batches; a server that stops writes the rest."""
    with lines_of("MODEL_METRICS") as lines, start_server(metrics_mode="log") as server:
        server.register("talker.mar", initial_workers=0)
        journal = server.registry.find("talker").stats.journal
        for number in range(10 * ENTRIES_PER_TURN):
            journal.add_batch(BATCH, [b"%d" % number])
        log = log_of(server)
        server.call(lambda: _interrupt_writing(log))
        assert 0 < len(journal) < 10 * ENTRIES_PER_TURN
        server.call(log.write)
    ids = [
        line.partition("requestID:")[2].partition(",")[0]
        for line in lines
        if "PredictionTime" in line
    ]
    assert ids == [str(number) for number in range(10 * ENTRIES_PER_TURN)]


async def _interrupt_writing(log: MetricLog) -> None:
    """Cancel a write after a few turns of the event loop."""
    write_task = asyncio.ensure_future(log.write())
    for _ in range(4):
        await asyncio.sleep(0)
    write_task.cancel()
    await asyncio.gather(write_task, return_exceptions=True)


def test_a_program_provides_the_system_metrics():
    lines = [
        "CPUUtilization.Percent:12.5|#Level:Host|#hostname:box,timestamp:1",
        "noise",
        "Broken.Percent:1.2.3|#Level:Host|#hostname:box",
        "GPUMemoryUsed.Megabytes:3e2|#Level:Host,DeviceId:1|#hostname:b",
    ]
    assert parse_lines("\n".join(lines)) == [
        SystemMetric("CPUUtilization", "Percent", 12.5),
        SystemMetric("GPUMemoryUsed", "Megabytes", 300.0, (("DeviceId", "1"),)),
    ]


@pytest.mark.usefixtures("processes")
async def test_a_user_program_replaces_the_system_measurement(tmp_path, until):
    program = tmp_path / "numbers.sh"
    line = "CPUUtilization.Percent:12.5|#Level:Host|#hostname:box,timestamp:1"
    program.write_text(f"echo '{line}'\necho 'Requests2XX.Count:9|#Level:Host|#hostname:b'\n")
    async with running_program(f"sh '{program}'") as system:
        assert system.read() == []
        await asyncio.to_thread(until, system.read)
    assert system.read()[0] == SystemMetric("CPUUtilization", "Percent", 12.5)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("command", ["/no/such/program", "false", "sh '"])
async def test_a_failing_program_is_reported_without_other_effects(command, caplog, until):
    async with running_program(command) as system:
        await asyncio.to_thread(until, lambda: "system_metrics_cmd" in caplog.text)
    assert system.read() == []


@pytest.mark.usefixtures("processes")
async def test_a_running_program_is_ended_when_the_server_stops(tmp_path, until):
    file = tmp_path / "pid"
    async with running_program(f"sh -c 'echo $$ > {file}; exec sleep 600'"):
        await asyncio.to_thread(until, lambda: file.exists() and file.read_text().strip())
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_start_times_of_removed_workers_are_dropped(start_server):
    with start_server(metrics_mode="log") as server:
        server.register("talker.mar", initial_workers=1)
        log = log_of(server)
        server.call(log.write)
        assert len(log._logged_starts) == 1
        server.call(lambda: server.registry.unregister("talker"))
        server.call(log.write)
        assert not log._logged_starts


def test_a_log_that_becomes_unwritable_is_reported(start_server, monkeypatch, caplog, until):
    def fail(self):
        raise ZeroDivisionError("no such number")

    monkeypatch.setattr(System, "read", fail)

    async def write(server) -> None:
        async with server.registry.feature(TorchServeFeature).running():
            await asyncio.to_thread(until, lambda: "metrics are no longer logged" in caplog.text)
            monkeypatch.undo()

    with start_server(metrics_mode="log") as server:
        server.call(lambda: write(server))
    assert "no such number" in caplog.text


@asynccontextmanager
async def running_program(command: str) -> AsyncIterator[System]:
    """Run a user program that measures the machine."""
    system = System(Settings(system_metrics_cmd=command))
    task = asyncio.ensure_future(system.follow())
    yield system
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_system_metrics_can_be_disabled(start_server):
    with start_server(disable_system_metrics=True) as server:
        text = server.metrics.get("/metrics").text
        assert "Requests2XX" in text
        assert "CPUUtilization" not in text
