"""MLmodel, by which MLflow describes a model's directory: its flavours, its signature, and the run
that it comes from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tsx_archiver.errors import CannotPack
from tsx_archiver.metadata.safeyaml import load_yaml_file
from tsx_archiver.names import path_fault, shown

FILE = "MLmodel"
DIRECTORY = "mlflow_model"  # of an archive: the model's directory as MLflow wrote it
PYTORCH, PYFUNC = "mlflow_pytorch", "mlflow_pyfunc"  # the handlers of such archives
MANIFEST_KEY = "mlflow"  # of an archive's manifest: where the model comes from
PYFUNC_FLAVOR = "python_function"
_PATHS = (  # keys of flavors that MLflow joins to the path of the model's directory
    *("code", "data", "model_binary", "model_code_path", "model_data", "model_path"),
    *("parameters_path", "path", "pickled_model", "saved_model_dir", "serialized_explainer"),
)
_NUMBERS = ("float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool")
_EXAMPLES = {
    "boolean": False,
    "integer": 0,
    "long": 0,
    "float": 0.0,
    "double": 0.0,
    "string": "text",
    "datetime": "2026-01-01T00:00:00",
}


class SignatureTensor(NamedTuple):
    """A tensor of a signature.

    `shape` is that of a row, without the dimension of the batch; None where any size fits.
    """

    name: str
    dtype: str  # as numpy calls it
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class MLmodel:
    """`data` is the whole document."""

    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def flavors(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.data.get("flavors") or {}
        return found

    @property
    def flavor(self) -> str:
        """The model's own one: every other library's model is one of Python functions as well."""
        return next((name for name in self.flavors if name != PYFUNC_FLAVOR), PYFUNC_FLAVOR)

    @cached_property
    def inputs(self) -> list[dict[str, Any]]:
        """Of the signature; empty without one."""
        return list(json.loads((self.data.get("signature") or {}).get("inputs") or "[]"))

    @property
    def tensors(self) -> tuple[SignatureTensor, ...]:
        """The inputs where all of them are tensors of numbers whose rows can be joined with those
        of other requests; else empty.
        """
        found = []
        for each in self.inputs:
            spec = each.get("tensor-spec") or {}
            shape = spec.get("shape") or ()
            if spec.get("dtype") not in _NUMBERS or not shape or shape[0] != -1:
                return ()
            found.append(
                SignatureTensor(
                    each.get("name") or "",
                    spec["dtype"],
                    tuple(None if size == -1 else size for size in shape[1:]),
                )
            )
        return tuple(found)

    @property
    def example(self) -> dict[str, Any] | None:
        """A request with one row, of a signature whose columns have plain types."""
        types = [each.get("type") for each in self.inputs]
        if not types or not all(kind in _EXAMPLES for kind in types):
            return None
        row = [_EXAMPLES[str(kind)] for kind in types]
        if not all(each.get("name") for each in self.inputs):
            return {"inputs": [row]}
        return {
            "dataframe_split": {"columns": [each["name"] for each in self.inputs], "data": [row]}
        }

    @property
    def handler(self) -> str:
        """By torch alone where the signature says which tensors the model takes, else by MLflow.

        Raises CannotPack.
        """
        if "pytorch" in self.flavors and self.tensors:
            return PYTORCH
        if PYFUNC_FLAVOR in self.flavors:
            return PYFUNC
        text = "Log it with a signature: mlflow.models.infer_signature(inputs, outputs)."
        raise CannotPack(
            f"The MLflow model has the flavours {', '.join(self.flavors)}, without {PYFUNC_FLAVOR},"
            f" and no tensors. {text}"
        )


def read_mlmodel(directory: Path) -> MLmodel:
    """Raises ArchiveError."""
    data = load_yaml_file(directory / FILE)
    try:
        model = MLmodel(data)
        if not model.flavors or not all(isinstance(each, dict) for each in model.flavors.values()):
            raise ValueError("it has no flavors")
        _ = model.tensors, model.example  # which raise for a signature that is none
        for name in _named_paths(model.flavors):
            if fault := path_fault(name):
                raise ValueError(
                    f"the file {shown(name)} of its flavors is not the model's own: {fault}"
                )
    except (AttributeError, TypeError, ValueError) as error:
        raise CannotPack(
            f"{directory / FILE} does not describe a model: {error}. Save the model again with"
            " MLflow."
        ) from error
    return model


def _named_paths(values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _named_paths(value)
        elif key in _PATHS and value:
            yield str(value)
