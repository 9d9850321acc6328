from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tsx_archiver import InvalidConfig, ModelConfig, WarmUp, load_model_config, parse_model_config
from tsx_archiver.metadata.modelconfig import CacheConfig, TorchRun
from tsx_archiver.metadata.safeyaml import MAX_BYTES, load_yaml
from tsx_archiver.monitor.config import MonitorConfig
from tsx_archiver.monitor.recording import RecordingKeys

EVERY_KEY = """
minWorkers: 1
maxWorkers: 2
batchSize: 8
maxBatchDelay: 50
responseTimeout: 60
startupTimeout: 300
deviceType: gpu
deviceIds: [0, 1]
parallelType: tp
parallelLevel: 2
torchrun: {nnodes: 1, nproc-per-node: 2, rdzv-backend: c10d, rdzv-endpoint: "x:1", rdzv-conf: a,
  monitor-interval: 5, node-rank: 0, OMP_NUMBER_THREADS: 1}
maxRetryTimeoutInSec: 300
clientTimeoutInMills: 0
jobQueueSize: 100
useJobTicket: true
sequenceBatching: false
continuousBatching: false
asyncCommunication: true
sequenceMaxIdleMSec: 1000
sequenceTimeoutMSec: 1000
maxSequenceJobQueueSize: 1
maxNumSequence: 4
forms: [openvino-int8, bf16]
huggingface: {task: fill-mask, dtype: bf16, engine: auto, maxSequences: 4, cacheMemory: 1GiB}
useVenv: false
maxBatchBytes: 1000
maxQueueBytes: 8589934592
overloadStatus: 429
record: {share: 1%, maxSize: 1MiB, maxAge: 1d, answers: true}
batchPolicy: wait
slo: p99<50ms
scaleToZero: 10m
maxBatchCost: 100
maxBatchTokens: 100
splitRows: 32
batchBuckets: [1, 2, 4]
cache: {size: 1MiB, ttl: 10m, key: X-User}
mcp: true
monitor: {share: 5%, groups: sex, window_samples: 200}
overlapPreprocessing: auto
retryFailedBatch: false
independentRows: true
weightsOnly: false
init_args: {width: 64, names: [a, null], deep: {rate: 0.5}}
threads: 2
input_shape: [1, 8, 8]
precision: bf16
maxWorkerRequests: 1000
maxWorkerMemory: 2000
maxWorkerAge: 86400
warmup: [{file: a/b.png, contentType: image/png, headers: {x-a: 1}, count: 3, strict: true}]
handler: {profile: true}
"""


def test_every_documented_key_is_read_without_a_problem() -> None:
    config, problems = parse_model_config(yaml.safe_load(EVERY_KEY))
    assert problems == []
    values = dataclasses.asdict(config)
    assert [name for name, value in values.items() if value is None] == []
    assert (
        config.batch_size,
        config.device_ids,
        config.batch_policy,
        config.weights_only,
        config.threads,
    ) == (8, (0, 1), "wait", False, 2)
    assert config.scale_to_zero == 600.0
    assert config.torchrun == TorchRun(1, 2, "c10d", "x:1", "a", 5, 0, 1)
    assert config.cache == CacheConfig(1 << 20, 600.0, ("x-user",))
    assert config.monitor == MonitorConfig(share=5, groups=("sex",), window_samples=200)
    assert config.record == RecordingKeys(share=1.0, max_size=1 << 20, answers=True)
    assert config.raw["handler"] == {"profile": True}
    assert dataclasses.replace(config) == config
    assert dataclasses.replace(ModelConfig(), use_venv=True) == ModelConfig(use_venv=True)


