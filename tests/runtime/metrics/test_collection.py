"""`/metrics`, read as Prometheus reads it."""

from __future__ import annotations

import asyncio
import errno
import math
from collections import Counter
from io import StringIO
from types import SimpleNamespace

import psutil
import pytest
from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.openmetrics.parser import text_fd_to_metric_families
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.jobs import FakeJob
from tests.support.batches import count
from tsx_runtime.core.telemetry.batch_times import NAN, times_of
from tsx_runtime.core.telemetry.version_stats import MOST_LABEL_SETS, MOST_METRICS, Stats
from tsx_runtime.core.workers.instance import ResourceUsage
from tsx_runtime.metrics import collection
from tsx_runtime.metrics.collection import Reading, fill
from tsx_runtime.metrics.exposition import PIECE, Families, in_turns
from tsx_runtime.metrics.gpu import Gpu
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.wire import TIMES

PATH = "/predictions/talker"


def samples_of(text):
    """All samples by the names that are written there: [(labels, value)]."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # The parser renames counters.
            added = sample.name.endswith("_total") and f"\n{sample.name}{{" not in text
            samples.setdefault(
                sample.name.removesuffix("_total") if added else sample.name, []
            ).append((sample.labels, sample.value))
    return samples


def families_of(reading):
    families = Families()
    list(fill(families, reading))
    return families


def text_of(families):
    return b"".join(families.text()).decode()


def reading_of(stats, gpus=None, **more):
    """What is read of a server with one model."""
    model = SimpleNamespace(versions={"1": version_with(stats, **more)})
    return Reading("host", [model], ResponseCounts(), [], gpus or {})


def read(stats):
    """The samples of such a server."""
    return samples_of(text_of(families_of(reading_of(stats))))


@pytest.fixture(scope="module")
def scraped(start_server):
    """A server's metrics after some known requests."""
    with start_server() as server:
        server.register("talker.mar", initial_workers=1)
        server.register("talker2.mar", initial_workers=0)
        for _ in range(3):
            server.inference.post(PATH)
        server.inference.post(PATH, headers={"x-do": "metrics"})
        server.inference.post(PATH, headers={"x-do": "metrics"})
        server.inference.post(PATH, headers={"x-do": "raise"})
        server.inference.post("/predictions/nobody")
        server.inference.post(f"{PATH}/2.0")
        answer = server.metrics.get("/metrics")
        filtered = server.metrics.get(
            "/metrics", params={"name[]": ["Requests2XX", "tsx_batch_size_bucket"]}
        )
        again = server.metrics.get("/metrics")
        asks = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}
        opened = server.metrics.get("/metrics", headers=asks)
    return SimpleNamespace(
        answer=answer,
        samples=samples_of(answer.text),
        filtered=filtered,
        again=samples_of(again.text),
        open=opened,
    )


def one(scraped, name, **labels):
    (value,) = [value for given, value in scraped.samples[name] if labels.items() <= given.items()]
    return value


def test_the_content_type_is_prometheus_text(scraped):
    assert scraped.answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


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
        ("tsx_batch_size_sum", V1, 6),
        ("tsx_requests_in_flight", V1, 0),
        ("tsx_queue_capacity", V1, 100),
        ("tsx_errors_total", V1, 1),
        ("tsx_errors_total", V2, 1),
        ("tsx_traffic_share", V1, 1),
        ("tsx_traffic_share", V2, 0),
        ("tsx_preprocess_seconds_count", V1, 0),  # the handler is a function
        ("Seen", {**TALKER, "Level": "Model", "ModelVersion": "1.0"}, 4),
        ("Took", TALKER, 3.5),
        ("Size_count", TALKER, 2),
        ("Size_sum", TALKER, 8),
        ("model_Requests2XX", TALKER, 2),
    ],
)
def test_what_happened_is_counted(scraped, name, labels, value):
    assert one(scraped, name, **labels) == value


