"""`tsx-forms.json`: the forms of a model that an archive holds beside the original, as `tsx optimize` writes them.

    {"format": 1,
     "made_of": {"model.pth": sha256, "model.py": sha256},     the members that the forms were built from
     "forms": [{"name": "openvino-int8",                        its files are in tsx-forms/openvino-int8/
                "bound": {"device": "cpu", "cpu": ["avx512_vnni"], "torch": "2.13", "packages": {"openvino": "2026.4"}},
                "settings": {...},                              what its `load` reads
                "signature": {...},                             how the model is called, for forms that are a graph
                "measured": {...}}]}                            speed, loss, memory: for people and for `tsx bench`

`forms:` of model-config.yaml names those that a server is to try, in that order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

FORMS_FILE = "tsx-forms.json"
FORMS_DIRECTORY = "tsx-forms"
REFERENCE = "reference"  # the archive's own model, which no form may be called
FORMAT = 1
LARGEST = 4 << 20  # bytes of tsx-forms.json
NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")


class InvalidForms(ValueError):
    """Says what is wrong with a tsx-forms.json."""


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
        """Of its files, in the archive."""
        return f"{FORMS_DIRECTORY}/{self.name}"


@dataclass(frozen=True)
class KeptForms:
    """The content of a tsx-forms.json."""

    forms: tuple[FormRecord, ...] = ()
    made_of: Mapping[str, str] = field(default_factory=dict)

    def named(self, name: str) -> FormRecord | None:
        return next((form for form in self.forms if form.name == name), None)

    def stale_since(self, checksums: Mapping[str, Any]) -> str | None:
        """The member that the forms were built from and that is another one now. `checksums` are those of the manifest."""
        return next((name for name, digest in self.made_of.items() if checksums.get(name, digest) != digest), None)

    def content(self) -> bytes:
        given = {"format": FORMAT, "made_of": dict(self.made_of), "forms": [asdict(form) for form in self.forms]}
        return json.dumps(given, indent=1, ensure_ascii=False).encode() + b"\n"


def parse_forms(content: bytes) -> KeptForms:
    """Raises InvalidForms. The archive may come from anybody: only the types are trusted."""
    try:
        if len(content) > LARGEST:
            raise ValueError("it is too large")
        given = json.loads(content)
        if given["format"] != FORMAT:
            raise ValueError(f"it is of format {given['format']!r}, and this tsx reads format {FORMAT}")
        made_of = {str(name): str(digest) for name, digest in given.get("made_of", {}).items()}
        return KeptForms(tuple(map(_form, given["forms"])), made_of)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidForms(f"{FORMS_FILE} cannot be read ({error}). Run tsx optimize again.") from error


def _form(given: Mapping[str, Any]) -> FormRecord:
    name, signature = given["name"], given.get("signature")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a form")
    return FormRecord(
        name, dict(given["bound"]), dict(given["settings"]), None if signature is None else dict(signature), dict(given.get("measured", {}))
    )
