"""The test of a model before it is packed: a worker loads it and receives one request.

The request is a sample, or is generated.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from tsx_archiver import BUILTIN_HANDLERS, ArchiveSpec, plan_archive
from tsx_archiver.limits import human
from tsx_archiver.python_file import HANDLER
from tsx_cli.archive.check import ModelSample, known_sample, send
from tsx_cli.archive.directory import as_directory
from tsx_cli.archive.model_file import DEFAULT_HANDLER
from tsx_cli.common.client import error_text
from tsx_cli.common.curl import curl
from tsx_cli.common.failure import CliError
from tsx_runtime.core.placement.hardware import gpu_count
from tsx_runtime.core.registry.standalone import open_model
from tsx_runtime.errors import BadRequest, InvalidModel, LoadFailed, LoadOutOfMemory, TsxError
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.example_requests import printing_command
from tsx_runtime.shared.log_format import escaped

MAX_LOADED_BYTES = 256 << 20  # Larger models are not loaded.
GENERATED = "generated"
GUESSED_INPUTS = (DEFAULT_HANDLER, HANDLER)  # built-in handlers whose models may refuse a guess
_MISSING_LIBRARY = re.compile(r"No module named|\b[Ii]nstall(ed)?\b")
# Only the text of the exception is searched: names in the model's code may have these words too.
_MISSING_GPU = re.compile("CUDA|cuda|NVIDIA|nvidia|GPU|gpu")
_NO_CHECK_HINT = "--no-check packs it without this test."
IMAGE_CHANNELS = 3  # channels of the images that image_classifier sends
IMAGE_NOTE = "note: its input looks like an image; --handler image_classifier accepts images"
NOT_ASKED = (
    "note: loaded; no request was sent, because it is not known what the handler takes: add"
    " --sample FILE"
)


class ModelTrial(NamedTuple):
    """The result of a trial.

    Attributes:
        example: The JSON of a generated request that succeeded.
        notes: Notes for the user.
        generated: The generated request that succeeded, also if it is not JSON.
    """

    example: Any = None
    notes: tuple[str, ...] = ()
    generated: ModelSample | None = None


def try_model(spec: ArchiveSpec, settings: Settings) -> ModelTrial:
    """Load a model that is to be packed, and send it one request.

    Raises:
        CliError: `tsx serve` would not load it, or the model answers a sample with an error.
    """
    plan = plan_archive(spec, warn=lambda warning: None)
    if sum(member.size for member in plan.members) > MAX_LOADED_BYTES:
        return ModelTrial(
            notes=(
                f"note: not loaded here, as it has more than {human(MAX_LOADED_BYTES)}; --check loads it",
            )
        )
    try:
        with as_directory(plan, copy=True) as directory:  # model-config.yaml must not be a link
            text_log_settings = settings.model_copy(update={"log_format": "text"})
            return asyncio.run(_ask(directory, spec, text_log_settings))
    except TsxError as error:
        reason = escaped(error.message.partition("\n")[0].rstrip("."))
        exception_text = (
            error.message.partition(": ")[2] if getattr(error, "traceback", None) else ""
        )
        is_missing_here = _MISSING_LIBRARY.search(error.message) or (
            not gpu_count() and _MISSING_GPU.search(exception_text)
        )
        is_refused = isinstance(error, LoadFailed | BadRequest | InvalidModel) and not isinstance(
            error, LoadOutOfMemory
        )
        if is_refused and not is_missing_here:
            text = f"{spec.model_name} does not load: {reason}. {_NO_CHECK_HINT}"
            raise CliError(text, traceback=getattr(error, "traceback", None)) from error
        return ModelTrial(
            notes=(f"note: {spec.model_name} does not load on this machine: {reason}",)
        )
    except OSError as error:  # a full disk, for example
        return ModelTrial(
            notes=(f"note: {spec.model_name} could not be loaded to test it: {error}",)
        )


async def _ask(directory: Path, spec: ArchiveSpec, settings: Settings) -> ModelTrial:
    async with open_model(directory, settings) as version:
        samples = await known_sample(version)
        if not samples:
            shape = (
                ", or input_shape to its model-config.yaml"
                if spec.handler == DEFAULT_HANDLER
                else ""
            )
            return ModelTrial(notes=(NOT_ASKED + shape,))
        (sample,) = samples
        answer = await send(version, sample)
        is_generated = sample.name == GENERATED
        if answer.status < 400:
            example = (
                json.loads(sample.body)
                if is_generated and sample.content_type == "application/json"
                else None
            )
            is_image = (
                spec.handler == DEFAULT_HANDLER
                and sample.body.startswith(b"[[[")
                and len(example or ()) == IMAGE_CHANNELS
            )
            notes = (IMAGE_NOTE,) if is_image else ()
            return ModelTrial(example, notes, sample if is_generated else None)
        source = f"a generated request ({sample.content_type})" if is_generated else sample.name
        # The message of TorchScript begins with pages of its code; the last line is the reason.
        message = error_text(answer.body).strip().splitlines() or [""]
        reason = (
            f"{spec.model_name} answers {source} with {answer.status}:"
            f" {escaped(message[-1].rstrip('.'))}"
        )
        if answer.status < 500 or (
            is_generated
            and (spec.handler not in BUILTIN_HANDLERS or spec.handler in GUESSED_INPUTS)
        ):
            return ModelTrial(notes=(f"note: {reason}; --sample FILE tries another request",))
        raise CliError(
            f"{reason}. Correct the model or its handler, or name another request with --sample."
            f" {_NO_CHECK_HINT}"
        )


def request_line(name: str, example: Any, settings: Settings) -> str:
    """Return a shell command that sends a request to a server with these settings.

    Raises what `curl` raises.
    """
    command = printing_command(example)
    curl_arguments = (
        "-H",
        "Content-Type: application/json",
        "-d",
        json.dumps(example) if command is None else "@-",
    )
    line = curl(
        settings.inference_address,
        f"/predictions/{name}",
        settings,
        *curl_arguments,
        with_token=True,
    )
    return line if command is None else f"{command} | {line}"
