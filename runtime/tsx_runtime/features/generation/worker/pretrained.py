"""The loading of directories that Hugging Face's `save_pretrained` has written.

The module reads the settings, reports the progress and errors of loading, and adds adapters.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from PIL import Image

from tsx_archiver.metadata.huggingface import (
    ADAPTER_WEIGHTS,
    ADAPTERS,
    CONFIG,
    DIRECTORY,
    MANIFEST_KEY,
)
from tsx_archiver.metadata.modelconfig import HuggingFaceConfig, parse_model_config
from tsx_runtime.features.generation.worker.media_files import UrlSettings
from tsx_runtime.worker.exceptions import LoadError, describe_error
from tsx_runtime.worker.handler_api.context import Context

DTYPES = {"auto": "auto", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# The values of PEFT's settings `bias` and `init_lora_weights` that leave the base model as it is.
HARMLESS_VALUES = (True, False, "none", "gaussian", "eva", "mica", "orthogonal")
SAVE_TOKENIZER_ADVICE = "Save it beside the weights: tokenizer.save_pretrained(DIRECTORY)."
MAX_PATTERNS_S = 10.0  # the time to match an adapter's patterns, with the start of a process
LOG_INTERVAL_S = 5.0  # the time between two lines about the progress

logger = logging.getLogger("tsx.worker")


class PretrainedFiles(NamedTuple):
    """A model's files and settings, from the archive, its configuration and the server.

    Attributes:
        directory: The directory of the model.
        adapters: The directories of the adapters.
        task: The task of the model.
        config: The settings under `huggingface`.
        dtype: transformers' name of the precision.
        device: The device of the worker.
        trusted: Whether code in the directory may be run.
        media_urls: The settings for URLs of images and sounds in chats.
    """

    directory: Path
    adapters: dict[str, Path]
    task: str
    config: HuggingFaceConfig
    dtype: str
    device: torch.device
    trusted: bool
    media_urls: UrlSettings = UrlSettings()

    @property
    def precision(self) -> str | None:
        """Tsx's name of the precision; None for the precision of the checkpoint."""
        return next((name for name, dtype in DTYPES.items() if dtype == self.dtype != "auto"), None)


def find_pretrained(context: Context, device: torch.device) -> PretrainedFiles:
    """Find the model's directory, read its settings, and apply `limit_max_image_pixels`.

    Raises:
        LoadError: The archive has no such model, or a setting is wrong.
    """
    properties = context.system_properties
    packed_settings = context.manifest.get(MANIFEST_KEY) or {}
    directory = Path(properties["model_dir"]) / DIRECTORY
    if not (directory / CONFIG).is_file():
        raise LoadError(
            f"The archive has no {DIRECTORY}/{CONFIG}. Pack the model's directory with `tsx archive"
            " DIRECTORY`."
        )
    settings, problems = parse_model_config(
        {MANIFEST_KEY: context.model_yaml_config.get(MANIFEST_KEY)}
    )
    if problems:
        raise LoadError(
            f"{MANIFEST_KEY} in model-config.yaml cannot be used: {'; '.join(problems)}."
        )
    config = settings.huggingface or HuggingFaceConfig()
    precision = (
        str(context.model_yaml_config.get("precision") or "auto").lower()
        if config.dtype == "auto"
        else config.dtype
    )
    if precision not in DTYPES:
        raise LoadError(
            f"precision in model-config.yaml is {precision!r}. Set one of {', '.join(DTYPES)}."
        )
    if not properties.get("limit_max_image_pixels", True):
        Image.MAX_IMAGE_PIXELS = None
    return PretrainedFiles(
        directory,
        {
            str(name): directory / ADAPTERS / str(name)
            for name in packed_settings.get("adapters") or ()
        },
        config.task or str(packed_settings.get("task") or ""),
        config,
        DTYPES[precision],
        device,
        bool(properties.get("trust_remote_code")),
        UrlSettings(*properties.get("media_urls", ())),
    )


@contextmanager
def convert_load_errors(subject: str, fault: str = "cannot be loaded") -> Iterator[None]:
    """Raise the errors of transformers and PEFT as LoadError, and log their progress bars."""
    try:
        from safetensors import SafetensorError
        from transformers.utils import logging as bars  # an extra

        lines = {
            "file": _LogLines(),
            "mininterval": LOG_INTERVAL_S,
            "bar_format": "{desc}: {n_fmt} of {total_fmt}",
            "leave": False,
        }
        hook = bars.set_tqdm_hook(lambda bar, args, options: bar(*args, **{**options, **lines}))
        try:
            yield
        except SafetensorError as error:
            raise OSError(f"its safetensors cannot be read: {error}") from error
        finally:
            bars.set_tqdm_hook(hook)
    except UnpicklingError as error:
        raise LoadError(
            f"{subject} is a pickle that holds more than weights, so it is not read. Save it again"
            " as safetensors."
        ) from error
    except ImportError as error:
        raise LoadError(
            f"{subject} needs a package that is not installed:"
            f" {describe_error(error).rstrip('.')}.{_advice(error)}"
        ) from error
    except (RuntimeError, ValueError, KeyError, OSError) as error:
        raise LoadError(
            f"{subject} {fault}: {describe_error(error).rstrip('.')}.{_advice(error)}"
        ) from error


def check_vocabulary(tokenizer: Any) -> None:
    """Check that the tokenizer has a vocabulary.

    If a directory has no tokenizer, transformers may create one without a vocabulary.

    Raises:
        LoadError: The tokenizer has only special tokens.
    """
    if len(tokenizer) <= len(set(tokenizer.all_special_tokens)):
        raise LoadError(f"The model's directory has no tokenizer. {SAVE_TOKENIZER_ADVICE}")


