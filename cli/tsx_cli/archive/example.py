"""A request to try a new archive with: what the default handler of its model takes, and has answered."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tsx_archiver import ArchiveError, ArchiveSpec, plan_archive
from tsx_cli.archive.check import ModelSample, send
from tsx_cli.archive.directory import as_directory
from tsx_cli.common.curl import curl
from tsx_runtime.api.samples import example_of
from tsx_runtime.core.registry.registry import open_model
from tsx_runtime.errors import LoadFailed, TsxError
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.example_requests import printing_command

LARGEST = 256 << 20  # bytes of a model that is loaded for it


def find_example(spec: ArchiveSpec, settings: Settings) -> Any:
    """The body, as JSON. None for a large model, and for one that does not tell what it takes. Raises LoadFailed."""
    if spec.serialized_file is None or Path(spec.serialized_file).stat().st_size > LARGEST:
        return None
    try:
        with as_directory(plan_archive(spec, warn=lambda warning: None)) as directory:  # linked: the archive is not unpacked for it
            return asyncio.run(_ask(directory, settings.model_copy(update={"log_format": "text"})))  # its worker speaks to a person
    except LoadFailed:
        raise
    except (ArchiveError, TsxError, OSError):  # nothing to do with packing: what is wrong is said where it is served
        return None


async def _ask(directory: Path, settings: Settings) -> Any:
    async with open_model(directory, settings) as version:
        example = await example_of(version)
        if example is None:
            return None
        answer = await send(version, ModelSample(example.source, example.content_type, example.body))
        return json.loads(example.body) if answer.status < 400 else None


def request_line(name: str, example: Any, settings: Settings) -> str:
    """A line for a shell, beside a server of these settings. Raises as `curl` does."""
    command = printing_command(example)
    more = ("-H", "Content-Type: application/json", "-d", json.dumps(example) if command is None else "@-")
    line = curl(settings.inference_address, f"/predictions/{name}", settings, *more, with_token=True)
    return line if command is None else f"{command} | {line}"
