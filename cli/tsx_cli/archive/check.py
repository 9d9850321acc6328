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

MOST_IN_A_BATCH = 16


@dataclass(frozen=True)
class ModelSample:
    name: str
    content_type: str
    body: bytes


@dataclass(frozen=True)
class CheckResult:
    """`samples` is empty where there was nothing to send; `findings` is empty where all is well."""

    model: str
    version: str
    load_seconds: float
    samples: list[str]
    batch_sizes: list[int] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    form: str | None = None  # of `forms` in model-config.yaml, the one that was checked
    forms_passed_over: list[str] = field(default_factory=list)


def check_archive(
    path: Path, samples: Sequence[Path], settings: Settings, tolerance: float
) -> CheckResult:
    """Load an archive in a worker and compare its answers.

    Raises `ArchiveError`, `TsxError` (it does not load), `OSError` (a sample).
    """
    with open_archive(
        path, cache=settings.archive_cache(), limits=settings.archive_limits()
    ) as opened:
        found = [read_sample(file) for file in samples or samples_in(opened.directory)]
    try:
        return asyncio.run(_check(path, found, settings, tolerance))
    except LoadFailed as error:
        raise error.named(str(path)) from error


async def _check(
    path: Path, samples: list[ModelSample], settings: Settings, tolerance: float
) -> CheckResult:
    begin = time.monotonic()
    async with open_model(
        path, settings, batch_size=min(max(len(samples), 2), MOST_IN_A_BATCH)
    ) as version:
        seconds = time.monotonic() - begin
        samples = samples or await known_sample(version)
        found: dict[str, None] = {}  # a set in order: what is wrong with one sample is said once
        for start in range(0, len(samples), version.batch_size):
            found.update(
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
            list(found),
            form,
            passed_over,
        )


async def _compare(
    version: ModelVersion, samples: list[ModelSample], tolerance: float
) -> list[str]:
    """Send each sample alone, then all in one full batch; where they do not fill it, they come
    again.
    """
    alone = [await send(version, sample) for sample in samples]
    again = await send(version, samples[0])
    if difference(alone[0], again, tolerance) is not None:
        both = f"{excerpt(alone[0].body)}, {excerpt(again.body)}"
        return [
            f"{samples[0].name}: two answers to the same request, sent alone, differ: {both}; is"
            " the model in eval mode?"
        ]
    # One more than a batch holds: whether the first or the last of them leaves alone, the others
    # fill a batch that has every sample.
    order = [index % len(samples) for index in range(version.batch_size + 1)]
    batched = await asyncio.gather(*(send(version, samples[index]) for index in order))
    return findings(
        [samples[index].name for index in order],
        [alone[index] for index in order],
        batched,
        tolerance,
    )


async def known_sample(version: ModelVersion) -> list[ModelSample]:
    """Return the sample or warm-up request of an archive, else a request made up for its handler;
    empty if none is known.
    """
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
        body = await answer.whole(version.max_response_size)
    except TsxError as error:
        return ComparedAnswer(error.status, {}, error.message.encode())
    given = {
        name.lower(): value
        for name, value in wire.parse_header_block(str(answer.headers, "latin-1"))
    }
    return ComparedAnswer(answer.status, given, body)


def read_sample(path: Path) -> ModelSample:
    body = path.read_bytes()
    return ModelSample(path.name, guess_content_type(path.name, body), body)


def findings(
    names: Sequence[str],
    alone: Sequence[ComparedAnswer],
    batched: Sequence[ComparedAnswer],
    tolerance: float,
) -> list[str]:
    """One text for each input whose answer in a batch is not its answer alone."""
    found = []
    for position, name in enumerate(names):
        if alone[position].status >= 400:
            found.append(
                f"{name}: answered {alone[position].status} when sent alone:"
                f" {error_text(alone[position].body)}"
            )
            continue
        first = difference(alone[position], batched[position], tolerance)
        if first is None:
            continue
        others = (other for other in range(len(alone)) if other != position)
        owner = next(
            (
                other
                for other in others
                if difference(alone[other], batched[position], tolerance) is None
            ),
            None,
        )
        text = (
            first.between("alone", "in a batch")
            if owner is None
            else f"in a batch, its answer was the answer to {names[owner]}"
        )
        found.append(f"{name}: {text}")
    return found


def difference(
    alone: ComparedAnswer, batched: ComparedAnswer, tolerance: float
) -> Difference | None:
    """The first one.

    Numbers may differ by `tolerance`, absolute or relative; types, keys and their order may not.
    """
    if batched.status != alone.status:
        return Difference(
            "status", (), str(alone.status), str(batched.status), error_text(batched.body)
        )
    types = [answer.headers.get("content-type") or "absent" for answer in (alone, batched)]
    if types[0] != types[1]:
        return Difference("content-type", (), *types)

    def same(one: Any, other: Any) -> bool:
        if same_exactly(one, other):
            return True
        return (
            type(one) is type(other)
            and is_number(one)
            and math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
        )

    found = compare_bodies(
        alone, batched, lambda one, other: json_difference(one, other, same, ordered=True)
    )
    if found is not None and found.kind == "body":
        return found._replace(expected=excerpt(alone.body), actual=excerpt(batched.body))
    return found