@pytest.mark.parametrize(
    ("line", "field", "message"),
    [
        ("batchSize: '8'", "batch_size", "batchSize: '8'"),
        ("batchSize: 0", "batch_size", "greater than or equal to 1"),
        ("batchSize: true", "batch_size", "a valid integer"),
        ("maxBatchDelay: 1.5", "max_batch_delay", "1.5"),
        ("jobQueueSize: 99999999999", "job_queue_size", "less than 2147483648"),
        ("deviceType: neuron", "device_type", "'cpu', 'gpu'"),
        ("precision: int8", "precision", "'fp32', 'fp16' or 'bf16'"),
        ("forms: [OpenVINO]", "forms", "forms: 'OpenVINO' is invalid"),
        ("deviceIds: 0", "device_ids", "it must be a list"),
        ("deviceIds: [a]", "device_ids", "deviceIds: 'a' is invalid"),
        ("useJobTicket: 'yes'", "use_job_ticket", "true or false"),
        ("batchPolicy: 3", "batch_policy", "it must be a valid string"),
        ("scaleToZero: soon", "scale_to_zero", "a string such as 30m"),
        ("scaleToZero: true", "scale_to_zero", "it must be a valid number"),
        ("torchrun: 4", "torchrun", "mapping of keys"),
        ("torchrun: {nnodes: x}", "batch_size", "torchrun.nnodes"),
        ("warmup: 3", "warmup", "must be a list"),
        ("warmup: [{file: ../a}]", "batch_size", r"warmup\[1\].file: .* leaves"),
        ("warmup: [a, {count: 2}]", "batch_size", r"warmup\[2\].file is missing"),
        ("warmup: [3]", "batch_size", r"warmup\[1\]: 3 is invalid"),
        ("warmup: [{file: a, count: 0}]", "batch_size", r"warmup\[1\].count"),
        ("warmup: [{file: a, headers: [x]}]", "batch_size", "mapping of keys"),
        ("init_args: {since: 2024-01-01}", "init_args", "a number, a string"),
        ("init_args: {deep: [{data: !!binary aGk=}]}", "init_args", "b'hi' is invalid"),
        ("init_args: {a-b: 1}", "init_args", "'a-b' is invalid"),
        ("torchrun: {rdzv-backend: 1}", "batch_size", "torchrun.rdzv-backend: 1"),
        ("batchBuckets: 4", "batch_buckets", "it must be a list"),
        ("batchBuckets: [0, 1]", "batch_buckets", "greater than or equal to 1"),
        ("cache: 64MiB", "cache", "mapping of keys"),
        ("cache: {sise: 1MB}", "cache", "the known keys are size, ttl, key"),
        ("cache: {size: much}", "cache", "cache.size: 'much' is invalid"),
        ("cache: {size: 1.5}", "cache", "cache.size: 1.5 is invalid"),
        ("cache: {ttl: 0}", "cache", "cache.ttl: 0 is invalid"),
        ("cache: {size: true}", "cache", "cache.size: True is invalid"),
        ("cache: {key: [x user]}", "cache", "cache.key: 'x user' is invalid"),
        ("monitor: 5%", "monitor", "mapping of keys"),
        ("monitor: {shar: 5%}", "monitor", "monitor.shar is not a known key; did you mean"),
        ("monitor: {share: 0}", "monitor", "monitor.share: 0 is invalid"),
        ("monitor: {fields: {age: integer}}", "monitor", "monitor.fields: 'integer' is invalid"),
        ("record: 1%", "record", "mapping of keys"),
        ("record: {share: 200%}", "record", "record.share"),
        ("record: {maxSize: 2GB}", "record", "at most 1GB; only the server's own setting"),
        ("record: {size: 1MB}", "record", "record.size is not a known key"),
    ],
)
def test_an_invalid_value_is_reported_and_ignored(line: str, field: str, message: str) -> None:
    config, problems = parse_model_config(yaml.safe_load(line))
    assert getattr(config, field) is None
    assert len(problems) == 1
    assert re.search(message, problems[0])


@pytest.mark.parametrize(
    ("line", "expected"), [("monitor: true", MonitorConfig()), ("monitor: false", None)]
)
def test_monitoring_needs_no_terms(line: str, expected: MonitorConfig | None) -> None:
    config, problems = parse_model_config(yaml.safe_load(line))
    assert (config.monitor, problems) == (expected, [])


