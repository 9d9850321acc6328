"""The choice of a form at load: the first that fits; skipped ones have a reason."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.worker.forms.kinds.subjects import IMAGES, images, texts, tied
from tests.support.forms import CPU, built, loaded, subject_of
from tsx_archiver.metadata.forms import FORMS_FILE, FormIndex, FormRecord, parse_forms
from tsx_runtime.worker.forms.kinds import known_forms
from tsx_runtime.worker.forms.loading import FormModel, LoadedForm, load_form
from tsx_runtime.worker.forms.signature import Signature

TORCH = ".".join(torch.__version__.split(".")[:2])


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of an archive that holds one graph."""
    directory = tmp_path_factory.mktemp("archive")
    built(known_forms()["torchscript"], images(), IMAGES, directory)
    return directory


@pytest.fixture
def edit_index(archive: Path) -> Iterator[Any]:
    """Return a function that changes the archive's index for this test."""
    index = archive / FORMS_FILE
    content = index.read_bytes()
    (record,) = parse_forms(content).forms

    def write(change: Callable[[FormRecord], FormRecord] | None = None, **fields: Any) -> None:
        index.write_bytes(FormIndex((change(record) if change else record,), **fields).content())

    yield write
    index.write_bytes(content)


def bound(**differing: Any) -> Callable[[FormRecord], FormRecord]:
    return lambda record: replace(record, bound={**record.bound, **differing})


def load(archive: Path, *names: str, manifest: Mapping[str, Any] | None = None) -> LoadedForm:
    return load_form(names, archive, manifest or {}, images, CPU)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            bound(torch="1.0"),
            f"built with torch 1.0, and this is torch {TORCH}",
        ),
        (
            bound(cpu=["avx9", "sse9"]),
            "a CPU with avx9, sse9, which this one lacks",
        ),
        (bound(device="cuda"), "built for cuda, and this worker runs on cpu"),
        (bound(machine="s390x"), "built for s390x"),
        (
            bound(packages={"no_such_package": "1.2"}),
            "no_such_package 1.2, and this machine has none",
        ),
        (
            lambda record: replace(record, signature=None),
            "its signature is missing",
        ),
        (bound(packages=7), "it cannot be loaded: TypeError: "),
        (
            lambda record: replace(record, name="gone"),
            "tsx-forms.json has no such form",
        ),
    ],
)
def test_a_form_that_does_not_fit_is_skipped_with_the_reason(
    archive: Path, edit_index: Any, change: Any, reason: str
) -> None:
    edit_index(change)
    loaded_form = load(archive, "torchscript")
    assert loaded_form.name == "reference"
    assert reason in loaded_form.passed_over[0]
    assert torch.equal(loaded_form.model(*IMAGES(3)[0]), images()(*IMAGES(3)[0]))


def test_a_form_of_another_version_of_tsx_is_skipped(archive: Path, edit_index: Any) -> None:
    edit_index(lambda record: replace(record, name="of-the-future"))
    loaded_form = load(archive, "of-the-future")
    assert "this version of tsx does not know it" in loaded_form.passed_over[0]


def test_a_form_of_other_weights_is_skipped(archive: Path, edit_index: Any) -> None:
    edit_index(made_of={"model.pth": "a"})
    assert (
        load(archive, "torchscript", manifest={"sha256": {"model.pth": "a"}}).name == "torchscript"
    )
    loaded_form = load(archive, "torchscript", manifest={"sha256": {"model.pth": "b"}})
    assert "model.pth has changed since the form" in loaded_form.passed_over[0]


def test_files_without_a_checksum_in_the_manifest_are_hashed(
    archive: Path, edit_index: Any
) -> None:
    weights = archive / "model.pth"
    weights.write_bytes(b"as they were")
    edit_index(made_of={"model.pth": hashlib.sha256(b"as they were").hexdigest()})
    assert load(archive, "torchscript").name == "torchscript"
    weights.write_bytes(b"trained again")
    assert load(archive, "torchscript").name == "reference"
    assert load(archive, "torchscript", manifest={"sha256": {"other": "a"}}).name == "reference"
    weights.unlink()
    assert load(archive, "torchscript").name == "reference"


