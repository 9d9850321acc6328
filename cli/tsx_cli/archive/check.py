"""`tsx archive --check`: a model's answer in a batch must equal its answer alone."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tsx_archiver import open_archive
from tsx_cli.common.client import error_text
from tsx_cli.common.inputs import samples_in
from tsx_runtime import wire
from tsx_runtime.api.management.samples import example_of, sample_of
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import open_model
from tsx_runtime.core.scheduling.job import WaitingJob
from tsx_runtime.core.shadowing.comparison import compare_bodies, json_difference, same_exactly
from tsx_runtime.core.shadowing.difference import Difference, excerpt
from tsx_runtime.core.shadowing.top_k import is_number
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
        samples: The names of the samples; empty if there were none.
        batch_sizes: The sizes of the batches.
        findings: What is wrong; empty if nothing is.
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
    """Load an archive in a worker, and compare its responses.

    Raises:
        ArchiveError: The archive cannot be opened.
        TsxError: The model does not load.
        OSError: A sample cannot be read.
    """
    with open_archive(
        path, cache=settings.archive_cache(), limits=settings.archive_limits()
    ) as opened:
        inputs = [read_sample(file) for file in samples or samples_in(opened.directory)]
    try:
        return asyncio.run(_check(path, inputs, settings, tolerance))
    except LoadFailed as error:
        raise error.named(str(path)) from error


async def _check(
    path: Path, samples: list[ModelSample], settings: Settings, tolerance: float
) -> CheckResult:
    begin = time.monotonic()
    async with open_model(
        path, settings, batch_size=min(max(len(samples), 2), MAX_BATCH_SIZE)
    ) as version:
        seconds = time.monotonic() - begin
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
            seconds,
            [sample.name for sample in samples],
            sizes,
            list(differences),
            form,
            passed_over,
        )


async def _compare(
    version: ModelVersion, samples: list[ModelSample], tolerance: float
) -> list[str]:
    """Send each sample alone, then all of them in one full batch, repeated if they are too few."""
    alone = [await send(version, sample) for sample in samples]
    again = await send(version, samples[0])
    if difference(alone[0], again, tolerance) is not None:
        both = f"{excerpt(alone[0].body)}, {excerpt(again.body)}"
        return [
            f"{samples[0].name}: two answers to the same request, sent alone, differ: {both}; is"
            " the model in eval mode?"
        ]
    # One request more than a batch holds: if the first or the last one is sent alone, the others
    # fill a batch with every sample.
    order = [index % len(samples) for index in range(version.batch_size + 1)]
    batched = await asyncio.gather(*(send(version, samples[index]) for index in order))
    return findings(
        [samples[index].name for index in order],
        [alone[index] for index in order],
        batched,
        tolerance,
    )


async def known_sample(version: ModelVersion) -> list[ModelSample]:
    """Return a sample of the archive, a request made up for its handler, or an empty list."""
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
    alone: Sequence[ComparedAnswer],
    batched: Sequence[ComparedAnswer],
    tolerance: float,
) -> list[str]:
    """Return a text for each sample whose response in a batch is another one than alone."""
    texts = []
    for position, name in enumerate(names):
        if alone[position].status >= 400:
            texts.append(
                f"{name}: answered {alone[position].status} when sent alone:"
                f" {error_text(alone[position].body)}"
            )
            continue
        first = difference(alone[position], batched[position], tolerance)
        if first is None:
            continue
        positions = (index for index in range(len(alone)) if index != position)
        owner = next(
            (
                index
                for index in positions
                if difference(alone[index], batched[position], tolerance) is None
            ),
            None,
        )
        text = (
            first.between("alone", "in a batch")
            if owner is None
            else f"in a batch, its answer was the answer to {names[owner]}"
        )
        texts.append(f"{name}: {text}")
    return texts


def difference(
    alone: ComparedAnswer, batched: ComparedAnswer, tolerance: float
) -> Difference | None:
    """Return the first difference of two responses, or None.

    Numbers may differ by `tolerance`, absolute or relative. Types, keys and their order may not.
    """
    if batched.status != alone.status:
        return Difference(
            "status", (), str(alone.status), str(batched.status), error_text(batched.body)
        )
    types = [answer.headers.get("content-type") or "absent" for answer in (alone, batched)]
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
        alone, batched, lambda first, second: json_difference(first, second, is_close, ordered=True)
    )
    if result is not None and result.kind == "body":
        return result._replace(expected=excerpt(alone.body), actual=excerpt(batched.body))
    return result
