"""The benchmark record in an archive, which the server reports but does not trust."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.core.models.benchmark_record import (
    FILE,
    MAX_RECORD_BYTES,
    BenchmarkRecord,
    parse_benchmark_record,
    read_benchmark_record,
)
from tsx_runtime.core.placement.hardware import Hardware, describe, hardware

THIS_MACHINE = {
    "cpu": "Sort of a CPU",
    "cores": 2,
    "gpus": [],
    "fingerprint": hardware().fingerprint,
}
RECORD: dict[str, Any] = {
    "format": 1,
    "measured": "2026-11-21T15:00:00+00:00",
    "slo": "p99<100ms",
    "environment": THIS_MACHINE,
    "best": {"describes": "cpu, 2 workers, batch 8", "throughput": 210.04, "p99_ms": 38.4},
}
SCALARS = st.none() | st.booleans() | st.floats() | st.integers() | st.text()
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
TOP_LEVEL_KEYS = st.sampled_from(["format", "measured", "slo", "environment", "best"])
NESTED_KEYS = st.sampled_from(["cpu", "cores", "gpus", "describes", "p99_ms"])


def test_the_report_says_if_another_machine_measured() -> None:
    assert str(parse_benchmark_record(json.dumps(RECORD).encode())) == (
        "measured 2026-11-21 on 2 cores of Sort of a CPU: 210 requests/s, p99 38.4 ms under p99<100ms, with cpu, 2 workers, batch 8"
    )
    large_figures = parse_benchmark_record(
        json.dumps(
            RECORD | {"best": RECORD["best"] | {"throughput": 10243.17, "p99_ms": 1234.5}}
        ).encode()
    )
    assert ": 10,243 requests/s, p99 1,234 ms under" in str(large_figures)
    other_machine = parse_benchmark_record(
        json.dumps(
            RECORD | {"slo": None, "environment": THIS_MACHINE | {"fingerprint": "0"}}
        ).encode()
    )
    assert other_machine is not None
    assert not other_machine.here
    assert "p99 38.4 ms, with" in str(other_machine)
    assert str(other_machine).endswith(
        "this machine is different, so expect different figures (run `tsx bench` to measure here)"
    )


@given(JSON, TOP_LEVEL_KEYS, NESTED_KEYS)
def test_any_json_is_read_or_ignored(value: Any, key: str, inner: str) -> None:
    for damaged_record in (
        value,
        RECORD | {key: value},
        RECORD
        | {"environment": THIS_MACHINE | {inner: value}, "best": RECORD["best"] | {inner: value}},
    ):
        record = parse_benchmark_record(json.dumps(damaged_record).encode(errors="surrogatepass"))
        assert record is None or str(record).isprintable()


def test_an_invalid_record_is_reported_once_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_benchmark_record(tmp_path) is None
    assert not caplog.records
    for content in (
        b"",
        b"{}",
        b"[" * 100_000,
        json.dumps(RECORD | {"format": 2}).encode(),
        b" " * MAX_RECORD_BYTES + json.dumps(RECORD).encode(),
    ):
        (tmp_path / FILE).write_bytes(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert read_benchmark_record(tmp_path) is None
        assert len(caplog.records) == 1
    (tmp_path / FILE).write_text(json.dumps(RECORD))
    assert isinstance(read_benchmark_record(tmp_path), BenchmarkRecord)


def test_a_machine_has_a_fingerprint_and_a_description() -> None:
    machine = Hardware("Some CPU", 2, ())
    assert machine.fingerprint == Hardware("Some CPU", 2, ()).fingerprint
    assert (
        len(
            {
                machine.fingerprint,
                machine._replace(cores=4).fingerprint,
                machine._replace(gpus=("H100",)).fingerprint,
            }
        )
        == 3
    )
    assert describe("Some CPU", 1) == "1 core of Some CPU"
    assert (
        str(Hardware("Some CPU", 16, ("H100", "H100", "A10")))
        == "16 cores of Some CPU, 2 x H100, A10"
    )
    assert hardware().cpu
    assert hardware().cores >= 1
