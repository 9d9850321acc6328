"""MLmodel, the file in which MLflow describes a model: its flavors, signature and training run."""

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
DIRECTORY = "mlflow_model"  # the directory of MLflow's files in an archive
PYTORCH, PYFUNC = "mlflow_pytorch", "mlflow_pyfunc"  # handlers
MANIFEST_KEY = "mlflow"  # key of the manifest for the model's origin
PYFUNC_FLAVOR = "python_function"
_PATH_KEYS = (  # keys of flavors that MLflow joins to the path of the model's directory
    *("code", "data", "model_binary", "model_code_path", "model_data", "model_path"),
    *("parameters_path", "path", "pickled_model", "saved_model_dir", "serialized_explainer"),
)
_NUMERIC_DTYPES = (
    "float16",
    "float32",
    "float64",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
)
_EXAMPLE_VALUES = {
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

    Attributes:
        name: The name of the input.
        dtype: The name of the dtype in numpy.
        shape: The shape of one row; None for a dimension of any size.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True)
class MLmodel:
    """A parsed MLmodel file; `data` is its content."""

    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def flavors(self) -> Mapping[str, Any]:
        flavors: Mapping[str, Any] = self.data.get("flavors") or {}
        return flavors

    @property
    def flavor(self) -> str:
        """The flavour of the model's library, or PYFUNC_FLAVOR, which most models have too."""
        return next((name for name in self.flavors if name != PYFUNC_FLAVOR), PYFUNC_FLAVOR)

    @cached_property
    def inputs(self) -> list[dict[str, Any]]:
        """The inputs of the signature; empty if there is no signature."""
        return list(json.loads((self.data.get("signature") or {}).get("inputs") or "[]"))

    @property
    def tensors(self) -> tuple[SignatureTensor, ...]:
        """The inputs, if all are tensors of numbers with a batch dimension; otherwise empty."""
        tensors = []
        for column in self.inputs:
            spec = column.get("tensor-spec") or {}
            shape = spec.get("shape") or ()
            if spec.get("dtype") not in _NUMERIC_DTYPES or not shape or shape[0] != -1:
                return ()
            tensors.append(
                SignatureTensor(
                    column.get("name") or "",
                    spec["dtype"],
                    tuple(None if size == -1 else size for size in shape[1:]),
                )
            )
        return tuple(tensors)

    @property
    def example(self) -> dict[str, Any] | None:
        """A request with one row, or None if a column has no plain type."""
        types = [column.get("type") for column in self.inputs]
        if not types or not all(kind in _EXAMPLE_VALUES for kind in types):
            return None
        row = [_EXAMPLE_VALUES[str(kind)] for kind in types]
        if not all(column.get("name") for column in self.inputs):
            return {"inputs": [row]}
        columns = [column["name"] for column in self.inputs]
        return {"dataframe_split": {"columns": columns, "data": [row]}}

    @property
    def handler(self) -> str:
        """The handler: without MLflow if the signature consists of tensors, otherwise MLflow's.

        Raises:
            CannotPack: The model has neither Python functions nor tensors.
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
    """Read and check the MLmodel of a directory.

    Raises:
        ArchiveError: The file cannot be used.
    """
    data = load_yaml_file(directory / FILE)
    try:
        model = MLmodel(data)
        flavors = model.flavors
        if not flavors or not all(isinstance(keys, dict) for keys in flavors.values()):
            raise ValueError("it has no flavors")
        # These properties raise an error for an invalid signature.
        _ = model.tensors, model.example
        for name in _flavor_paths(model.flavors):
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


def _flavor_paths(values: Mapping[str, Any]) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flavor_paths(value)
        elif key in _PATH_KEYS and value:
            yield str(value)
