"""The labels of --labels FILE, in the order of the requests."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from tsx_cli.bench.load.payloads import Payload
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.optimize.guard.answers import best_labels, decode
from tsx_runtime.plugins import ComparedAnswer

_FORMATS = (
    'a .json object {"FILE": LABEL}, .jsonl lines {"file": "FILE", "label": LABEL}, a .csv of'
    " FILE,LABEL, or .jsonl labels in order"
)


def read_labels(file: Path, payloads: Sequence[Payload]) -> list[Any]:
    """Return a label for each payload.

    Raises:
        CliError: The file cannot be read, or lacks the label of a request.
        UsageError: The labels are by file name, but the requests have no names.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(
            f"--labels {file} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error
    try:
        labels = _parse(file.suffix, text)
    except (ValueError, RecursionError) as error:
        raise CliError(f"--labels {file}: {error}; it is {_FORMATS}") from error
    if isinstance(labels, Mapping):
        return _labels_by_name(file, labels, payloads)
    if len(labels) != len(payloads):
        raise CliError(
            f"--labels {file} has {len(labels)} labels in order for {len(payloads)} requests; give"
            " one for each request"
        )
    return labels


def _parse(suffix: str, text: str) -> Mapping[str, Any] | list[Any]:
    if suffix == ".json":
        labels = json.loads(text)
        if not isinstance(labels, dict):
            raise ValueError("it is not a JSON object")
        return labels
    if suffix == ".csv":
        rows = [row for row in csv.reader(text.splitlines()) if row]
        if bad_row := next((row for row in rows if len(row) != 2), None):
            raise ValueError(f"'{','.join(bad_row)}' is not a file and a label")
        pairs = [(name.strip(), label.strip()) for name, label in rows]
        return _labels_without_duplicates(pairs[1:] if pairs[:1] == [("file", "label")] else pairs)
    if suffix != ".jsonl":
        raise ValueError(f"'{suffix}' is not known")
    lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    lines_with_file = [
        line for line in lines if isinstance(line, dict) and line.keys() == {"file", "label"}
    ]
    if lines_with_file and len(lines_with_file) < len(lines):
        raise ValueError("some lines have a file, and some do not")
    return (
        _labels_without_duplicates([(str(line["file"]), line["label"]) for line in lines_with_file])
        if lines_with_file
        else lines
    )


def _labels_without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    labels = dict(pairs)
    if len(labels) < len(pairs):
        raise ValueError("a file has two labels")
    return labels


def _labels_by_name(
    file: Path, labels: Mapping[str, Any], payloads: Sequence[Payload]
) -> list[Any]:
    names = [payload.name for payload in payloads if payload.name is not None]
    if len(names) < len(payloads):
        raise UsageError(
            f"--labels {file} names files, but the requests have no file names; give .jsonl labels"
            " in their order"
        )
    base_names = [PurePosixPath(name).name for name in names]
    is_unique = len(set(base_names)) == len(base_names)
    keys = [
        name if name in labels or not is_unique else base_name
        for name, base_name in zip(names, base_names, strict=True)
    ]
    missing = [name for name, key in zip(names, keys, strict=True) if key not in labels]
    if len(missing) == len(names) and labels:
        raise CliError(
            f"--labels {file} has no label for any request: it names '{next(iter(labels))}', and a"
            f" request is '{names[0]}'"
        )
    if missing:
        raise CliError(
            f"--labels {file} has no label for {len(missing)} of {len(names)} requests, such as"
            f" '{missing[0]}'; add them"
        )
    return [labels[key] for key in keys]


def with_names(
    labels: Sequence[Any], reference: Sequence[ComparedAnswer], names: Mapping[str, str]
) -> list[Any]:
    """Replace class numbers by class names in rows that the model answers with names."""
    named_labels = list(labels)
    for row, answer in enumerate(reference):
        with suppress(ValueError):  # An answer may not rank labels.
            if str(named_labels[row]) not in names.values() and not best_labels(
                decode(answer)
            ).isdisjoint(names.values()):
                named_labels[row] = names.get(str(named_labels[row]), named_labels[row])
    return named_labels