def test_an_unknown_warm_up_key_is_reported_with_the_nearest_known_one() -> None:
    config, problems = parse_model_config(
        {"warmup": ["a.png", {"file": "./b.bin", "contenttype": "image/png", "weight": 1}]}
    )
    assert config.warmup == (WarmUp("a.png"), WarmUp("b.bin"))
    similar, unknown = problems
    assert similar.endswith("did you mean warmup[2].contentType?")
    assert "warmup[2].weight" in unknown


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("batch_size", "batchSize"),
        ("batchsize", "batchSize"),
        ("maxWorker", "maxWorkers"),
        ("max-batch-delay", "maxBatchDelay"),
        ("handlers", "handler"),
    ],
)
def test_a_misspelled_key_is_reported_with_the_nearest_known_one(key: str, suggestion: str) -> None:
    _, problems = parse_model_config({key: 1})
    assert problems == [f"{key} is not a known key; did you mean {suggestion}?"]


def test_a_misspelled_torchrun_key_is_reported_with_the_nearest_known_one() -> None:
    _, problems = parse_model_config({"torchrun": {"nproc_per_node": 2}})
    assert "did you mean torchrun.nproc-per-node?" in problems[0]


@pytest.mark.parametrize(
    "key", ["model_name", "tokenizer", "threshold", "timeout", "labels", 5, "pt2", "micro_batching"]
)
def test_keys_for_the_handler_are_not_reported(key: object) -> None:
    assert parse_model_config({key: 1})[1] == []


def test_a_maximum_of_workers_below_the_minimum_is_reported() -> None:
    assert "less than minWorkers" in parse_model_config({"minWorkers": 3, "maxWorkers": 1})[1][0]


def test_an_empty_file_is_an_empty_configuration(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# nothing\n")
    assert load_model_config(tmp_path / "c.yaml") == (ModelConfig(), [])


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_no_document_raises_an_exception(data: object) -> None:
    config, problems = parse_model_config(data)
    assert all(problems)
    assert config.raw == (data if isinstance(data, dict) else {})


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
TEXT_BOMB = f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 1000)}]\n"
MERGE_BOMB = "a: &a {k: v}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 9)}]}}\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (BOMB, "expands"),
        (TEXT_BOMB, "expands"),
        (MERGE_BOMB, "expands"),
        ("a: &a [*a]", "expands"),
        ("[" * 1000, "nested"),
        ("{a: " * 200 + "1" + "}" * 200, "nested"),
        ("x: !!python/object/apply:os.system ['true']", "only plain values"),
        ("a: [1", "line"),
        ("a: 2020-13-45", "cannot be read"),
        ("{[1]: 2}: 3", "cannot be read"),
        ("x" * (MAX_BYTES + 1), "bytes"),
    ],
)
def test_dangerous_or_broken_yaml_is_refused(content: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message) as caught:
        load_yaml(content.encode(), source="model-config.yaml")
    assert caught.value.message.startswith("model-config.yaml")


def test_a_few_aliases_are_accepted() -> None:
    assert load_yaml(b"a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}", source="c") == {
        "a": {"x": 1},
        "b": {"x": 1},
        "c": {"x": 1, "y": 2},
    }


def test_the_error_of_a_missing_or_undecodable_file_names_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"no.yaml cannot be read"):
        load_model_config(tmp_path / "no.yaml")
    (tmp_path / "c.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(InvalidConfig, match=r"c.yaml cannot be read as YAML"):
        load_model_config(tmp_path / "c.yaml")


@pytest.mark.parametrize(
    ("value", "shapes", "faults"),
    [
        ({"pixels": [64], "meta": [-1, 3]}, {"pixels": (64,), "meta": (None, 3)}, 0),
        ({"pixels": [64], "meta": "3"}, None, 1),
        ({"pixels": 64}, None, 1),
    ],
)
def test_input_shape_may_name_several_inputs(value: object, shapes: object, faults: int) -> None:
    config, problems = parse_model_config({"input_shape": value})
    assert (config.input_shape, len(problems)) == (shapes, faults)
