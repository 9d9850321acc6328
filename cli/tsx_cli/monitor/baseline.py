"""The making of a baseline: facts about requests and answers, summarized into the archive."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, islice
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, get_args

import numpy as np
from pydantic import ValidationError
from rich.console import Console
from rich.progress import track

from tsx_archiver.metadata.safeyaml import load_yaml_file
from tsx_archiver.monitor.baseline import MAX_BYTES, MEMBER, MonitorBaseline
from tsx_archiver.monitor.config import FieldKind, MonitorConfig
from tsx_archiver.rewriting import rewrite_archive
from tsx_cli.archive.source import require_archive
from tsx_cli.batch.local import open_local
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.options import open_cached
from tsx_cli.common.output import human, number, one_line, print_table
from tsx_cli.monitor.samples import UNANSWERED, answer_samples, read_labels, read_samples
from tsx_runtime.features.monitor.messages import MonitorSample
from tsx_runtime.features.monitor.statistics.columns import GUESS_ROWS, Extractor, RowFacts
from tsx_runtime.features.monitor.statistics.facts import category_of, cosine, number_of
from tsx_runtime.features.monitor.statistics.summaries import summarize
from tsx_runtime.settings.schema import Settings

MAX_REASONS = 3  # shown reasons of failures
KINDS = ", ".join(get_args(FieldKind))


def write_baseline(
    model: Path,
    source: str,
    settings: Settings,
    *,
    labels: Path | None,
    limit: int,
    fields: Path | None,
    with_answers: bool,
) -> dict[str, Any]:
    """Write the baseline of an input's requests into the archive, and return its description.

    The requests are chosen from all parts of the input, since files often are in the order of
    their classes. If a request has no answer, the model answers all.

    Raises:
        CliError: The inputs cannot be read, or no request can be used.
        UsageError: The options contradict the inputs.
        ArchiveError: The archive cannot be read or changed.
        TsxError: The model failed.
    """
    require_archive(model)
    with open_cached(model, settings) as archive:
        config = archive.config.monitor or MonitorConfig.model_validate({})
    if fields is not None:
        config = _with_fields(config, fields)
    inputs = partial(read_samples, source, settings.s3_endpoint_url)
    statuses = [sample.status for sample in inputs()]
    truths = [None] * len(statuses) if labels is None else read_labels(labels, len(statuses))
    indices = set(Random(0).sample(range(len(statuses)), min(limit, len(statuses))))
    pairs = enumerate(zip(truths, inputs(), strict=True))
    samples: Iterator[tuple[Any, MonitorSample]]
    samples = (pair for index, pair in pairs if index in indices)
    extractor = Extractor(config)
    with ExitStack() as stack:
        if not with_answers:
            samples = (
                (label, sample._replace(status=200, answer=b"")) for label, sample in samples
            )
        elif UNANSWERED in statuses:
            engine = stack.enter_context(open_local(model, settings))
            schema = getattr(engine.version.signature, "input", None)
            extractor = Extractor(config, engine.version.monitor_fields, schema)
            samples = answer_samples(engine, samples)
        head = list(islice(samples, GUESS_ROWS))
        for _, sample in head:
            extractor.rows(sample)
        extractor.freeze()
        console, failures = Console(stderr=True), Counter[str]()
        shown = track(
            chain(head, samples),
            "requests",
            len(indices),
            console=console,
            disable=not console.is_terminal,
        )
        baseline = _summarize(shown, extractor, Path(source).name, failures)
    content = baseline.model_dump_json().encode()
    if len(content) > MAX_BYTES:
        raise CliError(
            f"the baseline has {len(content):,} bytes, and {MAX_BYTES:,} are allowed; leave fields"
            " out with --fields, as the kind `ignore`"
        )
    rewrite_archive(model, {MEMBER: content}, limits=settings.archive_limits())
    described = baseline.model_dump(mode="json", exclude={"centres"})
    facts = {"bytes": len(content), "failures": dict(failures.most_common(MAX_REASONS))}
    return {"model": str(model), **facts, **described}


def _summarize(
    samples: Iterable[tuple[Any, MonitorSample]],
    extractor: Extractor,
    source: str,
    failures: Counter[str],
) -> MonitorBaseline:
    """Summarize samples with their labels; count the requests without rows by their reasons.

    Raises:
        CliError: No request can be used.
    """
    rows: list[RowFacts] = []
    quality = defaultdict[str, list[float]](list)  # hits of classes, errors of numbers
    for label, sample in samples:
        facts = extractor.rows(sample)
        rows += facts
        if not facts:
            reason = sample.answer.decode("utf-8", "replace")
            failures[reason if sample.status >= 400 else "it cannot be read"] += 1
        elif label is not None:
            truths = label if isinstance(label, list) else [label]
            if len(truths) != len(facts):
                request = f"request {sample.request_id}"
                raise UsageError(f"{request}: {len(facts)} rows, {len(truths)} labels")
            for row, truth in zip(facts, truths, strict=True):
                true_number = number_of(truth)
                if isinstance(row.prediction, str):
                    quality["accuracy"].append(row.prediction == category_of(truth))
                elif row.prediction is not None and true_number is not None:
                    quality["mean_error"].append(abs(row.prediction - true_number))
    if not rows:
        reasons = "; ".join(failures) or f"there are none in {source}"
        raise CliError(f"no request can be used: {one_line(reasons)}")
    means: Any = {name: fmean(values) for name, values in quality.items()}
    return MonitorBaseline(
        rows=len(rows),
        created=time.time(),
        source=source,
        fields=extractor.fields,
        centres=_add_similarities(rows),
        columns=summarize([row.columns for row in rows]),
        **means,
    )


def _add_similarities(rows: Sequence[RowFacts]) -> dict[str, list[float]]:
    """Add the similarities of embeddings to their mean to the rows, and return the means."""
    centres = {}
    for column in {column for row in rows for column in row.vectors}:
        embedded = [row for row in rows if column in row.vectors]
        with suppress(ValueError):  # Vectors of several lengths are no embeddings.
            centre = np.mean([row.vectors[column] for row in embedded], axis=0)
            for row in embedded:
                row.columns[column] = cosine(row.vectors[column], centre)
            centres[column] = [float(f"{value:.5g}") for value in centre]
    return centres


def _with_fields(config: MonitorConfig, file: Path) -> MonitorConfig:
    try:
        return MonitorConfig.model_validate(dict(config) | {"fields": load_yaml_file(file)})
    except ValidationError as error:
        raise UsageError(
            f'--fields {file}: {error.errors()[0]["msg"]}; write {{"PATH": "KIND"}}, where KIND is'
            f" {KINDS}"
        ) from error


def show_baseline(result: dict[str, Any]) -> None:
    print_table(["field", "kind"], result["fields"].items())
    for reason, count in result["failures"].items():
        print(f"{count} requests left out: {one_line(reason)}")
    rows, size = f"{result['rows']:,} rows", human(result["bytes"])
    quality = [
        f"; {name} {number(result[name])}"
        for name in ("accuracy", "mean_error")
        if result[name] is not None
    ]
    print(f"{result['model']} has a baseline of {rows}, {size}" + "".join(quality))
    print(
        'to correct a kind, give --fields FILE with {"PATH": "KIND"}, or set `monitor.fields` in'
        f" model-config.yaml; kinds: {KINDS}"
    )
