"""Loads the first form of an archive's `forms` that fits this worker, else the archive's own
model.
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
    FormRecord,
    InvalidForms,
    KeptForms,
    parse_forms,
)
from tsx_archiver.storage.digest import content_digest
from tsx_runtime.worker.exceptions import LoadError, in_words
from tsx_runtime.worker.forms.bound import mismatch
from tsx_runtime.worker.forms.form import FormSource
from tsx_runtime.worker.forms.kinds import known_forms
from tsx_runtime.worker.forms.signature import Signature

logger = logging.getLogger("tsx.worker")


class LoadedForm(NamedTuple):
    model: Any  # to call as the archive's own
    name: str  # REFERENCE where no form fits
    passed_over: tuple[str, ...]  # for each form before it in `forms`, why it is not used


class FormModel:
    """A graph, called as the archive's own model.

    A call that it was not built for goes to that model, which is loaded for the first one.

    Attributes are that model's, except those that handlers use for each request or right after
    loading.
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
            return self._other_call(args, kwargs)
        return self.signature.result(self._graph(*(each.contiguous() for each in tensors)))

    forward = __call__

    def to(self, *args: Any, **kwargs: Any) -> FormModel:
        """Does nothing: the graph is on its device already."""
        return self

    def eval(self) -> FormModel:
        return self

    @property
    def _orig_mod(self) -> Any:
        """torch.compile's name for the model behind a compiled one: for gradients, and to look at
        its layers.
        """
        model = self._reference()
        return getattr(model, "_orig_mod", model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reference(), name)

    def _other_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        _warn_once(self.form)
        return self._reference()(*args, **kwargs)


@functools.cache
def _warn_once(name: str) -> None:
    logger.warning(
        "the form %s was not built for a call with such arguments, so the archive's own model"
        " answers it: run tsx optimize again with inputs like these",
        name,
    )


def wanted_forms(config: Mapping[str, Any]) -> tuple[str, ...]:
    """`forms` of model-config.yaml. Raises LoadError."""
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
    """`load` loads the archive's own model."""
    passed_over = list[str]()
    reference = _once(load)
    for name in names:
        if name == REFERENCE:
            break
        try:
            model = _loaded(
                _fitting(name, model_dir, manifest, device), model_dir, reference, load, device
            )
            return LoadedForm(model, name, tuple(passed_over))
        except MemoryError:
            raise
        except (_Mismatch, InvalidForms) as error:
            reason = str(error)
        except Exception as error:  # the boundary to a library, which raises whatever it likes
            reason = (
                f"it cannot be loaded: {error if isinstance(error, LoadError) else in_words(error)}"
            )
            logger.warning("the form %s cannot be loaded", name, exc_info=True)
        passed_over.append(f"{name}: {reason}")  # which the front end logs once for all workers
    return LoadedForm(reference(), REFERENCE, tuple(passed_over))


class _Mismatch(Exception):
    """Why this worker cannot run a form of the archive."""


def _fitting(
    name: str, model_dir: Path, manifest: Mapping[str, Any], device: torch.device
) -> FormRecord:
    """Raises _Mismatch, InvalidForms, or whatever wrong values in the index lead to."""
    path = model_dir / FORMS_FILE
    kept = parse_forms(path.read_bytes()) if path.is_file() else KeptForms()
    record = kept.named(name)
    if record is None:
        raise _Mismatch(f"{FORMS_FILE} has no such form")
    if reason := mismatch(record.bound, device) or _stale(
        kept, model_dir, manifest
    ):  # the second may read the weights
        raise _Mismatch(reason)
    return record


def _loaded(
    record: FormRecord,
    model_dir: Path,
    reference: Callable[[], Any],
    fresh: Callable[[], Any],
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
    model = form.load(FormSource(directory, record.settings, signature, reference, fresh, device))
    if not form.is_graph:
        return model
    if signature is None:
        raise LoadError(f"its signature is missing in {FORMS_FILE}; run tsx optimize again")
    return FormModel(record.name, model, signature, reference)


def _stale(kept: KeptForms, model_dir: Path, manifest: Mapping[str, Any]) -> str | None:
    """Forms of other weights answer as those did.

    What the manifest has no checksum of, as in a directory, is read.
    """
    given = manifest.get("sha256")
    known = given if isinstance(given, Mapping) else {}
    changed = kept.stale_since(
        {name: known.get(name) or _digest(model_dir / name) for name in kept.made_of}
    )
    return (
        None
        if changed is None
        else f"{changed} has changed since the form was built from it; run tsx optimize again"
    )


def _digest(path: Path) -> str:
    if not path.is_file():
        return "none"
    with path.open("rb") as file:
        return content_digest(file)


def _once(load: Callable[[], Any]) -> Callable[[], Any]:
    """Loads at the first call, also where several threads call it at once: two copies may not fit
    the memory.
    """
    lock, cached = threading.RLock(), functools.cache(load)

    def reference() -> Any:
        with lock:
            return cached()

    return reference
