"""The process of `tsx optimize` that builds one form of a model, or checks which forms fit it.

`python -m tsx_runtime.worker.forms.build` reads a `BuildOrder` as JSON from standard input. It
writes a `BuildReport` as JSON to the file `report`.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch.utils._pytree import tree_map

from tsx_archiver.metadata.forms import REFERENCE, FormRecord
from tsx_runtime import wire
from tsx_runtime.wire import Item, Kind, LoadOrder
from tsx_runtime.worker.exceptions import LoadError, describe_error
from tsx_runtime.worker.execution.batch import ServedModel, answer_batch, send_nowhere
from tsx_runtime.worker.forms.bound import describe_bound
from tsx_runtime.worker.forms.form import FormSource, NotBuilt, Subject
from tsx_runtime.worker.forms.kinds import known_forms
from tsx_runtime.worker.forms.resemblance import ModelResults
from tsx_runtime.worker.forms.signature import ModelCall, NoSignature, Signature
from tsx_runtime.worker.handlers.models.input_spec import InputSpec
from tsx_runtime.worker.model_loading import load_model

logger = logging.getLogger("tsx.worker")


class BuildOrder(TypedDict):
    """An order to build a form of a model, or to check all forms.

    Attributes:
        load: The load order for the worker; its model_config has `forms: [reference]`.
        batches: A file of BATCH frames: the calibration inputs, in batches of several sizes.
        form: The name of the form; None to check all forms.
        directory: An empty directory for the form's files.
        report: The file to write.
    """

    load: LoadOrder
    batches: str
    form: str | None
    directory: str
    report: str


class BuildReport(TypedDict, total=False):
    """The result of checking all forms (`applies`, `labels`) or of a build (`record` or `reason`).

    Attributes:
        applies: For each form, the reason why it cannot be built, or None.
        labels: For each form, its label.
        record: The fields of a FormRecord.
        reason: The reason why the build failed.
    """

    applies: dict[str, str | None]
    labels: dict[str, str]
    record: dict[str, Any]
    reason: str


class RecordingModel:
    """A wrapper of a handler's model that records its calls."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.rows = 0  # the size of the running batch
        self.calls: list[ModelCall] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(ModelCall(_copy_tensors(args), _copy_tensors(kwargs), self.rows))
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def main() -> None:
    order: BuildOrder = json.load(sys.stdin)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    try:
        report = run(order)
    except (NotBuilt, LoadError) as error:
        report = BuildReport(reason=str(error))
    # A compiler or converter may raise anything.
    except Exception as error:
        logger.exception("the form %s was not built", order["form"])
        frame = traceback.extract_tb(error.__traceback__)[-1]
        location = (
            ""
            if str(error)
            else f" in {Path(frame.filename).name}, line {frame.lineno}: {frame.line}"
        )
        report = BuildReport(reason=describe_error(error) + location)
    Path(order["report"]).write_text(json.dumps(report), encoding="utf-8")


def run(order: BuildOrder) -> BuildReport:
    """Check all forms, or build one.

    Raises:
        NotBuilt: The form does not fit the model.
        LoadError: The model cannot be loaded.
        Exception: A library of the form has failed.
    """
    subject = record_calls(load_model(order["load"]), Path(order["batches"]))
    forms, device = known_forms(), subject.device
    if order["form"] is None:
        return BuildReport(
            applies={
                name: form.missing()
                or (
                    form.applies(subject)
                    if device.type in form.devices
                    else f"it runs on {', '.join(sorted(form.devices))}, and this worker runs on"
                    f" {device.type}"
                )
                for name, form in forms.items()
            },
            labels={name: form.label for name, form in forms.items()},
        )
    form, directory, signature = forms[order["form"]], Path(order["directory"]), subject.signature
    is_compared = form.is_graph and signature is not None and not form.compiles
    with torch.no_grad():
        expected = ModelResults.of(subject) if is_compared else None
        settings = form.build(subject, directory)
        if expected is not None:
            loads = (lambda: subject.model,) * 2
            expected.check(form, FormSource(directory, settings, signature, *loads, device))
    record = FormRecord(
        form.name, describe_bound(form, device), settings, signature and signature.as_json()
    )
    return BuildReport(record=asdict(record))


def record_calls(served_model: ServedModel, batches: Path) -> Subject:
    """Answer the calibration inputs, and return the model with its handler's calls of it.

    Raises:
        NotBuilt: The handler does not load its model by `in_form`, or fails for an input.
    """
    handler = served_model.entry.instance
    if getattr(handler, "form", None) != REFERENCE:
        raise NotBuilt(
            f"{served_model.entry.name} loads its model itself: in its initialize, call `self.model"
            " = self.in_form(load)`, a method of BaseHandler, where load() returns the model"
        )
    # The specs are read first: the handler caches them, and could not derive them from a
    # RecordingModel. Handlers that do not take tensors read their requests themselves.
    specs: tuple[InputSpec, ...] = (
        handler._input_specs if getattr(handler, "_takes_tensors", False) else ()
    )
    recorder = handler.model = RecordingModel(handler.model)
    for items in _read_batches(batches):
        recorder.rows = len(items)
        outcome = answer_batch(served_model, items, send_nowhere)
        for status, _, body in outcome.answers:
            if status >= 400:
                raise NotBuilt(
                    "the archive as it is does not answer an input:"
                    f" {bytes(body)[:300].decode(errors='replace')}"
                )
    handler.model = recorder.model
    # Copies that are made outside inference mode are normal tensors.
    calls = [
        ModelCall(_copy_tensors(call.args), _copy_tensors(call.kwargs), call.rows)
        for call in recorder.calls
    ]
    signature, reason = None, ""
    try:
        signature = Signature.of(recorder.model, calls)._replace(
            requests=tuple(spec.as_json() for spec in specs)
        )
    except NoSignature as error:
        reason = str(error)
    return Subject(recorder.model, calls, signature, reason, torch.device(handler.device))


def _read_batches(path: Path) -> Iterator[list[Item]]:
    content = memoryview(path.read_bytes())
    while content:
        header = wire.decode_header(content[: wire.HEADER.size])
        end = wire.HEADER.size + header.size
        frame = wire.decode(header, content[wire.HEADER.size : end])
        assert frame.kind is Kind.BATCH
        yield [(code, bytes(meta), bytes(body)) for code, meta, body in frame.items]
        content = content[end:]


def _copy_tensors(values: Any) -> Any:
    return tree_map(
        lambda value: value.detach().clone() if isinstance(value, torch.Tensor) else value, values
    )


if __name__ == "__main__":
    main()
