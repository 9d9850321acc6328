"""Builds the forms of a model, each in a process of its own, and lays out the directories that
their workers load.
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
from typing import IO, Any

from tsx_archiver import OpenArchive, open_archive
from tsx_archiver.metadata.forms import FORMS_DIRECTORY, REFERENCE, FormRecord, KeptForms
from tsx_archiver.storage.atomic_file import write_atomically
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.search.variants import lay_out, with_keys
from tsx_cli.bench.search.worker import (
    WorkerSpec,
    batch_of,
    exit_text,
    last_lines,
    model_variables,
    worker_spec,
)
from tsx_cli.optimize.write_back import BuiltForm
from tsx_runtime import wire
from tsx_runtime.shared.safe_path import CLEAN
from tsx_runtime.wire import Item, Kind

PROGRAM = CLEAN + "from tsx_runtime.worker.forms.build import main; main()"
SIZES = (
    2,
    3,
    8,
    # of calibration batches: all inputs in batches of 8, and two smaller batches, so that the batch
    # size differs
)


class BuildFailed(Exception):
    """The message says why."""


class BuildTimeout(BuildFailed):
    """The build took longer than it may."""


@dataclass
class FormBuilder:
    """`place` is a temporary directory.

    `kept` is the directory of built forms, in which a resumed run finds those of the earlier one.
    """

    archive: OpenArchive
    device: str
    calibration: Sequence[Item]
    largest: int  # batch that its workers get
    place: Path
    kept: Path
    resumed: bool = False
    _fresh: dict[str, BuiltForm] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    def spec(self, form: BuiltForm | None = None) -> WorkerSpec:
        """A worker that runs this form, or the archive's own model.

        Raises WorkerFailed if there can be none.
        """
        place = Path(tempfile.mkdtemp(dir=self.place))
        forms = KeptForms(() if form is None else (form.record,))
        directory = lay_out(self.archive, Configuration(device=self.device), place, forms=forms)
        if form is not None:
            (directory / FORMS_DIRECTORY).mkdir()
            (directory / form.record.directory).symlink_to(form.directory.absolute())
        return worker_spec(open_archive(directory), Configuration(device=self.device), self.largest)

    def survey(self, seconds: float) -> tuple[dict[str, str | None], dict[str, str]]:
        """(Why it cannot be built, or None; label), each by the name of the form.

        Raises BuildFailed, WorkerFailed.
        """
        with tempfile.TemporaryDirectory(dir=self.place) as empty:
            report = self._run(None, Path(empty), seconds)
        return report["applies"], report["labels"]

    def built(self, name: str) -> BuiltForm | None:
        """The form, if this run or the one that it resumes has built it."""
        if name in self._fresh or not self.resumed:
            return self._fresh.get(name)
        try:
            given = json.loads(self._record_file(name).read_text(encoding="utf-8"))
            return BuiltForm(replace(FormRecord(**given), name=name), self.kept / name)
        except (OSError, ValueError, TypeError):
            return None

    def build(self, name: str, seconds: float) -> BuiltForm:
        """Raises BuildFailed, BuildTimeout, WorkerFailed, OSError."""
        directory = self.kept / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        begun = time.monotonic()
        try:
            report = self._run(name, directory, seconds)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        record = replace(
            FormRecord(**report["record"]),
            name=name,
            measured={"build_seconds": time.monotonic() - begun},
        )
        with write_atomically(
            self._record_file(name)
        ) as file:  # last: a form without its record was not built completely
            file.write(json.dumps(asdict(record)).encode())
        self._fresh[name] = BuiltForm(record, directory)
        return self._fresh[name]

    def abandon(self) -> None:
        """Kills the build process, if there is one, and its children."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):  # the process group is empty
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _record_file(self, name: str) -> Path:
        return self.kept / f"{name}.json"

    def _run(self, name: str | None, directory: Path, seconds: float) -> dict[str, Any]:
        batches, report = self.place / "calibration", self.place / "report.json"
        if not batches.exists():
            batches.write_bytes(calibration_frames(self.calibration))
        report.unlink(missing_ok=True)
        load = self.spec().load
        load["model_config"] = with_keys(load["model_config"], {"forms": [REFERENCE]})
        order = {
            "load": load,
            "batches": str(batches),
            "form": name,
            "directory": str(directory.absolute()),
            "report": str(report),
        }
        with tempfile.TemporaryFile() as log:
            code = self._code(json.dumps(order).encode(), seconds, log)
            try:
                found: dict[str, Any] = json.loads(report.read_bytes())
            except (OSError, ValueError) as error:
                if code is None:
                    raise BuildTimeout(f"it was not built within {seconds:.0f} seconds") from error
                words = last_lines(log)
                raise BuildFailed(
                    f"the build process ended ({exit_text(code)})" + (f": {words}" if words else "")
                ) from error
        if "reason" in found:
            raise BuildFailed(found["reason"])
        return found

    def _code(self, order: bytes, seconds: float, log: IO[bytes]) -> int | None:
        """The return code of the build process; None if it ran out of time and was killed."""
        command, variables = [sys.executable, "-c", PROGRAM], model_variables()
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=variables,
            start_new_session=True,
        )
        self._process = process
        try:
            process.communicate(order, max(0.1, seconds))
            return process.returncode
        except subprocess.TimeoutExpired:
            return None
        finally:
            self.abandon()


def size_of(directory: Path) -> int:
    """Bytes of all its files."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def calibration_frames(items: Sequence[Item]) -> bytes:
    """Batches of several sizes, as a worker's frames; each item is in at least one."""
    *few, usual = SIZES
    batches = [batch_of(items, size, 0) for size in few]
    batches += [batch_of(items, usual, number) for number in range(-(-len(items) // usual))]
    return b"".join(
        bytes(part)
        for number, batch in enumerate(batches)
        for part in wire.encode(Kind.BATCH, number, batch)
    )