@pytest.mark.parametrize(
    ("name", "labels", "least"),
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
def test_what_is_measured_is_there(scraped, name, labels, least):
    assert one(scraped, name, **labels) > least


def test_a_reading_counts_as_an_answer(scraped):
    assert scraped.again["Requests2XX"][0][1] == 7  # the two readings since


def test_counters_keep_torchserves_names(scraped):
    assert "# TYPE Requests2XX counter\nRequests2XX{" in scraped.answer.text
    assert (
        "# TYPE ts_inference_latency_microseconds counter\nts_inference_latency_microseconds{"
        in scraped.answer.text
    )
    assert (
        "# TYPE ts_inference_requests_total counter\nts_inference_requests_total{"
        in scraped.answer.text
    )
    assert "_total_total" not in scraped.answer.text


def test_each_name_is_declared_once(scraped):
    declared = Counter(
        line for line in scraped.answer.text.splitlines() if line.startswith("# TYPE")
    )
    assert set(declared.values()) == {1}
    lines = Counter(
        line.rpartition(" ")[0]
        for line in scraped.answer.text.splitlines()
        if not line.startswith("#")
    )
    assert set(lines.values()) == {1}


def test_a_request_takes_longer_than_its_wait(scraped):
    latency = one(scraped, "ts_inference_latency_microseconds", **V1)
    assert latency > one(scraped, "ts_queue_latency_microseconds", **V1) > 0


def test_workers_are_reported_by_state(scraped):
    states = {
        labels["state"]: value
        for labels, value in scraped.samples["tsx_workers"]
        if labels["model_version"] == "1.0"
    }
    assert states == {"LOADING": 0, "READY": 1, "UNLOADING": 0, "BACKING_OFF": 0, "FAILED": 0}


def test_batches_are_a_histogram_of_their_sizes(scraped):
    buckets = {
        labels["le"]: value
        for labels, value in scraped.samples["tsx_batch_size_bucket"]
        if labels["model_version"] == "1.0"
    }
    assert buckets["1.0"] == buckets["512.0"] == buckets["+Inf"] == 6


@pytest.mark.parametrize("name", ["request", "queue", "batch_wait", "inference"])
def test_times_are_histograms_by_version(scraped, name):
    assert one(scraped, f"tsx_{name}_seconds_count", model_version="1.0") == 6
    buckets = [
        (float(labels["le"]), value)
        for labels, value in scraped.samples[f"tsx_{name}_seconds_bucket"]
        if labels["model_version"] == "1.0"
    ]
    assert buckets == sorted(buckets)
    assert buckets[-1] == (math.inf, 6)
    assert one(scraped, f"tsx_{name}_seconds_count", model_version="2.0") == 0


def test_the_parts_of_a_request_are_no_more_than_the_whole(scraped):
    whole = one(scraped, "tsx_request_seconds_sum", model_version="1.0")
    parts = [
        one(scraped, f"tsx_{name}_seconds_sum", model_version="1.0")
        for name in ("queue", "batch_wait", "inference")
    ]
    assert 0 < sum(parts) <= whole  # the batches were of one request each
    assert whole == pytest.approx(
        one(scraped, "ts_inference_latency_microseconds", model_version="1.0") / 1e6
    )


def test_names_can_be_asked_for(scraped):
    families = {
        line.split()[2] for line in scraped.filtered.text.splitlines() if line.startswith("# TYPE")
    }
    assert families == {"Requests2XX", "tsx_batch_size"}


def test_gpus_are_measured_where_they_tell():
    silent = Gpu("1", "GPU-2", None, None, None, None)
    reading = Reading(
        "host", [], ResponseCounts(), [], {0: Gpu("0", "GPU-1", 37, 12, 500, 2000), 1: silent}
    )
    samples = samples_of(text_of(families_of(reading)))
    labels = {"Level": "Host", "Hostname": "host", "DeviceId": "0"}
    assert samples["GPUUtilization"] == [(labels, 37)]
    assert samples["GPUMemoryUsed"] == [(labels, 500)]
    assert samples["GPUMemoryUtilization"] == [(labels, 25)]
    labels = {"hostname": "host", "gpu": "0", "uuid": "GPU-1"}
    assert samples["tsx_gpu_memory_used_bytes"] == [(labels, 500 << 20)]
    assert samples["tsx_gpu_memory_total_bytes"] == [(labels, 2000 << 20)]
    assert samples["tsx_gpu_utilization_ratio"] == [(labels, 0.37)]


def test_memory_of_a_gpu_is_reported_by_worker():
    gpus = {
        0: Gpu("0", "GPU-1", 37, 12, 500, 2000, {11: 5, 12: 7, 99: 1}),
        1: Gpu("1", "GPU-2", 0, 0, 1, 2000),
    }
    worker = SimpleNamespace(id="9000", state=None, load_seconds=None)
    usage = {"9000": ResourceUsage((11, 12), 1000, 2.5, 30)}
    reading = reading_of(Stats(), gpus, workers=[worker])._replace(usage=usage)
    samples = samples_of(text_of(families_of(reading)))
    [(labels, held)] = samples["tsx_worker_gpu_memory_bytes"]
    assert (labels["worker"], labels["gpu"], held) == ("9000", "0", 12)
    assert [value for _, value in samples["tsx_worker_memory_bytes"]] == [1000]


def test_openmetrics_has_the_same_samples_and_points_to_traces():
    stats = Stats()
    count(stats, (10.0, 10.0, 12.0), [FakeJob(arrived=9.98)], TIMES.pack(10.0, 2.0, NAN, 2.0, NAN))
    assert stats.newest is not None
    stats.point_out("4bf92f3577b34da6a3ce929d0e0e4736", 9.98, times_of(stats.newest))
    stats.add_handler_metrics([delta("Seen"), delta("tsx_queue_depth_total")])
    families = families_of(reading_of(stats))
    reported = list(text_fd_to_metric_families(StringIO(b"".join(families.openmetrics()).decode())))
    exemplars = {
        sample.name: sample for family in reported for sample in family.samples if sample.exemplar
    }
    assert set(exemplars) == {
        "tsx_request_seconds_bucket",
        "tsx_queue_seconds_bucket",
        "tsx_batch_wait_seconds_bucket",
        "tsx_inference_seconds_bucket",
    }
    pointer = exemplars["tsx_request_seconds_bucket"]
    assert pointer.labels["le"] == "2.5"
    assert pointer.exemplar.labels == {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}
    assert pointer.exemplar.value == pytest.approx(2.02)
    text = text_of(families)
    assert "4bf92f" not in text
    plain = {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    open_ = {
        line.partition(" # ")[0].rpartition(" ")[0]
        for line in b"".join(families.openmetrics()).decode().splitlines()
        if not line.startswith("#")
    }
    assert plain == open_


def test_openmetrics_is_given_to_those_who_ask_for_it(scraped):
    assert (
        scraped.open.headers["content-type"]
        == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    )
    reported = {
        family.name: family for family in text_fd_to_metric_families(StringIO(scraped.open.text))
    }
    assert reported["ts_inference_requests"].type == "counter"
    # A counter's name ends with _total there, and this one is TorchServe's.
    assert reported["Requests2XX"].type == "unknown"


def test_batches_beyond_the_last_bound_are_counted():
    stats = Stats()
    for size in (3, 1000):
        count(stats, (1.0, 1.0, 2.0), [FakeJob(arrived=0.5)] * size)
    buckets = {labels["le"]: value for labels, value in read(stats)["tsx_batch_size_bucket"]}
    assert (buckets["2.0"], buckets["4.0"], buckets["512.0"], buckets["+Inf"]) == (0, 1, 1, 2)


def test_a_text_that_is_no_unicode_does_not_cost_the_others_their_metrics():
    stats = Stats()
    name = b"caf\xe9.jpg".decode("utf-8", "surrogateescape")
    stats.add_handler_metrics(
        [
            {
                "name": "Read",
                "type": "counter",
                "unit": name,
                "value": 1.0,
                "dimensions": {"File": name},
            }
        ]
    )
    samples = read(stats)
    assert samples["Read"] == [({"File": "caf?.jpg", "Hostname": "host", "ModelVersion": "1"}, 1)]
    assert "Requests2XX" in samples


def test_what_a_handler_names_stays_within_its_line_of_prometheus():
    stats = Stats()
    text = 'a"b\\c\nd{}#,=`%\x00\u2028'
    stats.add_handler_metrics([{**delta(f"Read{text}", **{f"File{text}": text}), "unit": text}])
    ((labels, _),) = read(stats)["Reada_b_c_d_________"]
    assert labels["Filea_b_c_d_________"] == text


def test_workers_that_were_replaced_are_counted_by_reason_and_are_no_restarts(start_server, until):
    def recycles():
        samples = samples_of(server.metrics.get("/metrics").text)
        assert samples["tsx_worker_restarts_total"][0][1] == 0
        assert {labels["reason"]: value for labels, value in samples["tsx_worker_stuck_total"]} == {
            "stopped": 0,
            "silent": 0,
        }
        counts = {labels["reason"]: value for labels, value in samples["tsx_worker_recycles_total"]}
        assert counts["requests"] == counts["memory"] == 0
        return counts["age"]

    with start_server(max_worker_age=1) as server:
        server.register("talker.mar", initial_workers=1)
        until(recycles)
        (described,) = server.management.get("/models/talker").json()
        assert described["maxWorkerAge"] == 1
        assert described["workerRecycles"]["age"] >= 1
        assert described["workerRestarts"] == 0
        assert "maxWorkerMemory" not in described


def test_labels_without_bound_are_dropped_counted_and_warned_of_once(caplog):
    stats = Stats('Model "m" [Version 1]')
    for number in range(MOST_LABEL_SETS + 5):
        stats.add_handler_metrics(
            [delta("Seen", request=str(number)), delta("Seen", request="0"), delta("Other")]
        )
    for number in range(MOST_METRICS):
        stats.add_handler_metrics([delta(f"of_{number}")])
    samples = read(stats)
    assert len(samples["Seen"]) == MOST_LABEL_SETS
    assert samples["Other"][0][1] == MOST_LABEL_SETS + 5
    assert {labels["request"]: value for labels, value in samples["Seen"]}[
        "0"
    ] == MOST_LABEL_SETS + 6
    assert {
        labels["metric"]: value for labels, value in samples["tsx_handler_metric_drops_total"]
    } == {"Seen": 5, "": 2}
    labels, names = (record.getMessage() for record in caplog.records)
    assert labels.startswith(
        'Model "m" [Version 1]: its handler reports the metric Seen with more than 1000 sets of labels'
    )
    assert "more than 1000 metrics" in names


def test_many_models_are_written_in_pieces_between_which_others_have_their_turn():
    stats = Stats()
    for number in range(3 * PIECE):
        stats.add_handler_metrics(
            [delta("Seen", request=str(number)), {**delta("Grew"), "type": "counter"}]
        )
    models = [
        SimpleNamespace(versions={"1": version_with(stats, name=f"m{number}")})
        for number in range(4)
    ]
    families = Families()
    steps = list(fill(families, Reading("host", models, ResponseCounts(), [], {})))
    assert len(steps) > 4 + 4 * 3
    for pieces in (list(families.text()), list(families.openmetrics())):
        assert all(piece.count(b"\n") <= PIECE + 2 for piece in pieces)
        heads = [line for line in b"".join(pieces).splitlines() if line.startswith(b"#")]
        assert len(set(heads)) == len(heads)
    assert len(samples_of(text_of(families))["Seen"]) == 4 * 3 * PIECE
    samples = {line for line in text_of(families).splitlines() if not line.startswith("#")}
    assert samples <= set(generate_latest(families).decode().splitlines())


def test_each_piece_leaves_a_turn_to_others():
    turns = []

    async def count_turns():
        while True:
            turns.append(len(turns))
            await asyncio.sleep(0)

    async def both():
        other = asyncio.create_task(count_turns())
        assert await in_turns(iter(range(5))) == [0, 1, 2, 3, 4]
        other.cancel()

    asyncio.run(both())
    assert len(turns) >= 4


def test_with_no_descriptor_left_the_metrics_are_there_and_say_so(start_server, monkeypatch):
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


def test_labels_that_prometheus_has_a_meaning_for_are_called_otherwise():
    stats = Stats()
    stats.add_handler_metrics(
        [delta("Seen", __name__="x", le="1"), {**delta("Size", le="1"), "type": "histogram"}]
    )
    samples = read(stats)
    assert {"label_name": "x", "label_le": "1"}.items() <= samples["Seen"][0][0].items()
    assert {labels["label_le"] for labels, _ in samples["Size_bucket"]} == {"1"}
    assert len({labels["le"] for labels, _ in samples["Size_bucket"]}) == len(
        samples["Size_bucket"]
    )


def test_a_metric_that_is_reported_as_two_kinds_is_two_metrics():
    stats = Stats()
    for kind in ("gauge", "counter", "histogram"):
        stats.add_handler_metrics([{**delta("Seen"), "type": kind}])
    text = text_of(families_of(reading_of(stats)))
    assert {
        "# TYPE Seen gauge",
        "# TYPE Seen_counter counter",
        "# TYPE Seen_histogram histogram",
    } <= set(text.splitlines())
    assert len(samples_of(text)["Seen"]) == 1


def version_with(stats, **more):
    usual = {"name": "m", "version": "1", "workers": [], "pending": 0, "queue_capacity": 100}
    return SimpleNamespace(
        **usual | {"stats": stats, "slo": None, "in_flight": 0, "forms": {}, "cache": None} | more
    )


def delta(name, **labels):
    return {"name": name, "type": "counter", "unit": "count", "value": 1.0, "dimensions": labels}
