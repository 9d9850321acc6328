"""tsx-forms.json: its records, its problems, and broken files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.models import make_model
from tsx_archiver import inspect_archive, verify_archive
from tsx_archiver.metadata.forms import (
    FORMS_FILE,
    FormIndex,
    FormRecord,
    InvalidForms,
    form_precision,
    parse_forms,
)

KEPT_FORMS = FormIndex(
    (
        FormRecord("onnx", {"device": "cpu"}, {"a": 1}, {"inputs": []}, {"loss": 0}),
        FormRecord("bf16"),
    ),
    {"model.pth": "12"},
)
MISSING_FORM_TEXT = (
    "forms names gone, which tsx-forms.json does not have; run tsx optimize, or remove the name"
)


def test_records_that_are_written_are_read() -> None:
    assert parse_forms(KEPT_FORMS.content()) == KEPT_FORMS


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"format": 2, "forms": []}',
        b'{"format": 1}',
        b'{"format": 1, "forms": [{"name": "../a"}]}',
        b"[" * 10_000,
        b'{"format": 1, "made_of": {"../secret": "00"}, "forms": []}',
    ],
)
def test_a_file_that_cannot_be_read_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidForms, match="Run tsx optimize again"):
        parse_forms(content)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("openvino-int8", "int8"),
        ("int8-static-bf16", "int8"),
        ("compile-bf16", "bf16"),
        ("pruned-25", "pruned"),
        ("onnx", None),
    ],
)
def test_the_name_of_a_form_tells_its_precision(name: str, precision: str | None) -> None:
    assert form_precision(name) == precision


def test_forms_of_other_weights_are_stale() -> None:
    assert KEPT_FORMS.stale_since({"model.pth": "12", "other": "1"}) is None
    assert KEPT_FORMS.stale_since({}) is None  # other archivers write no checksums
    assert KEPT_FORMS.stale_since({"model.pth": "13"}) == "model.pth"
    assert KEPT_FORMS.problems((), {"model.pth": "13"}) == []


def test_an_archive_is_inspected_and_verified_with_its_forms(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "m", "", config="forms: [onnx, gone, reference]\n")
    (directory / FORMS_FILE).write_bytes(KEPT_FORMS.content())
    inspection = inspect_archive(directory)
    assert ([form.name for form in inspection.forms.forms], inspection.problems) == (
        ["onnx", "bf16"],
        [MISSING_FORM_TEXT],
    )
    assert MISSING_FORM_TEXT in [finding.text for finding in verify_archive(directory)]
    (directory / FORMS_FILE).write_text(json.dumps({"format": 7}))
    assert "format 7" in inspect_archive(directory).problems[0]
