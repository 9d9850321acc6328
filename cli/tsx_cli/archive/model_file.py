"""The kind, the name and the required files of a model, derived from its file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tsx_archiver import (
    BUILTIN_HANDLERS,
    DEFAULT_VERSION,
    ArchiveSpec,
    Manifest,
    ModelFile,
    default_model_name,
    describe_model_file,
    load_model_config,
)
from tsx_archiver.limits import human
from tsx_archiver.metadata.huggingface import MANIFEST_KEY
from tsx_archiver.metadata.mlmodel import MANIFEST_KEY as MLFLOW_KEY
from tsx_archiver.metadata.tabular import HANDLER as TABULAR_HANDLER
from tsx_archiver.metadata.tabular import PACKAGES
from tsx_archiver.opening import MODEL_SUFFIXES
from tsx_archiver.python_file import MANIFEST_KEY as PYTHON_KEY
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.inputs import INDEX_TO_NAME

DEFAULT_HANDLER = "base_handler"
KINDS = {
    "eager": "weights",
    "safetensors": "weights, in safetensors",
    "torchscript": "TorchScript",
    "exported": "a program of torch.export",
    "aotinductor": "a package compiled by AOTInductor",
    "onnx": "ONNX",
    "skops": "scikit-learn, by skops",
    "pickle": "a pickle",
    "xgboost": "XGBoost",
    "lightgbm": "LightGBM",
    "unknown": "a file that only its handler knows",
}
# Handlers of TorchServe that tsx lacks.
UNSUPPORTED_HANDLERS = ("vllm_handler", "dali_image_classifier", "trt_llm_handler")
NEEDS_MODEL_FILE = ("eager", "safetensors")
# Names that save_pretrained gives to the shards of large weights.
SHARD = re.compile(r"-\d+-of-(?!0*1\.)\d+\.|\.index\.json$")


@dataclass(frozen=True)
class HandlerFiles:
    """The given handler, model file and extra files of a model."""

    handler: str | None = None
    model_file: Path | None = None
    extra_files: Sequence[str] = field(default=())
    index_to_name: bool = True

    @property
    def is_given(self) -> bool:
        return self.handler is not None or self.model_file is not None or bool(self.extra_files)

    @property
    def has_own_handler(self) -> bool:
        """Whether a handler of the user loads the model."""
        return self.handler is not None and self.handler not in BUILTIN_HANDLERS


def infer_spec(
    path: Path | None,
    parts: HandlerFiles,
    *,
    name: str | None = None,
    version: str | None = None,
    config_file: Path | None = None,
) -> tuple[ArchiveSpec, list[str]]:
    """Return the spec of the archive, and notes.

    Raises:
        UsageError: Something is missing.
        ArchiveError: A file cannot be read.
    """
    if path is None and not ((parts.has_own_handler or parts.model_file) and name):
        raise UsageError(
            "name a model file; for a model without one, give --name and your own --handler or"
            " --model-file"
        )
    handler, effect = parts.handler or DEFAULT_HANDLER, "tensors in, tensors out, as JSON"
    model_name = name or default_model_name(path or "")
    notes = []
    if path is not None:
        model = describe_model_file(path)
        check_model_file(model, parts, config_file)
        if parts.handler is None and model.kind in PACKAGES:
            handler, effect = TABULAR_HANDLER, "columns in, predictions out, as JSON"
        notes.append(f"{path.name}: {kind_text(model)}, {human(model.size)}")
        if model.problem is not None and path.suffix.lower() in MODEL_SUFFIXES:
            notes.append(
                f"note: {model.problem} It is packed anyway, because your own handler may be able"
                " to load it."
            )
    notes.append(f"name {model_name}, version {version or DEFAULT_VERSION}")
    notes.append(f"handler {handler}" + ("" if parts.handler else f": {effect}"))
    if handler in UNSUPPORTED_HANDLERS:
        notes.append(
            f"note: TorchServe has {handler}, but this version of tsx does not, so it cannot serve"
            " the model"
        )
    extra = list(parts.extra_files)
    class_names = _index_to_name(path, parts)
    if class_names is not None:
        extra.append(str(class_names))
        notes.append(
            f"{class_names}: found beside the model file and added (--no-index-to-name leaves it out)"
        )
    spec = ArchiveSpec(
        model_name=model_name,
        version=version or DEFAULT_VERSION,
        handler=handler,
        serialized_file=path,
        model_file=parts.model_file,
        extra_files=extra,
    )
    return spec, notes


def kind_text(model: ModelFile) -> str:
    text = KINDS[model.kind]
    return text if model.detail in ("", text) else f"{text} ({model.detail})"


def kind_of_directory(manifest: Manifest) -> str:
    """Return the kind of a model without a serialized file."""
    if MLFLOW_KEY in manifest.data:
        return "MLflow model"
    if PYTHON_KEY in manifest.data:
        return "Python file"
    return "Hugging Face model" if MANIFEST_KEY in manifest.data else "code only"


def check_model_file(
    model: ModelFile, parts: HandlerFiles, config_file: Path | None = None
) -> None:
    """Refuse a file that no handler, or no built-in handler, can load.

    Raises:
        CliError: The file is broken.
        UsageError: Something has to be added or changed.
    """
    if model.problem is not None and model.is_broken:
        raise CliError(model.problem)
    if parts.has_own_handler:
        return
    if model.path.suffix == ".py":
        code = shlex.quote(str(model.path))
        raise UsageError(
            f"{model.path} is Python code, not a trained model, and has no function or method"
            " `predict`. To pack weights with it: tsx"
            f" archive WEIGHTS --model-file {code}. To pack it as a handler: tsx archive --name"
            f" {default_model_name(model.path)} --handler {code}"
        )
    if SHARD.search(model.path.name):
        raise UsageError(
            f"{model.path} is one of several files that hold the weights together; "
            "name the directory that save_pretrained wrote, or save all weights in one file"
        )
    if model.problem is not None:
        raise CliError(model.problem)
    if model.whole_object is not None:
        if config_file and load_model_config(config_file)[0].weights_only is False:
            return
        raise UsageError(
            f"{model.path} is a whole pickled {model.whole_object}, which loads only together with"
            " the code that defines it. Save torch.save(model.state_dict(), FILE) and add"
            " --model-file with the class, or torch.export.save a program. If you trust the file,"
            " set `weightsOnly: false` in the --config-file, and add its code with --extra-files"
        )
    if model.kind in NEEDS_MODEL_FILE and parts.model_file is None:
        raise UsageError(
            f"{model.path} contains weights without the model's class; add --model-file FILE.py,"
            " the file with the model's class"
        )
    if model.kind not in NEEDS_MODEL_FILE and parts.model_file is not None:
        raise UsageError(
            f"{model.path} is {KINDS[model.kind]} and contains its network; remove --model-file"
        )


def _index_to_name(path: Path | None, parts: HandlerFiles) -> Path | None:
    """Return the file of class names in the model file's directory, unless one is given."""
    if (
        path is None
        or not parts.index_to_name
        or any(Path(extra).name == INDEX_TO_NAME for extra in parts.extra_files)
    ):
        return None
    file = path.parent / INDEX_TO_NAME
    return file if file.is_file() else None