def log_size(directory: Path) -> None:
    files = [path for path in directory.iterdir() if path.suffix in (".safetensors", ".bin")]
    logger.info(
        "loading %d file(s) of weights, %.1f MB",
        len(files),
        sum(path.stat().st_size for path in files) / 1e6,
    )


def prepare_for_inference(model: Any, files: PretrainedFiles) -> Any:
    """Move the model to its device for inference, and turn off cuDNN's attention in this process.

    With the precision `auto`, a checkpoint in fp16 is converted to fp32 on a CPU, since CPUs
    compute slowly in fp16.
    """
    if files.dtype == "auto" and files.device.type == "cpu" and model.dtype == torch.float16:
        model = model.float()
    if files.device.type == "cuda":
        # cuDNN's attention makes a new plan for each length, and the length changes at each step.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return model.to(files.device).eval().requires_grad_(False)


def load_adapter(model: Any, name: str, directory: Path) -> Any:
    """Return a model with a PEFT adapter that shares the tensors of the base model.

    Raises:
        LoadError: The adapter does not fit the model, or cannot be served.
    """
    with convert_load_errors(f"The adapter {name}", "does not fit the model"):
        from peft import PeftConfig, PeftModel, get_peft_model_state_dict  # an extra
        from safetensors import safe_open

        config = PeftConfig.from_pretrained(str(directory))
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise LoadError(
                f"The adapter {name} is of the type {config.peft_type}; only those that change"
                " layers are served, as LoRA."
            )
        for setting in ("bias", "init_lora_weights"):
            value = getattr(config, setting, "none")
            if value not in HARMLESS_VALUES:
                raise LoadError(
                    f"The adapter {name} was trained with {setting}={value}, which changes the"
                    " model that others share. Train it without."
                )
        check_patterns(name, config, [module_name for module_name, _ in model.named_modules()])
        shared_tensors = {
            id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())
        }
        adapted_model = PeftModel.from_pretrained(
            copy.deepcopy(model, shared_tensors),
            str(directory),
            torch_device=str(model.device),
            autocast_adapter_dtype=False,
            # Tensors of the file then take the place of those of the copy, which the base shares.
            low_cpu_mem_usage=True,
        )
        for parameter in adapted_model.parameters():
            if id(parameter) not in shared_tensors:
                parameter.data = parameter.data.to(model.dtype)
        weights = directory / ADAPTER_WEIGHTS
        if weights.is_file():
            names = get_peft_model_state_dict(adapted_model, save_embedding_layers=False).keys()
            with safe_open(weights, "pt") as saved:
                # PEFT also saves the embeddings of the base model if the adapter changes them.
                adapter_names = set(saved.keys()) - adapted_model.state_dict().keys()
                if differences := sorted(names ^ adapter_names):
                    raise LoadError(
                        f"The adapter {name} is of another model: only one of the two has"
                        f" {differences[0]}."
                    )
    return adapted_model.get_base_model().eval().requires_grad_(False)


def check_patterns(adapter: str, config: Any, names: Iterable[str]) -> None:
    """Check that the regular expressions of an adapter can be matched in time.

    PEFT matches them with all names of modules. One match may take years, in which the worker would
    answer nothing, so a process that can be killed matches them first.

    Raises:
        LoadError: The matches take more than MAX_PATTERNS_S.
    """
    fields = ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern")
    target, excluded, ranks, alphas = (getattr(config, field, None) for field in fields)
    layers = getattr(config, "layers_pattern", None) or ()
    # These forms are those of PEFT.
    patterns = [
        *(pattern for pattern in (target, excluded) if isinstance(pattern, str)),
        *(rf"(.*\.)?({key})$" for key in (*(ranks or ()), *(alphas or ()))),
        *(
            rf"(?:^|.*?\.){pattern}\.\d+\..*"
            for pattern in ([layers] if isinstance(layers, str) else layers)
        ),
    ]
    if not patterns:
        return
    program = (
        "import json, re, sys; patterns, names = json.load(sys.stdin);"
        " [re.fullmatch(pattern, name) for pattern in patterns for name in names]"
    )
    try:
        # A pattern that is no regular expression ends the process; PEFT then tells the error.
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", program],
            input=json.dumps([patterns, list(names)]).encode(),
            stderr=subprocess.DEVNULL,
            timeout=MAX_PATTERNS_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LoadError(
            f"The adapter {adapter} has patterns of module names that take more than"
            f" {MAX_PATTERNS_S:g} s to match. List the names in target_modules instead."
        ) from None


class _LogLines:
    """A file object that logs the lines of a progress bar."""

    def write(self, text: str) -> None:
        if text.strip():
            logger.info("%s", text.strip())

    def flush(self) -> None:
        pass


def _advice(error: Exception) -> str:
    if isinstance(error, ImportError):
        extra = error.name if error.name in ("peft", "transformers") else None
        return (
            f" Install it: pip install 'tsx-serve[{extra}]'"
            if extra
            else " Install that package where tsx runs."
        )
    if "trust_remote_code" in str(error):
        return (
            " The model brings code of its own: allow it with the setting trust_remote_code if you"
            " trust its author."
        )
    if "backend tokenizer" in str(error):
        return f" {SAVE_TOKENIZER_ADVICE}"
    return (
        " Is the directory complete, as save_pretrained wrote it?"
        if isinstance(error, KeyError | OSError)
        else ""
    )
