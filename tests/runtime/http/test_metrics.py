"""`/metrics`, read as Prometheus reads it."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tsx_runtime.core.stats import MOST_LABEL_SETS, MOST_METRICS, Stats
from tsx_runtime.http.asgi import Counts
from tsx_runtime.http.gpu import Gpu
from tsx_runtime.http.metrics import Reading, build_families

PATH = "/predictions/talker"


def samples_of(text):
    """All samples by the names that are written there: [(labels, value)]."""
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            added = sample.name.endswith("_total") and f"\n{sample.name}{{" not in text  # the parser renames counters
            samples.setdefault(sample.name.removesuffix("_total") if added else sample.name, []).append((sample.labels, sample.value))
    return samples


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
        filtered = server.metrics.get("/metrics", params={"name[]": ["Requests2XX", "tsx_batch_size_bucket"]})
        again = server.metrics.get("/metrics")
    return SimpleNamespace(answer=answer, samples=samples_of(answer.text), filtered=filtered, again=samples_of(again.text))


def one(scraped, name, **labels):
    (value,) = [value for given, value in scraped.samples[name] if labels.items() <= given.items()]
    return value


def test_the_content_type_is_prometheus_text(scraped):
    assert scraped.answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


def test_answers_are_counted_by_class(scraped):
    assert one(scraped, "Requests2XX", Level="Host") == 5
    assert one(scraped, "Requests4XX", Level="Host") == 1
    assert one(scraped, "Requests5XX", Level="Host") == 2
    assert scraped.again["Requests2XX"][0][1] == 7  # the two readings since count as well


def test_counters_keep_torchserves_names(scraped):
    assert "# TYPE Requests2XX counter\nRequests2XX{" in scraped.answer.text
    assert "# TYPE ts_inference_latency_microseconds counter\nts_inference_latency_microseconds{" in scraped.answer.text
    assert "# TYPE ts_inference_requests_total counter\nts_inference_requests_total{" in scraped.answer.text
    assert "_total_total" not in scraped.answer.text


def test_each_name_is_declared_once(scraped):
    declared = Counter(line for line in scraped.answer.text.splitlines() if line.startswith("# TYPE"))
    assert set(declared.values()) == {1}
    lines = Counter(line.rpartition(" ")[0] for line in scraped.answer.text.splitlines() if not line.startswith("#"))
    assert set(lines.values()) == {1}


def test_requests_and_their_times_are_summed_by_version(scraped):
    version = {"model_name": "talker", "model_version": "1.0"}
    assert one(scraped, "ts_inference_requests_total", **version) == 6
    assert one(scraped, "ts_inference_requests_total", model_name="talker", model_version="2.0") == 0
    latency = one(scraped, "ts_inference_latency_microseconds", **version)
    assert latency > one(scraped, "ts_queue_latency_microseconds", **version) > 0
    assert one(scraped, "QueueTime", ModelName="talker") > 0
    assert one(scraped, "WorkerThreadTime", ModelName="talker") > 0
    assert one(scraped, "WorkerLoadTime", WorkerName="W-9000-talker_1.0", Level="Host") > 0


def test_answers_and_refusals_are_told_by_kind(scraped):
    assert one(scraped, "tsx_answers_total", status="200") == 5
    assert one(scraped, "tsx_answers_total", status="503") == 1
    assert one(scraped, "tsx_refusals_total", reason="NoWorker", model_version="2.0") == 1
    assert one(scraped, "tsx_queue_depth", model_version="1.0") == 0


def test_workers_are_told_by_state(scraped):
    states = {labels["state"]: value for labels, value in scraped.samples["tsx_workers"] if labels["model_version"] == "1.0"}
    assert states == {"LOADING": 0, "READY": 1, "UNLOADING": 0, "BACKING_OFF": 0, "FAILED": 0}
    assert one(scraped, "tsx_worker_restarts_total", model_version="1.0") == 0
    assert one(scraped, "tsx_worker_memory_bytes", worker="9000") > 1 << 20


def test_batches_are_a_histogram_of_their_sizes(scraped):
    buckets = {labels["le"]: value for labels, value in scraped.samples["tsx_batch_size_bucket"] if labels["model_version"] == "1.0"}
    assert buckets["1.0"] == buckets["512.0"] == buckets["+Inf"] == 6
    assert one(scraped, "tsx_batch_size_sum", model_version="1.0") == 6


def test_handlers_metrics_are_there_under_their_names(scraped):
    assert one(scraped, "Seen", ModelName="talker", Level="Model", ModelVersion="1.0") == 4
    assert one(scraped, "Took", ModelName="talker") == 3.5
    assert one(scraped, "Size_count", ModelName="talker") == 2
    assert one(scraped, "Size_sum", ModelName="talker") == 8
    assert one(scraped, "model_Requests2XX", ModelName="talker") == 2


@pytest.mark.parametrize(
    "name", ["CPUUtilization", "MemoryUsed", "MemoryAvailable", "MemoryUtilization", "DiskUsage", "DiskAvailable", "DiskUtilization"]
)
def test_the_machine_is_measured(scraped, name):
    assert one(scraped, name, Level="Host") >= 0


def test_names_can_be_asked_for(scraped):
    families = {line.split()[2] for line in scraped.filtered.text.splitlines() if line.startswith("# TYPE")}
    assert families == {"Requests2XX", "tsx_batch_size"}


def test_gpus_are_measured_where_they_tell():
    silent = Gpu("1", "GPU-2", None, None, None, None)
    reading = Reading("host", [], Counts(), [], {0: Gpu("0", "GPU-1", 37, 12, 500, 2000), 1: silent})
    samples = samples_of(build_families(reading).render().decode())
    labels = {"Level": "Host", "Hostname": "host", "DeviceId": "0"}
    assert samples["GPUUtilization"] == [(labels, 37)]
    assert samples["GPUMemoryUsed"] == [(labels, 500)]
    assert samples["GPUMemoryUtilization"] == [(labels, 25)]


def test_batches_beyond_the_last_bound_are_counted():
    stats = Stats()
    stats.batches = 2
    stats.batch_sizes.update([3, 1000])
    version = SimpleNamespace(name="m", version="1", stats=stats, workers=[], pending=0)
    reading = Reading("host", [SimpleNamespace(versions={"1": version})], Counts(), [], {})
    buckets = {labels["le"]: value for labels, value in samples_of(build_families(reading).render().decode())["tsx_batch_size_bucket"]}
    assert (buckets["2.0"], buckets["4.0"], buckets["512.0"], buckets["+Inf"]) == (0, 1, 1, 2)


def test_a_text_that_is_no_unicode_does_not_cost_the_others_their_metrics():
    stats = Stats()
    name = b"caf\xe9.jpg".decode("utf-8", "surrogateescape")
    stats.add_handler_metrics([{"name": "Read", "type": "counter", "unit": name, "value": 1.0, "dimensions": {"File": name}}])
    version = SimpleNamespace(name="m", version="1", stats=stats, workers=[], pending=0)
    reading = Reading("host", [SimpleNamespace(versions={"1": version})], Counts(), [], {})
    samples = samples_of(build_families(reading).render().decode())
    assert samples["Read"] == [({"File": "caf?.jpg", "Hostname": "host", "ModelVersion": "1"}, 1)]
    assert "Requests2XX" in samples


def test_workers_that_were_replaced_are_counted_by_reason_and_are_no_restarts(start_server, until):
    def recycles():
        samples = samples_of(server.metrics.get("/metrics").text)
        assert samples["tsx_worker_restarts_total"][0][1] == 0
        assert {labels["reason"]: value for labels, value in samples["tsx_worker_stuck_total"]} == {"stopped": 0, "silent": 0}
        counts = {labels["reason"]: value for labels, value in samples["tsx_worker_recycles_total"]}
        assert counts["requests"] == counts["memory"] == 0
        return counts["age"]

    with start_server(max_worker_age=1, heartbeat_interval=1) as server:
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
        stats.add_handler_metrics([delta("Seen", request=str(number)), delta("Seen", request="0"), delta("Other")])
    for number in range(MOST_METRICS):
        stats.add_handler_metrics([delta(f"of_{number}")])
    version = SimpleNamespace(name="m", version="1", stats=stats, workers=[], pending=0)
    samples = samples_of(build_families(Reading("host", [SimpleNamespace(versions={"1": version})], Counts(), [], {})).render().decode())
    assert len(samples["Seen"]) == MOST_LABEL_SETS
    assert samples["Other"][0][1] == MOST_LABEL_SETS + 5
    assert {labels["request"]: value for labels, value in samples["Seen"]}["0"] == MOST_LABEL_SETS + 6
    assert {labels["metric"]: value for labels, value in samples["tsx_handler_metric_drops_total"]} == {"Seen": 5, "": 2}
    labels, names = (record.getMessage() for record in caplog.records)
    assert labels.startswith('Model "m" [Version 1]: its handler reports the metric Seen with more than 1000 sets of labels')
    assert "more than 1000 metrics" in names


def delta(name, **labels):
    return {"name": name, "type": "counter", "unit": "count", "value": 1.0, "dimensions": labels}
