"""`tsx-forms.json`: the forms that `tsx optimize` adds to the original model in an archive.

    {"format": 1,
     "made_of": {"model.pth": sha256, "model.py": sha256},  members from which the forms were built
     "forms": [{"name": "openvino-int8",                    files in tsx-forms/openvino-int8/
                "bound": {"device": "cpu", "cpu": ["avx512_vnni"], "torch": "2.13",
                          "packages": {"openvino": "2026.4"}},
                "settings": {...},                          arguments of its loader
                "signature": {...},                         inputs, if the form is a graph
                "measured": {...}}]}                        speed, loss and memory

The key `forms` of model-config.yaml names the forms that a server tries, in that order.
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
REFERENCE = "reference"  # the name of the original model
FORMAT = 1
MAX_FILE_BYTES = 4 << 20
NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
# The precisions that a form's name may contain, the least precise first.
PRECISIONS = ("int4", "int8", "pruned", "bf16", "fp16")


class InvalidForms(ValueError):
    """A tsx-forms.json cannot be read; the message names the reason."""


@dataclass(frozen=True)
class FormRecord:
    """One form; all its values are JSON."""

    name: str
    bound: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    signature: Mapping[str, Any] | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def directory(self) -> str:
        """The directory of its files in the archive."""
        return f"{FORMS_DIRECTORY}/{self.name}"


@dataclass(frozen=True)
class FormIndex:
    """The content of a tsx-forms.json."""

    forms: tuple[FormRecord, ...] = ()
    made_of: Mapping[str, str] = field(default_factory=dict)

    def named(self, name: str) -> FormRecord | None:
        """Return the form with a name, or None."""
        return next((form for form in self.forms if form.name == name), None)

    def stale_since(self, checksums: Mapping[str, Any]) -> str | None:
        """Return a member that has changed since the forms were built, or None.

        Args:
            checksums: The checksums of the manifest.
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
        """Explain why forms that model-config.yaml names cannot be used on any machine.

        Args:
            wanted: The names of the forms in model-config.yaml.
            checksums: The checksums of the manifest.
        """
        missing = [name for name in wanted if name != REFERENCE and self.named(name) is None]
        problems = [
            f"forms names {name}, which {FORMS_FILE} does not have; run tsx optimize, or remove the"
            " name"
            for name in missing
        ]
        if changed := self.stale_since(checksums) if wanted else None:
            problems.append(
                f"{changed} has changed since the forms were built from it, so none is used; run"
                " tsx optimize again"
            )
        return problems

    def content(self) -> bytes:
        """Return the content of the file."""
        data = {
            "format": FORMAT,
            "made_of": dict(self.made_of),
            "forms": [asdict(form) for form in self.forms],
        }
        return json.dumps(data, indent=1, ensure_ascii=False).encode() + b"\n"


def form_precision(name: str) -> str | None:
    """Return the precision in a form's name, or None if the form keeps the original's."""
    return next((part for part in PRECISIONS if part in name.split("-")), None)


def parse_forms(content: bytes) -> FormIndex:
    """Parse a tsx-forms.json.

    The values inside `bound`, `settings`, `signature` and `measured` are not checked, although
    anybody may have written the archive.

    Raises:
        InvalidForms: The file cannot be read.
    """
    try:
        if len(content) > MAX_FILE_BYTES:
            raise ValueError("it is too large")
        data = json.loads(content)
        if data["format"] != FORMAT:
            raise ValueError(
                f"it is of format {data['format']!r}, and this tsx reads format {FORMAT}"
            )
        made_of = {str(name): str(digest) for name, digest in data.get("made_of", {}).items()}
        if fault := next(filter(None, map(path_fault, made_of)), None):
            raise ValueError(f"it names a file that is not the archive's: {fault}")
        return FormIndex(tuple(map(_form, data["forms"])), made_of)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidForms(
            f"{FORMS_FILE} cannot be read ({error}). Run tsx optimize again."
        ) from error


def _form(data: Mapping[str, Any]) -> FormRecord:
    name, signature = data["name"], data.get("signature")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a form")
    return FormRecord(
        name,
        dict(data["bound"]),
        dict(data["settings"]),
        None if signature is None else dict(signature),
        dict(data.get("measured", {})),
    )
