"""The limits of targets for an archive: errors, notes and remedies."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_cli.deploy.preflight.limits import (
    GIB,
    LIMITS,
    MIB,
    SET_BY_USER,
    ModelProfile,
    TargetLimit,
    TargetProfile,
    find_problems,
    size_of,
)

SMALL = {"packed": 1000, "unpacked": 2000}


def reported(
    target: str,
    archive: dict[str, Any],
    limits: dict[str, TargetLimit] | None = None,
    **settings: Any,
) -> list[tuple[bool, str]]:
    """Return whether each finding is an error, and its text."""
    profile = TargetProfile(target, {**LIMITS[target], **(limits or {})}, **settings)
    breaches = find_problems(profile, ModelProfile(**{**SMALL, **archive}))
    return [(finding.is_error, finding.text) for finding in breaches]


@pytest.mark.parametrize("target", LIMITS)
def test_a_small_archive_fits_every_target(target: str) -> None:
    samples = {"image/png": 8000}
    known = {"p99_ms": 20.0, "samples": samples, "load_seconds": 2.0, "device": "cpu"}
    assert reported(target, known) == []


@pytest.mark.parametrize("limits", LIMITS.values())
def test_each_limit_names_its_source(limits: dict[str, TargetLimit]) -> None:
    assert all(limit.source.startswith("https://") and limit.most > 0 for limit in limits.values())


@pytest.mark.parametrize(
    ("target", "archive", "settings", "is_error", "text"),
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
def test_a_breach_of_a_limit_is_reported_with_a_remedy(
    target: str, archive: dict[str, Any], settings: dict[str, Any], is_error: bool, text: str
) -> None:
    breaches = reported(target, archive, **settings)
    assert [error for error, finding in breaches if text in finding] == [is_error], breaches


def test_a_limit_set_in_the_specification_is_reported_with_its_key() -> None:
    limits = {
        "start": TargetLimit(60, SET_BY_USER, "sagemaker.startup_timeout"),
        "memory": TargetLimit(2 * GIB, SET_BY_USER, "sagemaker.serverless.memory"),
    }
    for target, archive, is_error, text in (
        ("sagemaker", {"load_seconds": 70.0}, True, "raise sagemaker.startup_timeout"),
        ("sagemaker", {"load_seconds": 30.0}, False, "60 s to start"),
        (
            "sagemaker serverless",
            {"unpacked": 3 * GIB},
            True,
            "has 2 GiB of memory: raise sagemaker.serverless.memory",
        ),
        ("sagemaker serverless", {"unpacked": GIB + GIB // 2}, False, "2 GiB of memory"),
    ):
        ((error, finding),) = reported(target, archive, limits)
        assert error is is_error
        assert text in finding


@given(st.sampled_from(sorted(LIMITS)), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_a_larger_archive_never_has_fewer_errors(target: str, small: int, more: int) -> None:
    def errors(size: int) -> int:
        archive = {"samples": {"image/png": size}, "image_bytes": size, "unpacked": size}
        return sum(is_error for is_error, _ in reported(target, archive))

    assert errors(min(small, more)) <= errors(max(small, more))


def test_errors_come_first() -> None:
    archive = {"measured": {"a/b": 5 * MIB}, "samples": {"a/b": 1 << 30}, "p99_ms": 70_000.0}
    breaches = reported("sagemaker", archive)
    assert [is_error for is_error, _ in breaches] == [True, True, False]


def test_sizes_are_reported_in_the_unit_of_their_limit() -> None:
    sizes = {3: "3 bytes", 4096: "4 KiB", 6 * MIB: "6 MiB", 10 * GIB: "10 GiB"}
    assert [size_of(size) for size in sizes] == [*sizes.values()]
