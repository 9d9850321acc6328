"""The builder of a model's forms.

It builds each form in a process of its own, and makes the directories that workers load.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from tsx_archiver import OpenArchive, open_archive
from tsx_archiver.metadata.forms import FORMS_DIRECTORY, REFERENCE, FormIndex, FormRecord
from tsx_archiver.metadata.huggingface import MANIFEST_KEY
from tsx_archiver.storage.atomic_file import write_atomically
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.search.options import DEVICES, parse_words
from tsx_cli.bench.search.variants import lay_out, with_keys
from tsx_cli.bench.search.worker import (
    WorkerSpec,
    batch_of,
    exit_text,
    items_of,
    last_lines,
    model_variables,
    worker_spec,
)
from tsx_cli.common.failure import UsageError
from tsx_runtime import wire
from tsx_runtime.core.placement.hardware import gpu_count
from tsx_runtime.shared.safe_path import CLEAN
from tsx_runtime.wire import Item, Kind

PROGRAM = CLEAN + "from tsx_runtime.worker.forms.build import main; main()"
# Batches of the last size contain all inputs. The smaller batches only show that the size varies.
CALIBRATION_SIZES = (2, 3, 8)


class BuiltForm(NamedTuple):
    """A form with its measurements and files."""

    record: FormRecord
    directory: Path  # directory of the form's files


class BuildFailed(Exception):
    """A build failed. The message is the reason."""


class BuildTimeout(BuildFailed):
    """A build exceeded its time limit."""


def check_buildable(archive: OpenArchive) -> None:
    """Refuse a model that has no other forms.

    Raises:
        UsageError: It is a Hugging Face model.
    """
    if MANIFEST_KEY in archive.manifest.data:
        advice = "Set huggingface.dtype in model-config.yaml to bf16 or fp16 for a faster one"
        raise UsageError(
            f"{archive.source} is a Hugging Face model, which tsx optimize builds no forms of:"
            f" transformers runs it. {advice}"
        )


def device_of(option: str | None, archive: OpenArchive) -> str:
    """Return the device of --device; by default a GPU if there is one.

    Raises:
        UsageError: The device is unknown, or several are given.
    """
    if option is None:
        return "cuda" if gpu_count() and archive.config.device_type != "cpu" else "cpu"
    device, *further_devices = parse_words(option, DEVICES, "--device")
    if further_devices:
        raise UsageError(f"--device: '{option}' is more than one; forms are built for one device")
    if device == "cuda" and not gpu_count():
        raise UsageError(
            "--device cuda: no GPU is visible here (`nvidia-smi` shows what the driver sees); leave"
            " it out"
        )
    return device


@dataclass
class FormBuilder:
    """A builder of the forms of one archive.

    `temporary` is a temporary directory. `directory` is that of the run. It contains the built
    forms, including those of the run that is resumed.
    """

    archive: OpenArchive
    device: str
    calibration: Sequence[Payload]
    max_batch_size: int
    temporary: Path
    directory: Path
    resumed: bool = False
    _new_forms: dict[str, BuiltForm] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def forms_directory(self) -> Path:
        return (self.directory / FORMS_DIRECTORY).absolute()

    def spec(self, form: BuiltForm | None = None) -> WorkerSpec:
        """Return the spec of a worker for a form, or for the archive's own model.

        Raises:
            WorkerFailed: Such a worker is not possible.
        """
        temporary = Path(tempfile.mkdtemp(dir=self.temporary))
        forms = FormIndex(() if form is None else (form.record,))
        directory = lay_out(self.archive, Configuration(device=self.device), temporary, forms=forms)
        if form is not None:
            (directory / FORMS_DIRECTORY).mkdir()
            (directory / form.record.directory).symlink_to(form.directory.absolute())
        return worker_spec(
            open_archive(directory), Configuration(device=self.device), self.max_batch_size
        )

    def survey(self, timeout_s: float) -> tuple[dict[str, str | None], dict[str, str]]:
        """Return the reasons why forms cannot be built, and their labels, both by name.

        A reason is None if the form can be built.

        Raises:
            BuildFailed: The process that surveys the forms failed.
            WorkerFailed: A worker is not possible.
        """
        with tempfile.TemporaryDirectory(dir=self.temporary) as empty_directory:
            report = self._run(None, Path(empty_directory), timeout_s)
        return report["applies"], report["labels"]

    def find_built(self, name: str) -> BuiltForm | None:
        """Return the form, if this run or the resumed one has built it."""
        if name in self._new_forms or not self.resumed:
            return self._new_forms.get(name)
        try:
            fields = json.loads(self._record_file(name).read_text(encoding="utf-8"))
            return BuiltForm(replace(FormRecord(**fields), name=name), self.forms_directory / name)
        except (OSError, ValueError, TypeError):
            return None

    def build(self, name: str, timeout_s: float) -> BuiltForm:
        """Build a form.

        Raises:
            BuildFailed: The build process failed.
            BuildTimeout: The time limit was exceeded.
            WorkerFailed: A worker is not possible.
            OSError: The files cannot be written.
        """
        directory = self.forms_directory / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        start = time.monotonic()
        try:
            report = self._run(name, directory, timeout_s)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        record = replace(
            FormRecord(**report["record"]),
            name=name,
            measured={"build_seconds": time.monotonic() - start},
        )
        # The record is written last, because a form without a record counts as incomplete.
        with write_atomically(self._record_file(name)) as file:
            file.write(json.dumps(asdict(record)).encode())
        self._new_forms[name] = BuiltForm(record, directory)
        return self._new_forms[name]

    def kill_build(self) -> None:
        """Kill the build process and its children."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):  # The process group may be empty.
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _record_file(self, name: str) -> Path:
        return self.forms_directory / f"{name}.json"

    def _run(self, name: str | None, directory: Path, timeout_s: float) -> dict[str, Any]:
        batches, report = self.temporary / "calibration", self.temporary / "report.json"
        if not batches.exists():
            batches.write_bytes(calibration_frames(items_of(self.calibration)))
        report.unlink(missing_ok=True)
        load = self.spec().load
        load["model_config"] = with_keys(load["model_config"], {"forms": [REFERENCE]})
        command = {
            "load": load,
            "batches": str(batches),
            "form": name,
            "directory": str(directory.absolute()),
            "report": str(report),
        }
        with tempfile.TemporaryFile() as log:
            code = self._run_build(json.dumps(command).encode(), timeout_s, log)
            try:
                result: dict[str, Any] = json.loads(report.read_bytes())
            except (OSError, ValueError) as error:
                if code is None:
                    raise BuildTimeout(
                        f"it was not built within {timeout_s:.0f} seconds"
                    ) from error
                log_text = last_lines(log)
                raise BuildFailed(
                    f"the build process ended ({exit_text(code)})"
                    + (f": {log_text}" if log_text else "")
                ) from error
        if "reason" in result:
            raise BuildFailed(result["reason"])
        return result

    def _run_build(self, command_json: bytes, timeout_s: float, log: IO[bytes]) -> int | None:
        """Run the build process; return its exit code, or None if it exceeded the time limit."""
        arguments, variables = [sys.executable, "-c", PROGRAM], model_variables()
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=variables,
            start_new_session=True,
        )
        self._process = process
        try:
            process.communicate(command_json, max(0.1, timeout_s))
            return process.returncode
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.kill_build()


def size_of(directory: Path) -> int:
    """Return the size of all files in a directory, in bytes."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def model_size_mib(archive: OpenArchive) -> float | None:
    """Return the size of the serialized file in MiB."""
    file = archive.directory / (archive.manifest.serialized_file or "")
    return file.stat().st_size / (1 << 20) if file.is_file() else None


def calibration_frames(items: Sequence[Item]) -> bytes:
    """Return batches of several sizes as frames for a worker; each item occurs at least once."""
    *small_sizes, main_size = CALIBRATION_SIZES
    batches = [batch_of(items, size, 0) for size in small_sizes]
    batches += [batch_of(items, main_size, number) for number in range(-(-len(items) // main_size))]
    return b"".join(
        bytes(part)
        for number, batch in enumerate(batches)
        for part in wire.encode(Kind.BATCH, number, batch)
    )
