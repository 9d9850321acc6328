"""`/metrics`, parsed as Prometheus parses it."""

from __future__ import annotations

import asyncio
import errno
import math
from io import StringIO
from types import SimpleNamespace

import psutil
import pytest
from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.openmetrics.parser import text_fd_to_metric_families
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.jobs import FakeJob
from tests.kit.management import describe
from tests.support.batches import count
from tsx_runtime.core.telemetry.batch_times import NAN, times_of
from tsx_runtime.core.telemetry.version_stats import MAX_LABEL_SETS, MAX_METRICS, Stats
from tsx_runtime.core.workers.instance import ResourceUsage
from tsx_runtime.metrics import collection
from tsx_runtime.metrics.collection import Reading, fill, fill_handler_metrics
from tsx_runtime.metrics.exposition import PIECE_SAMPLES, Families, in_turns
from tsx_runtime.metrics.gpu import Gpu
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.wire import TIMES

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def samples_of(text):
    """Return all samples by their written names: [(labels, value)]."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # The parser adds _total to the names of counters.
            name = sample.name
            if name.endswith("_total") and f"\n{name}{{" not in text:
                name = name.removesuffix("_total")
            samples.setdefault(name, []).append((sample.labels, sample.value))
    return samples


def by_label(samples, name, label, **labels):
    """Return the values of a metric by one label; `labels` fixes the values of other labels."""
    return {
        series[label]: value for series, value in samples[name] if labels.items() <= series.items()
    }


def reading_of(stats, gpus=None, **version):
    """Return the metrics reading of a server with one model."""
    model = SimpleNamespace(versions={"1": version_with(stats, **version)})
    return Reading("host", [model], ResponseCounts(), [], gpus or {})


def families_of(reading):
    families = Families()
    list(fill(families, reading))
    list(fill_handler_metrics(families, reading))
    return families


def text_of(reading):
    return b"".join(families_of(reading).text()).decode()


def handler_samples(*metrics):
    """Return the samples of a server whose model has reported these metrics."""
    stats = Stats()
    stats.add_handler_metrics(list(metrics))
    return samples_of(text_of(reading_of(stats)))


@pytest.fixture(scope="module")
def scrape(start_server):
    """Scrape the metrics of a server after some known requests."""
    with start_server() as server:
        server.register("talker.mar", initial_workers=1)
        server.register("talker2.mar", initial_workers=0)
        for action in ("", "", "", "metrics", "metrics", "raise"):
            server.ask(x_do=action)
        server.ask(path="/predictions/nobody")
        server.ask(path="/predictions/talker/2.0")
        answer = server.metrics.get("/metrics")
        names = {"name[]": ["Requests2XX", "tsx_batch_size_bucket"]}
        filtered = server.metrics.get("/metrics", params=names)
        again = server.metrics.get("/metrics")
        accept = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
        openmetrics = server.metrics.get("/metrics", headers=accept)
    return SimpleNamespace(
        answer=answer,
        samples=samples_of(answer.text),
        filtered=filtered,
        again=samples_of(again.text),
        openmetrics=openmetrics,
    )


def value_of(scrape, name, **labels):
    (value,) = [value for series, value in scrape.samples[name] if labels.items() <= series.items()]
    return value


def test_the_content_type_is_prometheus_text(scrape):
    content_type = "text/plain; version=0.0.4; charset=utf-8"
    assert scrape.answer.headers["content-type"] == content_type
    # Each scrape counts as an answer, and there were two since then.
    assert scrape.again["Requests2XX"][0][1] == 7


V1, V2 = {"model_version": "1.0"}, {"model_version": "2.0"}
TALKER = {"ModelName": "talker"}


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("Requests2XX", {"Level": "Host"}, 5),
        ("Requests4XX", {"Level": "Host"}, 1),
        ("Requests5XX", {"Level": "Host"}, 2),
        ("ts_inference_requests_total", {"model_name": "talker", **V1}, 6),
        ("ts_inference_requests_total", {"model_name": "talker", **V2}, 0),
        ("tsx_answers_total", {"status": "200"}, 5),
        ("tsx_answers_total", {"status": "500"}, 1),
        ("tsx_refusals_total", {"reason": "NoWorker", **V2}, 1),
        ("tsx_queue_depth", V1, 0),
        ("tsx_worker_restarts_total", V1, 0),
        ("tsx_workers", {**V1, "state": "READY"}, 1),
        ("tsx_workers", {**V1, "state": "BACKING_OFF"}, 0),
        ("tsx_batch_size_sum", V1, 6),
        ("tsx_batch_size_bucket", {**V1, "le": "1.0"}, 6),
        ("tsx_requests_in_flight", V1, 0),
        ("tsx_queue_capacity", V1, 100),
        ("tsx_errors_total", V1, 1),
        ("tsx_errors_total", V2, 1),
        ("tsx_traffic_share", V1, 1),
        ("tsx_traffic_share", V2, 0),
        # The handler is a function, which has no preprocessing.
        ("tsx_preprocess_seconds_count", V1, 0),
        ("Seen", {**TALKER, "Level": "Model", "ModelVersion": "1.0"}, 4),
        ("Took", TALKER, 3.5),
        ("Size_count", TALKER, 2),
        ("Size_sum", TALKER, 8),
        ("model_Requests2XX", TALKER, 2),
    ],
)
def test_requests_workers_and_handler_metrics_are_exported(scrape, name, labels, value):
    assert value_of(scrape, name, **labels) == value


@pytest.mark.parametrize(
    ("name", "labels", "minimum"),
    [
        ("QueueTime", TALKER, 0),
        ("WorkerThreadTime", TALKER, 0),
        ("WorkerLoadTime", {"WorkerName": "W-9000-talker_1.0", "Level": "Host"}, 0),
        ("tsx_worker_memory_bytes", {"worker": "9000"}, 1 << 20),
        ("tsx_worker_open_fds", {"worker": "9000"}, 3),
        ("tsx_worker_cpu_seconds_total", {"worker": "9000"}, 0),
        ("process_resident_memory_bytes", {}, 1 << 20),
        ("process_open_fds", {}, 3),
        ("process_cpu_seconds_total", {}, 0),
        *(
            (name, {"Level": "Host"}, -1)
            for name in collection.SYSTEM
            if not name.startswith("GPU")
        ),
    ],
)
def test_times_and_resources_are_exported(scrape, name, labels, minimum):
    assert value_of(scrape, name, **labels) > minimum


def test_counters_keep_torchserves_names(scrape):
    for name in ("Requests2XX", "ts_inference_latency_microseconds", "ts_inference_requests_total"):
        assert f"# TYPE {name} counter\n{name}{{" in scrape.answer.text
    assert "_total_total" not in scrape.answer.text


def test_each_name_is_declared_once(scrape):
    lines = scrape.answer.text.splitlines()
    types = [line for line in lines if line.startswith("# TYPE")]
    series = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    for names in (types, series):
        assert len(set(names)) == len(names)


def test_a_request_takes_longer_than_its_queue_time(scrape):
    latency = value_of(scrape, "ts_inference_latency_microseconds", **V1)
    assert latency > value_of(scrape, "ts_queue_latency_microseconds", **V1) > 0


@pytest.mark.parametrize("name", ["request", "queue", "batch_wait", "inference"])
def test_times_are_histograms_by_version(scrape, name):
    assert value_of(scrape, f"tsx_{name}_seconds_count", **V1) == 6
    buckets = by_label(scrape.samples, f"tsx_{name}_seconds_bucket", "le", **V1)
    rows = [(float(upper_bound), count) for upper_bound, count in buckets.items()]
    assert rows == sorted(rows)
    assert rows[-1] == (math.inf, 6)
    assert value_of(scrape, f"tsx_{name}_seconds_count", **V2) == 0


def test_the_stages_of_a_request_do_not_exceed_its_total(scrape):
    request, *parts = (
        value_of(scrape, f"tsx_{name}_seconds_sum", **V1)
        for name in ("request", "queue", "batch_wait", "inference")
    )
    # Each batch had one request.
    assert 0 < sum(parts) <= request
    latency = value_of(scrape, "ts_inference_latency_microseconds", **V1)
    assert request == pytest.approx(latency / 1e6)


def test_metrics_can_be_filtered_by_name(scrape):
    lines = scrape.filtered.text.splitlines()
    types = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert types == {"Requests2XX", "tsx_batch_size"}


def test_gpus_export_the_figures_that_they_report():
    gpus = {
        0: Gpu("0", "GPU-1", 37, 12, 500, 2000, {11: 5, 12: 7, 99: 1}),
        1: Gpu("1", "GPU-2", None, None, None, None),
    }
    worker = SimpleNamespace(id="9000", state=None, load_seconds=None)
    usage = {"9000": ResourceUsage((11, 12), 1000, 2.5, 30)}
    reading = reading_of(Stats(), gpus, workers=[worker])._replace(usage=usage)
    samples = samples_of(text_of(reading))
    labels = {"Level": "Host", "Hostname": "host", "DeviceId": "0"}
    assert samples["GPUUtilization"] == [(labels, 37)]
    assert samples["GPUMemoryUsed"] == [(labels, 500)]
    assert samples["GPUMemoryUtilization"] == [(labels, 25)]
    labels = {"hostname": "host", "gpu": "0", "uuid": "GPU-1"}
    assert samples["tsx_gpu_memory_used_bytes"] == [(labels, 500 << 20)]
    assert samples["tsx_gpu_memory_total_bytes"] == [(labels, 2000 << 20)]
    assert samples["tsx_gpu_utilization_ratio"] == [(labels, 0.37)]
    [(labels, memory)] = samples["tsx_worker_gpu_memory_bytes"]
    assert (labels["worker"], labels["gpu"], memory) == ("9000", "0", 12)
    assert [value for _, value in samples["tsx_worker_memory_bytes"]] == [1000]


def test_openmetrics_has_the_same_samples_and_exemplars():
    stats = Stats()
    count(stats, (10.0, 10.0, 12.0), [FakeJob(arrived=9.98)], TIMES.pack(10.0, 2.0, NAN, 2.0, NAN))
    assert stats.newest is not None
    stats.add_exemplar(TRACE, 9.98, times_of(stats.newest))
    stats.add_handler_metrics([delta("Seen"), delta("tsx_queue_depth_total")])
    reading = reading_of(stats)
    text = text_of(reading)
    openmetrics = b"".join(families_of(reading).openmetrics()).decode()
    exemplars = {
        sample.name: sample
        for family in text_fd_to_metric_families(StringIO(openmetrics))
        for sample in family.samples
        if sample.exemplar
    }
    parts = ("request", "queue", "batch_wait", "inference")
    assert set(exemplars) == {f"tsx_{part}_seconds_bucket" for part in parts}
    bucket = exemplars["tsx_request_seconds_bucket"]
    assert bucket.labels["le"] == "2.5"
    assert bucket.exemplar.labels == {"trace_id": TRACE}
    assert bucket.exemplar.value == pytest.approx(2.02)
    assert TRACE not in text

    def series(lines):
        return {line.partition(" # ")[0].rpartition(" ")[0] for line in lines if line[:1] != "#"}

    assert series(text.splitlines()) == series(openmetrics.splitlines())


def test_openmetrics_is_sent_if_the_client_accepts_it(scrape):
    content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert scrape.openmetrics.headers["content-type"] == content_type
    families = text_fd_to_metric_families(StringIO(scrape.openmetrics.text))
    types_by_name = {family.name: family.type for family in families}
    assert types_by_name["ts_inference_requests"] == "counter"
    # OpenMetrics counters end with _total; TorchServe's name does not.
    assert types_by_name["Requests2XX"] == "unknown"


def test_batches_beyond_the_last_bucket_are_counted():
    stats = Stats()
    for size in (3, 1000):
        count(stats, (1.0, 1.0, 2.0), [FakeJob(arrived=0.5)] * size)
    buckets = by_label(samples_of(text_of(reading_of(stats))), "tsx_batch_size_bucket", "le")
    assert [buckets[upper_bound] for upper_bound in ("2.0", "4.0", "512.0", "+Inf")] == [0, 1, 1, 2]


def test_invalid_unicode_does_not_lose_other_metrics():
    name = b"caf\xe9.jpg".decode("utf-8", "surrogateescape")
    samples = handler_samples(delta("Read", File=name) | {"unit": name})
    assert samples["Read"] == [({"File": "caf?.jpg", "Hostname": "host", "ModelVersion": "1"}, 1)]
    assert "Requests2XX" in samples


def test_handler_names_and_labels_cannot_forge_lines():
    text = 'a"b\\c\nd{}#,=`%\x00\u2028'
    samples = handler_samples(delta(f"Read{text}", **{f"File{text}": text}) | {"unit": text})
    ((labels, _),) = samples["Reada_b_c_d_________"]
    assert labels["Filea_b_c_d_________"] == text


def test_recycled_workers_are_counted_by_reason_and_not_as_restarts(start_server, until):
    def recycles():
        samples = samples_of(server.metrics.get("/metrics").text)
        assert samples["tsx_worker_restarts_total"][0][1] == 0
        stuck_workers = by_label(samples, "tsx_worker_stuck_total", "reason")
        assert stuck_workers == {"stopped": 0, "silent": 0}
        counts = by_label(samples, "tsx_worker_recycles_total", "reason")
        assert counts["requests"] == counts["memory"] == 0
        return counts["age"]

    with start_server(max_worker_age=1) as server:
        server.register("talker.mar", initial_workers=1)
        until(recycles)
        model = describe(server)
        assert (model["maxWorkerAge"], model["workerRestarts"]) == (1, 0)
        assert model["workerRecycles"]["age"] >= 1
        assert "maxWorkerMemory" not in model


@pytest.mark.slow
def test_excess_labels_are_dropped_counted_and_warned_of_once(caplog):
    stats = Stats('Model "m" [Version 1]')
    for number in range(MAX_LABEL_SETS + 5):
        stats.add_handler_metrics(
            [delta("Seen", request=str(number)), delta("Seen", request="0"), delta("Other")]
        )
    for number in range(MAX_METRICS):
        stats.add_handler_metrics([delta(f"of_{number}")])
    samples = samples_of(text_of(reading_of(stats)))
    assert len(samples["Seen"]) == MAX_LABEL_SETS
    assert samples["Other"][0][1] == MAX_LABEL_SETS + 5
    assert by_label(samples, "Seen", "request")["0"] == MAX_LABEL_SETS + 6
    drops = by_label(samples, "tsx_handler_metric_drops_total", "metric")
    assert drops == {"Seen": 5, "": 2}
    labels, names = (record.getMessage() for record in caplog.records)
    assert 'Model "m" [Version 1]' in labels
    assert "Seen with more than 1000 sets of labels" in labels
    assert "more than 1000 metrics" in names


def test_metrics_of_many_models_are_written_in_pieces():
    stats = Stats()
    for number in range(3 * PIECE_SAMPLES):
        stats.add_handler_metrics([delta("Seen", request=str(number)), delta("Grew")])
    models = [
        SimpleNamespace(versions={"1": version_with(stats, name=f"m{number}")})
        for number in range(4)
    ]
    families = Families()
    reading = Reading("host", models, ResponseCounts(), [], {})
    steps = [*fill(families, reading), *fill_handler_metrics(families, reading)]
    assert len(steps) > 4 + 4 * 3
    for pieces in (list(families.text()), list(families.openmetrics())):
        assert all(piece.count(b"\n") <= PIECE_SAMPLES + 2 for piece in pieces)
        heads = [line for line in b"".join(pieces).splitlines() if line.startswith(b"#")]
        assert len(set(heads)) == len(heads)
    text = b"".join(families.text()).decode()
    assert len(samples_of(text)["Seen"]) == 4 * 3 * PIECE_SAMPLES
    samples = {line for line in text.splitlines() if not line.startswith("#")}
    assert samples <= set(generate_latest(families).decode().splitlines())


def test_writing_metrics_yields_to_the_event_loop_after_each_piece():
    turns = []

    async def count_turns():
        while True:
            turns.append(len(turns))
            await asyncio.sleep(0)

    async def main():
        counter_task = asyncio.create_task(count_turns())
        assert await in_turns(iter(range(5))) == [0, 1, 2, 3, 4]
        counter_task.cancel()

    asyncio.run(main())
    assert len(turns) >= 4


def test_metrics_are_served_even_without_free_descriptors(start_server, monkeypatch):
    def no_descriptor(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    with start_server() as server:
        with monkeypatch.context() as broken:
            broken.setattr(psutil, "virtual_memory", no_descriptor)
            broken.setattr(ProcessCollector, "collect", lambda _: [])
            answer = server.metrics.get("/metrics")
        assert answer.status_code == 200
        samples = samples_of(answer.text)
        assert samples["process_open_fds"] == samples["process_max_fds"]
        assert "MemoryUsed" not in samples
        assert "MemoryUsed" in samples_of(server.metrics.get("/metrics").text)


def test_reserved_prometheus_labels_are_renamed():
    samples = handler_samples(
        delta("Seen", __name__="x", le="1"), delta("Size", le="1") | {"type": "histogram"}
    )
    ((labels, _),) = samples["Seen"]
    assert {"label_name": "x", "label_le": "1"}.items() <= labels.items()
    buckets = [labels for labels, _ in samples["Size_bucket"]]
    assert {labels["label_le"] for labels in buckets} == {"1"}
    assert len({labels["le"] for labels in buckets}) == len(buckets)


def test_a_metric_with_two_types_becomes_two_metrics():
    types = ("gauge", "counter", "histogram")
    samples = handler_samples(*(delta("Seen") | {"type": kind} for kind in types))
    assert {"Seen", "Seen_counter", "Seen_histogram_bucket"} <= set(samples)
    assert len(samples["Seen"]) == 1


def version_with(stats, **changes):
    defaults = {"name": "m", "version": "1", "workers": [], "pending": 0, "queue_capacity": 100}
    idle_fields = {
        "stats": stats,
        "current_limits": {},
        "in_flight": 0,
        "forms": {},
        "features": [],
    }
    return SimpleNamespace(**defaults | idle_fields | changes)


def delta(name, **labels):
    return {"name": name, "type": "counter", "unit": "count", "value": 1.0, "dimensions": labels}
