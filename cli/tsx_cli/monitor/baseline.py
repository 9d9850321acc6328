"""The making of a baseline: facts about requests and answers, summarized into the archive."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import track

from tsx_archiver.monitor.baseline import MAX_BYTES, MEMBER, MonitorBaseline
from tsx_archiver.monitor.config import FieldKind, FieldPath, MonitorConfig
from tsx_archiver.rewriting import rewrite_archive
from tsx_cli.archive.source import require_archive
from tsx_cli.batch.local import open_local
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.options import open_cached
from tsx_cli.common.output import human, one_line, print_table
from tsx_cli.monitor.samples import UNANSWERED, answered, read_labels, read_samples
from tsx_cli.monitor.tables import figure
from tsx_runtime.features.monitor.messages import MonitorSample
from tsx_runtime.features.monitor.statistics.columns import GUESS_ROWS, Extractor, RowFacts
from tsx_runtime.features.monitor.statistics.facts import category_of, cosine, number_of
from tsx_runtime.features.monitor.statistics.summaries import summarize
from tsx_runtime.settings.schema import Settings

MAX_REASONS = 3  # shown reasons of failures
KINDS = ", ".join(get_args(FieldKind))


class BaselineFacts:
    """The facts about the requests of a baseline so far."""

    def __init__(self, extractor: Extractor, labels: Sequence[Any] | None) -> None:
        self.failures = Counter[str]()  # failed requests by reason
        self._extractor, self._labels = extractor, labels
        self._rows: list[RowFacts] = []
        self._hits: list[bool] = []  # whether a class was right
        self._deviations: list[float] = []  # absolute errors of numbers

    def add(self, index: int, sample: MonitorSample) -> None:
        """Add a request with its answer; `index` is its position among the labels."""
        rows = self._extractor.rows(sample)
        self._rows += rows
        if not rows:
            reason = sample.answer.decode("utf-8", "replace")
            self.failures[reason if sample.status >= 400 else "it cannot be read"] += 1
        elif self._labels is not None:
            label = self._labels[index]
            truths = label if isinstance(label, list) else [label]
            if len(truths) != len(rows):
                raise UsageError(f"request {index + 1}: {len(rows)} rows, {len(truths)} labels")
            for row, truth in zip(rows, truths, strict=True):
                true_number = number_of(truth)
                if isinstance(row.prediction, str):
                    self._hits.append(row.prediction == category_of(truth))
                elif row.prediction is not None and true_number is not None:
                    self._deviations.append(abs(row.prediction - true_number))

    def baseline(self, source: str) -> MonitorBaseline:
        """Summarize the facts.

        Raises:
            CliError: There are none.
        """
        if not self._rows:
            raise CliError(f"no request can be used: {one_line('; '.join(self.failures))}")
        centres = self._add_similarities()
        return MonitorBaseline(
            rows=len(self._rows),
            created=time.time(),
            source=source,
            fields=self._extractor.fields,
            columns=summarize([row.columns for row in self._rows]),
            centres=centres,
            accuracy=fmean(self._hits) if self._hits else None,
            mean_error=fmean(self._deviations) if self._deviations else None,
        )

    def _add_similarities(self) -> dict[str, list[float]]:
        """Add the similarities of embeddings to their mean to the rows, and return the means."""
        centres = {}
        for column in {column for row in self._rows for column in row.vectors}:
            rows = [row for row in self._rows if column in row.vectors]
            first, *others = (row.vectors[column] for row in rows)
            centre = sum(others, first) / len(rows)
            for row in rows:
                row.columns[column] = cosine(row.vectors[column], centre)
            centres[column] = [float(f"{value:.5g}") for value in centre]
        return centres


def write_baseline(
    model: Path,
    address: str,
    settings: Settings,
    *,
    labels: Path | None,
    limit: int,
    fields: Path | None,
    with_answers: bool,
) -> dict[str, Any]:
    """Write the baseline of an input's requests into the archive, and return its description.

    The requests are chosen from all parts of the input, since files often are in the order of
    their classes.

    Raises:
        CliError: The inputs cannot be read, or no request can be used.
        UsageError: The options contradict the inputs.
        ArchiveError: The archive cannot be read or changed.
        TsxError: The model failed.
    """
    require_archive(model)
    count = sum(1 for _ in read_samples(address, settings.s3_endpoint_url))
    truths = None if labels is None else read_labels(labels, count)
    with open_cached(model, settings) as archive:
        config = archive.config.monitor or MonitorConfig.model_validate({})
    if fields is not None:
        config = config.model_copy(update={"fields": _read_fields(fields)})
    positions = set(Random(0).sample(range(count), min(limit, count)))
    all_samples = enumerate(read_samples(address, settings.s3_endpoint_url))
    samples: Iterator[tuple[int, MonitorSample]]
    samples = (pair for pair in all_samples if pair[0] in positions)
    guess = Extractor(config)
    with ExitStack() as stack:
        head = list(islice(samples, 1))
        samples = chain(head, samples)
        if not with_answers:
            samples = ((index, sample._replace(status=200)) for index, sample in samples)
        elif head and head[0][1].status == UNANSWERED:
            engine = stack.enter_context(open_local(model, settings))
            signature = engine.version.signature
            schema = None if signature is None else signature.input
            guess = Extractor(config, engine.version.monitor_fields, schema)
            samples = answered(engine, samples)
        head = list(islice(samples, GUESS_ROWS))
        for _, sample in head:
            guess.rows(sample)
        guess.freeze()
        facts = BaselineFacts(Extractor(config, guess.fields), truths)
        console, is_hidden = Console(stderr=True), not sys.stderr.isatty()
        for index, sample in track(
            chain(head, samples), "requests", len(positions), console=console, disable=is_hidden
        ):
            facts.add(index, sample)
    baseline = facts.baseline(Path(address).name)
    content = baseline.model_dump_json().encode()
    if len(content) > MAX_BYTES:
        raise CliError(
            f"the baseline has {len(content):,} bytes, and {MAX_BYTES:,} are allowed; leave fields"
            " out with --fields, as the kind `ignore`"
        )
    rewrite_archive(model, {MEMBER: content}, limits=settings.archive_limits())
    failures = dict(facts.failures.most_common(MAX_REASONS))
    described = baseline.model_dump(mode="json", exclude={"centres"})
    return {"model": str(model), "bytes": len(content), "failures": failures, **described}


def _read_fields(file: Path) -> dict[str, FieldKind]:
    try:
        return TypeAdapter(dict[FieldPath, FieldKind]).validate_json(file.read_bytes())
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
    quality = " ".join(
        f"{name} {figure(result[name])}"
        for name in ("accuracy", "mean_error")
        if result[name] is not None
    )
    print(f"{result['model']} has a baseline of {rows}, {size}" + f"; {quality}".rstrip("; "))
    print(
        'to correct a kind, give --fields FILE with {"PATH": "KIND"}, or set `monitor.fields` in'
        f" model-config.yaml; kinds: {KINDS}"
    )
