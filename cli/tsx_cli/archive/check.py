"""`tsx archive --check`: a model must give equal answers to single and to batched requests."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tsx_cli.common.client import error_text
from tsx_cli.common.inputs import samples_in
from tsx_cli.common.options import open_cached
from tsx_runtime import wire
from tsx_runtime.api.management.samples import example_of, sample_of
from tsx_runtime.core.comparison.comparison import compare_bodies, json_difference, same_exactly
from tsx_runtime.core.comparison.difference import Difference, excerpt
from tsx_runtime.core.comparison.top_k import is_number
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.standalone import open_model
from tsx_runtime.core.scheduling.job import WaitingJob
from tsx_runtime.errors import LoadFailed, TsxError
from tsx_runtime.plugins import ComparedAnswer
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.content_types import guess_content_type

MAX_BATCH_SIZE = 16


@dataclass(frozen=True)
class ModelSample:
    name: str
    content_type: str
    body: bytes


@dataclass(frozen=True)
class CheckResult:
    """The result of a check.

    Attributes:
        model: The name of the model.
        version: Its version.
        load_seconds: The time to load it.
        samples: The names of the samples; empty if there is no sample.
        batch_sizes: The sizes of the batches.
        findings: The faults; empty if there are none.
        form: The form of the model that was checked.
        forms_passed_over: The reasons why other forms were not used.
    """

    model: str
    version: str
    load_seconds: float
    samples: list[str]
    batch_sizes: list[int] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    form: str | None = None
    forms_passed_over: list[str] = field(default_factory=list)


def check_archive(
    path: Path, samples: Sequence[Path], settings: Settings, tolerance: float
) -> CheckResult:
    """Load an archive in a worker, and compare its responses to single and batched requests.

    Raises:
        ArchiveError: The archive cannot be opened.
        TsxError: The model does not load.
        OSError: A sample cannot be read.
    """
    with open_cached(path, settings) as opened:
        inputs = [read_sample(file) for file in samples or samples_in(opened.directory)]
    try:
        return asyncio.run(_check(path, inputs, settings, tolerance))
    except LoadFailed as error:
        raise error.named(str(path)) from error


async def _check(
    path: Path, samples: list[ModelSample], settings: Settings, tolerance: float
) -> CheckResult:
    start_time = time.monotonic()
    async with open_model(
        path, settings, batch_size=min(max(len(samples), 2), MAX_BATCH_SIZE)
    ) as version:
        load_seconds = time.monotonic() - start_time
        samples = samples or await known_sample(version)
        differences: dict[str, None] = {}  # an ordered set, without duplicates
        for start in range(0, len(samples), version.batch_size):
            differences.update(
                dict.fromkeys(
                    await _compare(version, samples[start : start + version.batch_size], tolerance)
                )
            )
        sizes = sorted(version.stats.batch_sizes)
        form, passed_over = next(iter(version.forms), None), version.forms_passed_over
        return CheckResult(
            version.name,
            version.version,
            load_seconds,
            [sample.name for sample in samples],
            sizes,
            list(differences),
            form,
            passed_over,
        )


async def _compare(
    version: ModelVersion, samples: list[ModelSample], tolerance: float
) -> list[str]:
    """Send each sample by itself, then all of them in one full batch, and compare the responses.

    Samples are repeated to fill the batch.
    """
    single_answers = [await send(version, sample) for sample in samples]
    repeated_answer = await send(version, samples[0])
    if difference(single_answers[0], repeated_answer, tolerance) is not None:
        excerpts = f"{excerpt(single_answers[0].body)}, {excerpt(repeated_answer.body)}"
        return [
            f"{samples[0].name}: two answers to the same request, sent alone, differ: {excerpts};"
            " is the model in eval mode?"
        ]
    # There is one request more than a batch takes: even if the first or the last request is
    # computed by itself, the others fill a batch that has every sample.
    sample_indexes = [index % len(samples) for index in range(version.batch_size + 1)]
    batched_answers = await asyncio.gather(
        *(send(version, samples[index]) for index in sample_indexes)
    )
    return findings(
        [samples[index].name for index in sample_indexes],
        [single_answers[index] for index in sample_indexes],
        batched_answers,
        tolerance,
    )


async def known_sample(version: ModelVersion) -> list[ModelSample]:
    """Return a sample of the archive, or one generated for its handler; the list may be empty."""
    sample = sample_of(version) or await example_of(version)
    return [] if sample is None else [ModelSample(sample.source, sample.content_type, sample.body)]


async def send(version: ModelVersion, sample: ModelSample) -> ComparedAnswer:
    headers = [
        (b"content-type", sample.content_type.encode()),
        (b"content-length", str(len(sample.body)).encode()),
    ]
    job = WaitingJob(
        wire.request_meta(uuid.uuid4().hex, b"", headers), sample.body, time.monotonic()
    )
    version.submit(job)
    try:
        answer = await job.done
        body = await answer.read_all(version.max_response_size)
    except TsxError as error:
        return ComparedAnswer(error.status, {}, error.message.encode())
    headers_by_name = {
        name.lower(): value
        for name, value in wire.parse_header_block(str(answer.headers, "latin-1"))
    }
    return ComparedAnswer(answer.status, headers_by_name, body)


def read_sample(path: Path) -> ModelSample:
    body = path.read_bytes()
    return ModelSample(path.name, guess_content_type(path.name, body), body)


def findings(
    names: Sequence[str],
    single_answers: Sequence[ComparedAnswer],
    batched_answers: Sequence[ComparedAnswer],
    tolerance: float,
) -> list[str]:
    """Return a text for each sample whose batched response differs from its single response."""
    texts = []
    for index, name in enumerate(names):
        if single_answers[index].status >= 400:
            texts.append(
                f"{name}: answered {single_answers[index].status} when sent alone:"
                f" {error_text(single_answers[index].body)}"
            )
            continue
        first_difference = difference(single_answers[index], batched_answers[index], tolerance)
        if first_difference is None:
            continue
        candidates = (candidate for candidate in range(len(single_answers)) if candidate != index)
        matching_index = next(
            (
                candidate
                for candidate in candidates
                if difference(single_answers[candidate], batched_answers[index], tolerance) is None
            ),
            None,
        )
        text = (
            first_difference.between("alone", "in a batch")
            if matching_index is None
            else f"in a batch, its answer was the answer to {names[matching_index]}"
        )
        texts.append(f"{name}: {text}")
    return texts


def difference(
    single_answer: ComparedAnswer, batched_answer: ComparedAnswer, tolerance: float
) -> Difference | None:
    """Return the first difference between a single and a batched response, or None.

    Numbers may differ by `tolerance`, absolute or relative. Types, keys and the order of keys must
    be equal.
    """
    if batched_answer.status != single_answer.status:
        return Difference(
            "status",
            (),
            str(single_answer.status),
            str(batched_answer.status),
            error_text(batched_answer.body),
        )
    types = [
        answer.headers.get("content-type") or "absent" for answer in (single_answer, batched_answer)
    ]
    if types[0] != types[1]:
        return Difference("content-type", (), *types)

    def is_close(first: Any, second: Any) -> bool:
        if same_exactly(first, second):
            return True
        return (
            type(first) is type(second)
            and is_number(first)
            and math.isclose(first, second, rel_tol=tolerance, abs_tol=tolerance)
        )

    result = compare_bodies(
        single_answer,
        batched_answer,
        lambda first, second: json_difference(first, second, is_close, ordered=True),
    )
    if result is not None and result.kind == "body":
        return result._replace(
            expected=excerpt(single_answer.body), actual=excerpt(batched_answer.body)
        )
    return result
