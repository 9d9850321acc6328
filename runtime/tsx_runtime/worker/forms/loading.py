"""The loading of a form: the first of the model's `forms` that fits this worker.

If no form fits, the archive's own model is loaded.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tsx_archiver.metadata.forms import (
    FORMS_FILE,
    REFERENCE,
    FormIndex,
    FormRecord,
    InvalidForms,
    parse_forms,
)
from tsx_archiver.storage.digest import content_digest
from tsx_runtime.worker.exceptions import LoadError, describe_error
from tsx_runtime.worker.forms.bound import check_bound
from tsx_runtime.worker.forms.form import FormSource
from tsx_runtime.worker.forms.kinds import known_forms
from tsx_runtime.worker.forms.signature import Signature

logger = logging.getLogger("tsx.worker")


class LoadedForm(NamedTuple):
    """A loaded model.

    Attributes:
        model: The model, which is called in the same way as the archive's own.
        name: The form's name, or REFERENCE if no form fits.
        passed_over: The reasons why earlier forms of `forms` are not used.
    """

    model: Any
    name: str
    passed_over: tuple[str, ...]


class FormModel:
    """A graph that is called in the same way as the archive's own model.

    If the graph was not built for a call, the archive's own model answers it, and is loaded at the
    first such call. Attributes that this class lacks are looked up in that model, too. `to`, `eval`
    and `forward` do not load it.
    """

    def __init__(
        self,
        name: str,
        graph: Callable[..., Sequence[torch.Tensor]],
        signature: Signature,
        reference: Callable[[], Any],
    ) -> None:
        self.form = name
        self.signature = signature
        self._graph = graph
        self._reference = reference

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = self.signature.tensors(args, kwargs)
        if tensors is None:
            return self._call_reference(args, kwargs)
        return self.signature.result(self._graph(*(tensor.contiguous() for tensor in tensors)))

    forward = __call__

    def to(self, *args: Any, **kwargs: Any) -> FormModel:
        """Return the model unchanged: the graph is on its device already."""
        return self

    def eval(self) -> FormModel:
        return self

    @property
    def _orig_mod(self) -> Any:
        """The original model, for gradients and for inspecting its layers.

        torch.compile uses this name.
        """
        model = self._reference()
        return getattr(model, "_orig_mod", model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reference(), name)

    def _call_reference(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        _warn_once(self.form)
        return self._reference()(*args, **kwargs)


@functools.cache
def _warn_once(name: str) -> None:
    logger.warning(
        "the form %s was not built for a call with such arguments, so the archive's own model"
        " answers it: run tsx optimize again with inputs like these",
        name,
    )


def configured_forms(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return `forms` of model-config.yaml.

    Raises:
        LoadError: The value is not a list of names.
    """
    value = config.get("forms")
    if value is None:
        return ()
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise LoadError(
            f"forms in model-config.yaml is {value!r}; it must be a list of names from {FORMS_FILE}"
        )
    return tuple(names)


def load_form(
    names: Sequence[str],
    model_dir: Path,
    manifest: Mapping[str, Any],
    load: Callable[[], Any],
    device: torch.device,
) -> LoadedForm:
    """Load the first form that fits.

    Args:
        names: The forms in order of preference.
        model_dir: The directory of the model.
        manifest: The manifest of the archive.
        load: Loads the archive's own model.
        device: The device of the worker.
    """
    passed_over = list[str]()
    reference = _load_once(load)
    for name in names:
        if name == REFERENCE:
            break
        try:
            model = _load_record(
                _find_record(name, model_dir, manifest, device), model_dir, reference, load, device
            )
            return LoadedForm(model, name, tuple(passed_over))
        except MemoryError:
            raise
        except (_UnusableForm, InvalidForms) as error:
            reason = str(error)
        except Exception as error:  # A library may raise anything.
            text = str(error) if isinstance(error, LoadError) else describe_error(error)
            reason = f"it cannot be loaded: {text}"
            logger.warning("the form %s cannot be loaded", name, exc_info=True)
        # The front end logs it once for all workers.
        passed_over.append(f"{name}: {reason}")
    return LoadedForm(reference(), REFERENCE, tuple(passed_over))


class _UnusableForm(Exception):
    """The error if this worker cannot use a form; its text is the reason."""


def _find_record(
    name: str, model_dir: Path, manifest: Mapping[str, Any], device: torch.device
) -> FormRecord:
    """Return the record of a form that fits.

    Raises:
        _UnusableForm: The form is missing, or does not fit this worker or these weights.
        InvalidForms: The index is invalid.
        Exception: The index has wrong values.
    """
    path = model_dir / FORMS_FILE
    forms = parse_forms(path.read_bytes()) if path.is_file() else FormIndex()
    record = forms.named(name)
    if record is None:
        raise _UnusableForm(f"{FORMS_FILE} has no such form")
    # `_stale_reason` may read the weights.
    if reason := check_bound(record.bound, device) or _stale_reason(forms, model_dir, manifest):
        raise _UnusableForm(reason)
    return record


def _load_record(
    record: FormRecord,
    model_dir: Path,
    reference: Callable[[], Any],
    load_copy: Callable[[], Any],
    device: torch.device,
) -> Any:
    form = known_forms().get(record.name)
    if form is None:
        raise LoadError(
            "this version of tsx does not know it; update tsx, or run tsx optimize again"
        )
    if missing := form.missing():
        raise LoadError(missing)
    signature = None if record.signature is None else Signature.from_json(record.signature)
    directory = model_dir / record.directory
    model = form.load(
        FormSource(directory, record.settings, signature, reference, load_copy, device)
    )
    if not form.is_graph:
        return model
    if signature is None:
        raise LoadError(f"its signature is missing in {FORMS_FILE}; run tsx optimize again")
    return FormModel(record.name, model, signature, reference)


def _stale_reason(forms: FormIndex, model_dir: Path, manifest: Mapping[str, Any]) -> str | None:
    """Explain why the forms are out of date; None if they are not.

    A form that was built from other weights would return their results. A file without a checksum
    in the manifest, such as in a model directory, is hashed.
    """
    checksums = manifest.get("sha256")
    digests = checksums if isinstance(checksums, Mapping) else {}
    changed_file = forms.stale_since(
        {name: digests.get(name) or _file_digest(model_dir / name) for name in forms.made_of}
    )
    return (
        None
        if changed_file is None
        else f"{changed_file} has changed since the form was built from it; run tsx optimize again"
    )


def _file_digest(path: Path) -> str:
    if not path.is_file():
        return "none"
    with path.open("rb") as file:
        return content_digest(file)


def _load_once(load: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that loads the model only once, even if several threads call it.

    A second copy might not fit into the memory.
    """
    lock, cached = threading.RLock(), functools.cache(load)

    def reference() -> Any:
        with lock:
            return cached()

    return reference
