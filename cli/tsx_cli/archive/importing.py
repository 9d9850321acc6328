"""The test import of a new archive's code in a separate process, before anything is written."""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tsx_archiver import BUILTIN_HANDLERS, ArchiveSpec, ModelConfig, load_model_config
from tsx_archiver.packing import PlannedMember, plan_archive
from tsx_archiver.python_file import MANIFEST_KEY
from tsx_cli.archive.directory import as_directory
from tsx_cli.common.failure import CliError
from tsx_runtime.core.models.packages import INSTALL_HINT
from tsx_runtime.worker.launch.entry import import_code

TIMEOUT_S = 60.0
NO_IMPORT_HINT = "--no-import packs it without this test."


def check_code(spec: ArchiveSpec, *, test_import: bool) -> list[str]:
    """Compile and import the code, and return notes.

    Raises:
        CliError: The code cannot be compiled or imported.
        ArchiveError: The spec cannot be packed.
    """
    plan = plan_archive(spec, warn=lambda text: None)
    handler = None if spec.handler in BUILTIN_HANDLERS else str(plan.manifest["model"]["handler"])
    if python_file := plan.manifest.get(MANIFEST_KEY):
        handler = f"{python_file['file']}:{python_file['name']}"
    model = plan.manifest["model"]
    names = [
        name for name in (handler and handler.partition(":")[0], model.get("modelFile")) if name
    ]
    for member in plan.members:
        if member.name in names:
            _compile(member)
    if not test_import or not names:
        return []
    config = load_model_config(Path(spec.config_file))[0] if spec.config_file else ModelConfig()
    with as_directory(plan) as directory:
        fault = _import_in_process(
            directory, handler, model, config.raw | {"init_args": config.init_args}
        )
    if fault is None:
        return [f"imported {' and '.join(names)}"]
    if "waits" in fault or ("missing" in fault and spec.requirements_file):
        return [f"note: {fault['message']}{'' if 'waits' in fault else f' {INSTALL_HINT}'}"]
    raise CliError(
        f"{fault['message'].rstrip('.')}. {NO_IMPORT_HINT}", traceback=fault.get("traceback")
    )


def _compile(member: PlannedMember) -> None:
    source = member.source if isinstance(member.source, bytes) else member.source.read_bytes()
    try:
        compile(source, str(member.source), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # Null bytes raise ValueError.
        location = (
            f", line {error.lineno}: {error.msg}: {(error.text or '').strip()}"
            if isinstance(error, SyntaxError)
            else f": {error}"
        )
        raise CliError(
            f"{member.source!s} is not valid Python{location}. Correct it and pack again."
        ) from error


def _import_in_process(
    directory: Path, handler: str | None, model: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, str] | None:
    """Return the fault of the import, or None."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=import_code, args=(sender, directory, handler, model, config))  # type: ignore[attr-defined]  # typeshed has it in the kinds of contexts only
    process.start()
    sender.close()
    code = f"The import of {handler or model['modelFile']}"
    try:
        if not receiver.poll(TIMEOUT_S):
            return {
                "message": (
                    f"{code} has not ended after {TIMEOUT_S:g} s; it was stopped, and the archive is"
                    " written untested."
                ),
                "waits": "",
            }
        fault: dict[str, str] | None = receiver.recv()
        return fault
    except EOFError:
        process.join()
        status = process.exitcode or 0
        ending = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        return {"message": f"{code} ended its process {ending}."}
    finally:
        process.kill()
        process.join()
        receiver.close()
