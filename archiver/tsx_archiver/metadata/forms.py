"""`tsx-forms.json`: the forms of a model that an archive holds beside the original, as `tsx
optimize` writes them.

    {"format": 1,
     "made_of": {"model.pth": sha256, "model.py": sha256},     the members that the forms were built from
     "forms": [{"name": "openvino-int8",                        its files are in tsx-forms/openvino-int8/
                "bound": {"device": "cpu", "cpu": ["avx512_vnni"], "torch": "2.13", "packages":
                {"openvino": "2026.4"}},
                "settings": {...},                              what its `load` reads
                "signature": {...},                             how the model is called, for forms that are a graph
                "measured": {...}}]}                            speed, loss, memory: for people and for `tsx bench`

`forms:` of model-config.yaml names those that a server is to try, in that order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tsx_archiver.names import path_fault

FORMS_FILE = "tsx-forms.json"
FORMS_DIRECTORY = "tsx-forms"
REFERENCE = "reference"  # the name of the archive's own model
FORMAT = 1
LARGEST_FILE = 4 << 20  # bytes of tsx-forms.json
NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
PRECISIONS = (
    "int4",
    "int8",
    "pruned",
    "bf16",
    "fp16",
)  # words in names of forms, the coarsest first


class InvalidForms(ValueError):
    """A tsx-forms.json cannot be read; the message says why."""


@dataclass(frozen=True)
class FormRecord:
    """One form. All its values are JSON."""

    name: str
    bound: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    signature: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def directory(self) -> str:
        """Where its files are in the archive."""
        return f"{FORMS_DIRECTORY}/{self.name}"


@dataclass(frozen=True)
class KeptForms:
    """The content of a tsx-forms.json."""

    forms: tuple[FormRecord, ...] = ()
    made_of: Mapping[str, str] = field(default_factory=dict)

    def named(self, name: str) -> FormRecord | None:
        return next((form for form in self.forms if form.name == name), None)

    def stale_since(self, checksums: Mapping[str, Any]) -> str | None:
        """A member that has changed since the forms were built from it.

        `checksums` are those of the manifest.
        """
        return next(
            (
                name
                for name, digest in self.made_of.items()
                if checksums.get(name, digest) != digest
            ),
            None,
        )

    def problems(self, wanted: Sequence[str], checksums: Mapping[str, Any]) -> list[str]:
        """Why forms that model-config.yaml names can be used on no machine."""
        missing = [name for name in wanted if name != REFERENCE and self.named(name) is None]
        found = [
            f"forms names {name}, which {FORMS_FILE} does not have; run tsx optimize, or remove the"
            " name"
            for name in missing
        ]
        if changed := self.stale_since(checksums) if wanted else None:
            found.append(
                f"{changed} has changed since the forms were built from it, so none is used; run"
                " tsx optimize again"
            )
        return found

    def content(self) -> bytes:
        given = {
            "format": FORMAT,
            "made_of": dict(self.made_of),
            "forms": [asdict(form) for form in self.forms],
        }
        return json.dumps(given, indent=1, ensure_ascii=False).encode() + b"\n"


def form_precision(name: str) -> str | None:
    """The precision in a form's name; None if the form answers as precisely as the original."""
    return next((word for word in PRECISIONS if word in name.split("-")), None)


def parse_forms(content: bytes) -> KeptForms:
    """Raises InvalidForms.

    Types are checked; values inside `bound`, `settings`, `signature` and `measured` are not:
    anybody may have written the archive.
    """
    try:
        if len(content) > LARGEST_FILE:
            raise ValueError("it is too large")
        given = json.loads(content)
        if given["format"] != FORMAT:
            raise ValueError(
                f"it is of format {given['format']!r}, and this tsx reads format {FORMAT}"
            )
        made_of = {str(name): str(digest) for name, digest in given.get("made_of", {}).items()}
        if fault := next(filter(None, map(path_fault, made_of)), None):
            raise ValueError(f"it names a file that is not the archive's: {fault}")
        return KeptForms(tuple(map(_form, given["forms"])), made_of)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidForms(
            f"{FORMS_FILE} cannot be read ({error}). Run tsx optimize again."
        ) from error


def _form(given: Mapping[str, Any]) -> FormRecord:
    name, signature = given["name"], given.get("signature")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a form")
    return FormRecord(
        name,
        dict(given["bound"]),
        dict(given["settings"]),
        None if signature is None else dict(signature),
        dict(given.get("measured", {})),
    )
