"""The samples of a model: from its archive, its warm-up requests, or generated."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from tsx_runtime.api.management.samples import sample_of
from tsx_runtime.core.workers.signature import ModelSignature
from tsx_runtime.recordings import Recorded, encode, file_head


def version(directory: Path, *warmup: str, kind: str | None = None) -> Any:
    workers = [SimpleNamespace(input=kind)]
    config = SimpleNamespace(
        warmup=[SimpleNamespace(file=file, content_type=None) for file in warmup]
    )
    return SimpleNamespace(
        archive=SimpleNamespace(directory=directory),
        config=config,
        workers=workers,
        handler="handler.py",
        signature=None,
    )


def test_samples_come_from_the_archive_then_warm_up_then_generated_inputs(tmp_path: Path) -> None:
    assert sample_of(version(tmp_path)) is None
    generated = sample_of(version(tmp_path, kind="image"))
    assert generated is not None
    assert (generated.source, generated.content_type) == ("generated", "image/png")
    assert Image.open(io.BytesIO(generated.body)).convert("RGB").getpixel((223, 0)) == (253, 0, 128)
    text = sample_of(version(tmp_path, kind="text"))
    assert text is not None
    assert text.body.decode().startswith("The quick")

    (tmp_path / "a.tsxrec").write_bytes(
        file_head("m") + encode(Recorded(1.0, "1.0", "", [("Content-Type", "text/csv")], b"1,2"))
    )
    assert sample_of(version(tmp_path, "gone.json", "a.tsxrec", kind="image")) == (
        "a.tsxrec",
        "text/csv",
        b"1,2",
    )
    (tmp_path / "warm.json").write_text("[1]")
    assert sample_of(version(tmp_path, "warm.json", "a.tsxrec")) == (
        "warm.json",
        "application/json",
        b"[1]",
    )
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "seven").write_text("7 and more")
    assert sample_of(version(tmp_path, "warm.json")) == (
        "samples/seven",
        "text/plain; charset=utf-8",
        b"7 and more",
    )


@pytest.mark.parametrize("path", ["samples/key", "../key"])
def test_samples_outside_the_archive_are_ignored(tmp_path: Path, path: str) -> None:
    (tmp_path / "key").write_text("secret")
    archive = tmp_path / "archive"
    (archive / "samples").mkdir(parents=True)
    (archive / "samples" / "key").symlink_to(tmp_path / "key")
    assert sample_of(version(archive, path)) is None


def test_the_content_type_of_a_recorded_sample_is_used_only_if_it_can_be_a_header(
    tmp_path: Path,
) -> None:
    for kind in ("text/html\r\nset-cookie: a=b", "text/\u0105", ""):
        (tmp_path / "a.tsxrec").write_bytes(
            file_head("m") + encode(Recorded(1.0, "1.0", "", [("Content-Type", kind)], b"[1, 2]"))
        )
        assert sample_of(version(tmp_path, "a.tsxrec")) == (
            "a.tsxrec",
            "application/json",
            b"[1, 2]",
        )


def test_the_example_of_a_signature_is_used_before_a_generated_input(tmp_path: Path) -> None:
    typed = version(tmp_path, kind="text")
    typed.signature = ModelSignature(input={}, example={"text": "ä"})
    expected = ("generated", "application/json", '{"text": "ä"}'.encode())
    assert sample_of(typed) == expected
