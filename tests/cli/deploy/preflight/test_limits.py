"""The limits of targets, held against what is known of an archive: what is refused, what is told,
and what to do about it.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_cli.deploy.preflight.limits import (
    GIB,
    LIMITS,
    MIB,
    SET,
    ModelProfile,
    TargetLimit,
    TargetProfile,
    findings,
    size_of,
)

SMALL = {"packed": 1000, "unpacked": 2000}


def reported(
    target: str, known: dict[str, Any], more: dict[str, TargetLimit] | None = None, **place: Any
) -> list[tuple[bool, str]]:
    where = TargetProfile(target, {**LIMITS[target], **(more or {})}, **place)
    return [
        (each.is_error, each.text) for each in findings(where, ModelProfile(**{**SMALL, **known}))
    ]


@pytest.mark.parametrize("target", LIMITS)
def test_a_small_archive_fits_everywhere(target: str) -> None:
    assert (
        reported(
            target,
            {"p99_ms": 20.0, "samples": {"image/png": 8000}, "load_seconds": 2.0, "device": "cpu"},
        )
        == []
    )


@pytest.mark.parametrize("limits", LIMITS.values())
def test_each_limit_says_where_it_is_written(limits: dict[str, TargetLimit]) -> None:
    assert all(limit.source.startswith("https://") and limit.most > 0 for limit in limits.values())


@pytest.mark.parametrize(
    ("target", "known", "place", "is_error", "said"),
    [
        ("sagemaker", {"samples": {"image/png": 7 * MIB}}, {}, True, "has 7 MiB, and SageMaker takes"),
        ("sagemaker", {"samples": {"image/png": 7 * MIB}}, {}, True, "set sagemaker.asynchronous"),
        ("sagemaker serverless", {"measured": {"a/b": 5 * MIB}}, {}, True, "has 5 MiB, and SageMaker"),
        ("sagemaker", {"measured": {"a/b": 5 * MIB}}, {}, False, "close to the limit"),
        ("lambda", {"samples": {"image/png": 5 * MIB}}, {}, True, "requests of 4.5 MiB"),
        ("lambda", {"samples": {"text/csv": 7 * MIB}}, {}, True, "or deploy with --target sagemaker"),
        ("sagemaker", {"p99_ms": 61_000.0}, {}, True, "SageMaker ends one after 60 s"),
        ("sagemaker", {"p99_ms": 31_000.0}, {}, False, ", which slower machines may exceed."),
        ("sagemaker", {"response_timeout": 120}, {}, False, "of the archive is 120 s"),
        ("sagemaker serverless", {"packed": 2 * GIB, "unpacked": 4 * GIB}, {}, True, "take 6 GiB of disk, and there are 5 GiB"),
        ("lambda", {"image_bytes": 11 * GIB}, {}, True, "11 GiB compressed, and Lambda accepts 10"),
        ("lambda", {"image_bytes": 5 * GIB}, {}, False, "Build it with torch's CPU wheels"),
        ("lambda", {}, {"env": {"A": "x" * 5000}}, True, "4.88 KiB, and Lambda accepts 4 KiB"),
        ("sagemaker", {}, {"env": {"A": "x" * 1025}}, True, "env.A is longer than 1024 bytes"),
        ("sagemaker", {}, {"env": {f"A{n}": "" for n in range(101)}}, True, "101 variables, and SageMaker takes 100"),
        ("sagemaker", {}, {"instance_type": "ml.inf1.xlarge"}, True, "first accelerators"),
        ("sagemaker", {}, {"instance_type": "ml.inf2.xlarge", "device": "neuron"}, True, "the archive has no form for them"),
        ("sagemaker", {}, {"instance_type": "ml.c7g.large"}, False, "ml.c7g.large is an ARM machine"),
        ("sagemaker", {"device": "gpu"}, {"instance_type": "ml.c6i.large", "device": "cpu"}, False, "but ml.c6i.large has none"),
        ("sagemaker", {"device": "cpu"}, {"instance_type": "ml.g5.xlarge", "device": "cuda"}, False, "ml.g5.xlarge has a GPU"),
    ],
)  # fmt: skip
def test_what_goes_beyond_a_limit_is_reported_with_a_way_out(
    target: str, known: dict[str, Any], place: dict[str, Any], is_error: bool, said: str
) -> None:
    found = reported(target, known, **place)
    assert [error for error, text in found if said in text] == [is_error], found


def test_limits_that_the_deployment_sets_name_the_key_that_raises_them() -> None:
    start = {"start": TargetLimit(60, SET, "sagemaker.startup_timeout")}
    assert reported("sagemaker", {"load_seconds": 70.0}, start) == [
        (
            True,
            "it took 70.0 s to load on this machine, and SageMaker gives it 60 s to start: raise sagemaker.startup_timeout",
        )
    ]
    assert (
        "60 s to start"
        in reported("sagemaker", {"load_seconds": 30.0}, start)[0][1]
    )
    memory = {"memory": TargetLimit(2 * GIB, SET, "sagemaker.serverless.memory")}
    (found,) = reported("sagemaker serverless", {"unpacked": 3 * GIB}, memory)
    assert found == (
        True,
        "the content of the archive has 3 GiB, and SageMaker serverless has 2 GiB of memory: raise sagemaker.serverless.memory",
    )
    (found,) = reported("sagemaker serverless", {"unpacked": GIB + GIB // 2}, memory)
    assert found[0] is False


@given(st.sampled_from(sorted(LIMITS)), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_more_is_never_better(target: str, small: int, more: int) -> None:
    def errors(size: int) -> int:
        return sum(
            is_error
            for is_error, _ in reported(
                target, {"samples": {"image/png": size}, "image_bytes": size, "unpacked": size}
            )
        )

    assert errors(min(small, more)) <= errors(max(small, more))


def test_errors_come_first() -> None:
    found = reported(
        "sagemaker", {"measured": {"a/b": 5 * MIB}, "samples": {"a/b": 1 << 30}, "p99_ms": 70_000.0}
    )
    assert [is_error for is_error, _ in found] == [True, True, False]


def test_sizes_are_reported_in_the_units_of_limits() -> None:
    assert [size_of(each) for each in (3, 4096, 6 * MIB, 10 * GIB)] == [
        "3 bytes",
        "4 KiB",
        "6 MiB",
        "10 GiB",
    ]