def test_threads_that_need_the_archives_model_at_once_load_it_once(archive: Path) -> None:
    loads, barrier = [], threading.Barrier(2)

    def meeting() -> Any:
        loads.append(1)
        with suppress(threading.BrokenBarrierError):
            barrier.wait(0.3)
        return lambda rows: rows

    loaded_form = load_form(["torchscript"], archive, {}, meeting, CPU)
    with ThreadPoolExecutor(2) as threads:
        for answer in threads.map(loaded_form.model, [torch.ones(1)] * 2):
            assert answer.shape == (1,)
    assert len(loads) == 1


def test_the_next_form_that_fits_is_used(archive: Path) -> None:
    loaded_form = load(archive, "no-such-form", "torchscript", "reference")
    assert (loaded_form.name, loaded_form.passed_over) == (
        "torchscript",
        ("no-such-form: tsx-forms.json has no such form",),
    )


def test_forms_after_reference_are_ignored(archive: Path) -> None:
    assert load(archive, "reference", "torchscript").name == "reference"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"format": 99}, "it is of format 99"),
        (
            {"format": 1, "forms": [{"name": "../../x", "bound": {}, "settings": {}}]},
            "'../../x' is not the name of a form",
        ),
    ],
)
def test_with_an_unreadable_index_the_archives_model_runs(
    tmp_path: Path, content: Any, reason: str
) -> None:
    (tmp_path / FORMS_FILE).write_text(json.dumps(content))
    loaded_form = load(tmp_path, "torchscript")
    assert loaded_form.name == "reference"
    assert reason in loaded_form.passed_over[0]


def test_a_call_with_another_signature_runs_in_the_archives_model(
    archive: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def model(*args: Any) -> Any:
        calls.append(args)
        return "its own"

    loaded_form = load_form(["torchscript"], archive, {}, lambda: model, CPU)
    with caplog.at_level(logging.WARNING):
        assert loaded_form.model(torch.ones(2, 3, 9, 9)).shape == (2, 4)
        assert calls == []
        for arguments in (
            (torch.ones(2, 3, 9, 8),),
            (torch.ones(2, 3, 9, 9).double(),),
            (torch.ones(2, 3, 9, 9), 1),
        ):
            assert loaded_form.model(*arguments) == "its own"
    assert len(calls) == 3
    assert (
        sum(
            "was not built for a call with such arguments" in record.message
            for record in caplog.records
        )
        <= 1
    )


def test_a_signature_restores_nested_results_after_json() -> None:
    subject = subject_of(tied(), texts)
    assert subject.signature is not None
    signature = Signature.from_json(json.loads(json.dumps(subject.signature.as_json())))
    assert signature == subject.signature
    args, kwargs = texts(5)
    tensors = signature.tensors(args, kwargs)
    assert tensors is not None
    assert [len(group) for group in signature.arguments(tensors)] == [1, 1]
    assert signature.result([torch.ones(1)]) == {"logits": torch.ones(1)}
    model = FormModel("any", lambda ids, mask: (ids * mask,), signature, tied)
    assert torch.equal(model(*args, **kwargs)["logits"], args[0] * kwargs["mask"])


def test_a_form_that_changes_the_model_and_fails_leaves_the_reference_untouched(
    tmp_path: Path,
) -> None:
    form = known_forms()["bf16"]
    built(form, images(), IMAGES, tmp_path)
    (tmp_path / "tsx-forms" / "bf16" / "weights.safetensors").write_bytes(b"no weights")
    loaded_form = loaded(form, images, tmp_path)
    assert loaded_form.name == "reference"
    assert next(loaded_form.model.parameters()).dtype == torch.float32
