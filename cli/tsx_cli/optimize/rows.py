"""The rows of an optimization: its inputs in two disjoint sets, and their labels."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tsx_archiver import OpenArchive, inspect_archive
from tsx_cli.bench.load.inputs import choose_payloads, payloads_of_archive
from tsx_cli.bench.load.payloads import Payload, mix
from tsx_cli.bench.load.results import Inputs
from tsx_cli.common.failure import UsageError
from tsx_cli.common.inputs import INDEX_TO_NAME
from tsx_cli.common.options import archive_limits
from tsx_cli.optimize.guard.labels import read_labels
from tsx_cli.optimize.options import OptimizeOptions
from tsx_cli.optimize.prove import MAX_CALIBRATION_ROWS
from tsx_runtime.shared.class_names import read_class_names

MIN_ROWS = 8


class Rows(NamedTuple):
    """The inputs in two disjoint sets."""

    calibration: list[Payload]
    held_out: list[Payload]
    labels: list[Any] | None  # the held-out rows' labels
    class_names: Mapping[str, str] = {}  # keys: numbers of classes

    def digest(self) -> str:
        """Return a digest that changes with any row, any label, or the division."""
        digest = hashlib.sha256(json.dumps([len(self.calibration), self.labels]).encode())
        for payload in (*self.calibration, *self.held_out):
            digest.update(
                json.dumps(
                    [payload.content_type, payload.headers, payload.query, len(payload.body)]
                ).encode()
            )
            digest.update(payload.body)
        return digest.hexdigest()


def read_rows(archive: OpenArchive, options: OptimizeOptions) -> tuple[Rows, Inputs]:
    """Return the rows of the options, or else of the archive, and the summary of all inputs.

    Raises:
        UsageError: There are no inputs, or too few.
        CliError: An input, or the file of labels, cannot be read.
        ArchiveError: The archive cannot be read.
    """
    inputs = [Path(path) for path in options.inputs]
    if (
        not inputs
        and payloads_of_archive(inspect_archive(archive.source, limits=archive_limits())) is None
    ):
        raise UsageError(
            "name typical inputs, since made-up ones prove nothing: tsx optimize"
            f" {archive.source} --input DIR"
        )
    payloads, source = choose_payloads(
        archive.source, inputs, seed=options.seed, content_type=options.content_type
    )
    labels = None if options.labels is None else read_labels(Path(options.labels), payloads)
    rows = divide_rows(payloads, labels, options.seed, options.rows)
    with suppress(ValueError):  # The file may have a format that only the user's handler reads.
        names = read_class_names(archive.directory / INDEX_TO_NAME)
        rows = rows._replace(class_names=names or {})
    return rows, mix(payloads, source)


def divide_rows(
    payloads: Sequence[Payload],
    labels: Sequence[Any] | None,
    seed: int,
    max_rows: int | None = None,
) -> Rows:
    """Return a random quarter of the distinct payloads, and the others with their labels.

    Raises:
        UsageError: There are too few payloads.
    """
    pairs = zip(payloads, [None] * len(payloads) if labels is None else labels, strict=True)
    unique = list(
        {
            (payload.body, payload.content_type, payload.query): (payload, label)
            for payload, label in pairs
        }.values()
    )
    random.Random(seed).shuffle(unique)
    unique = unique[:max_rows]
    if len(unique) < MIN_ROWS:
        raise UsageError(
            f"--input: {len(unique)} different inputs are too few; give at least {MIN_ROWS}, or"
            " hundreds to show a loss of half a percent"
        )
    calibration_count = min(len(unique) // 4, MAX_CALIBRATION_ROWS)
    held_out = unique[calibration_count:]
    held_out_labels = None if labels is None else [label for _, label in held_out]
    return Rows(
        [payload for payload, _ in unique[:calibration_count]],
        [payload for payload, _ in held_out],
        held_out_labels,
    )
