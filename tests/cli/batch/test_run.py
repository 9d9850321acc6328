"""A run that is killed at any step and restarted writes each row once."""

from __future__ import annotations

import base64
import csv
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.cli.batch.conftest import EchoEngine
from tsx_cli.batch.journal import BatchJournal
from tsx_cli.batch.readers import InputReader
from tsx_cli.batch.rows import Position, Row, RowResult
from tsx_cli.batch.run import BatchRun, MaxErrors
from tsx_cli.batch.s3 import S3
from tsx_cli.batch.stores import MAX_NAME_BYTES, LocalStore, OutputStore, S3Store, file_name
from tsx_cli.batch.writers import (
    ENCODINGS,
    CsvEncoding,
    DirectoryWriter,
    FileWriter,
    JsonLinesEncoding,
    Writer,
)
from tsx_cli.common.failure import CliError

ROWS = 9


class ProcessDied(BaseException):
    """The simulated death of a process."""


class MortalDisk:
    """A disk whose process dies before, during, or after one of its changes.

    With `power`, a power failure also empties files that no fsync has secured.
    """

    def __init__(self, patch: pytest.MonkeyPatch, step: int, phase: int, power: bool) -> None:
        self.steps_left, self.phase, self.has_power_failure, self.is_dead = (
            step,
            phase,
            power,
            False,
        )
        self.unsynced: set[Path] = set()
        self.lock = threading.Lock()
        for owner, name in (
            (Path, "replace"),
            (Path, "unlink"),
            (Path, "mkdir"),
            (Path, "write_bytes"),
            (shutil, "rmtree"),
            (os, "fsync"),
        ):
            patch.setattr(owner, name, self._mortal(name, getattr(owner, name)))

    def _mortal(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with self.lock:
                if self.is_dead:
                    raise ProcessDied
                self.steps_left -= 1
                if self.steps_left == 0 and self.phase == 0:
                    self.die()
                if self.steps_left == 0 and self.phase == 1 and name == "write_bytes":
                    original(arguments[0], arguments[1][: len(arguments[1]) // 2])
                    self.die()
                if name == "write_bytes":
                    self.unsynced.add(arguments[0])
                elif name == "fsync":
                    self.unsynced.discard(Path(f"/proc/self/fd/{arguments[0]}").readlink())
                result = original(*arguments, **options)
                if self.steps_left == 0:
                    self.die()
                return result

        return call

    def die(self) -> None:
        self.is_dead = True
        if self.has_power_failure:
            for path in self.unsynced:
                if path.exists():
                    os.truncate(path, 0)
        raise ProcessDied


def run(
    directory: Path,
    kind: str,
    engine: EchoEngine | None = None,
    stop: threading.Event | None = None,
    *,
    output: str = "",
    **options: Any,
) -> BatchRun:
    """Run a batch as the command does, with a commit for each row."""
    reader = InputReader([str(directory / "rows.jsonl")])
    store: OutputStore = (
        S3Store(output, S3())
        if output
        else LocalStore(f"{directory}/out{'/' if kind == 'directory' else ''}")
    )
    writer: Writer = (
        DirectoryWriter(store, numbered=False)
        if kind == "directory"
        else FileWriter(store, ENCODINGS[kind]())
    )
    journal, finished = BatchJournal(store, {"reader": reader.fingerprint}), False
    try:
        batch_run = BatchRun(
            engine or EchoEngine(),
            reader,
            writer,
            journal,
            stop=stop or threading.Event(),
            **({"commit_every": 0.0} | options),
        )
        batch_run.run()
        finished = batch_run.done.complete
        return batch_run
    finally:
        journal.close(finished=finished)


def ids(directory: Path, kind: str) -> list[str]:
    if kind == "directory":
        return sorted(file.name.removesuffix(".json") for file in (directory / "out").iterdir())
    if kind == "parquet":
        return [row["id"] for row in pq.read_table(directory / "out").to_pylist()]
    with (directory / "out").open(newline="") as file:
        return (
            [json.loads(line)["id"] for line in file]
            if kind == "jsonl"
            else [row["id"] for row in csv.DictReader(file)]
        )


def stopping_at(index: int, stop: threading.Event) -> EchoEngine:
    def fails(row: Row) -> bool:
        if row.index == index:
            stop.set()
        return False

    return EchoEngine(fails)


def make_rows(directory: Path, count: int = ROWS) -> None:
    (directory / "rows.jsonl").write_text(
        "".join(json.dumps({"x": number}) + "\n" for number in range(count))
    )


DEATHS = st.lists(
    st.tuples(st.integers(1, 130), st.integers(0, 2), st.booleans()), min_size=1, max_size=4
)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "directory"])
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(DEATHS)
@example([(step, 0, True) for step in range(1, 40, 3)])
def test_a_run_killed_at_any_step_writes_each_row_once(
    tmp_path_factory: pytest.TempPathFactory, kind: str, deaths: Sequence[tuple[int, int, bool]]
) -> None:
    directory = tmp_path_factory.mktemp("run")
    make_rows(directory)
    finished = False
    for step, phase, power in deaths:
        with pytest.MonkeyPatch.context() as patch:
            disk = MortalDisk(patch, step, phase, power)
            try:
                run(directory, kind)
                finished = True
            except ProcessDied:
                pass
        if finished or (
            disk.is_dead
            and (directory / "out").exists()
            and not (directory / "out.tsx-batch" / "journal.json").exists()
        ):
            break
    else:
        run(directory, kind)
    assert ids(directory, kind) == [f"rows.jsonl:{number + 1}" for number in range(ROWS)]
    assert {path.name for path in directory.iterdir()} - {"out.tsx-batch"} == {"rows.jsonl", "out"}


def test_committed_rows_are_not_computed_again(tmp_path: Path) -> None:
    make_rows(tmp_path, 20)
    stop = threading.Event()
    first, second = stopping_at(5, stop), EchoEngine()
    first_progress = run(tmp_path, "jsonl", first, stop).done
    assert (first_progress.complete, first_progress.rows) == (False, first.answered_count)
    batch_run = run(tmp_path, "jsonl", second)
    assert batch_run.done.complete
    assert batch_run.before.rows == first.answered_count == 20 - second.answered_count > 5
    assert ids(tmp_path, "jsonl") == [f"rows.jsonl:{number + 1}" for number in range(20)]


def test_unreadable_rows_keep_their_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PartlyReader(InputReader):
        def rows(self, start: Position, index: int) -> Any:
            return (
                row._replace(error="odd" if row.index % 4 else None)
                for row in super().rows(start, index)
            )

    monkeypatch.setattr("tests.cli.batch.test_run.InputReader", PartlyReader)
    make_rows(tmp_path)
    assert run(tmp_path, "jsonl").done.errors == 6
    entries = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [entry["id"] for entry in entries] == [
        f"rows.jsonl:{number + 1}" for number in range(ROWS)
    ]
    assert [entry.get("error", {}).get("message") for entry in entries] == [
        None,
        "odd",
        "odd",
        "odd",
    ] * 2 + [None]


def test_csv_cells_are_not_formulas_and_bytes_are_base64() -> None:
    rows = [
        RowResult(0, "=a", 200, "text/plain", b"=1+1"),
        RowResult(1, "b", 200, "application/json", b"-0.5"),
        RowResult(2, "c", 200, "application/octet-stream", b"\xf8\xf8\xf8"),
        RowResult(3, "d", 500, "", b"", "@SUM(A1)"),
    ]
    lines = CsvEncoding().encode(rows).decode().splitlines()
    assert lines == ["'=a,200,'=1+1,", "b,200,-0.5,", "c,200,+Pj4,", "d,500,,'@SUM(A1)"]


def test_json_in_another_encoding_is_written_as_base64() -> None:
    body = '{"x": "\u0a0a"}'.encode("utf-16")
    [line] = (
        JsonLinesEncoding().encode([RowResult(0, "a", 200, "application/json", body)]).splitlines()
    )
    assert base64.b64decode(json.loads(line)["output_base64"]) == body


def test_a_rows_file_name_is_valid_for_file_systems() -> None:
    assert file_name("a/b.jpg") == "a/b.jpg"
    assert file_name("../x") == "%2E./x"
    long, longer = "é" * 200, "é" * 199 + "e"
    assert len(file_name(long).encode()) <= MAX_NAME_BYTES
    assert file_name(long) != file_name(longer)


def test_a_stop_ends_reading_standard_input_and_ignores_a_partial_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_end, write_end = os.pipe()
    with open(read_end) as file, open(write_end, "wb", buffering=0) as pipe:
        monkeypatch.setattr(sys, "stdin", file)
        pipe.write(b'{"x": 0}\n{"x": 1}\n{"x"')
        reader, stop, store = InputReader(["-"]), threading.Event(), LocalStore(f"{tmp_path}/out")
        journal = BatchJournal(store, {})

        def on_signal(number: int, frame: object) -> None:
            stop.set()
            reader.sources.end_stdin()

        previous_handler = signal.signal(signal.SIGALRM, on_signal)
        signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
        try:
            run = BatchRun(
                EchoEngine(), reader, FileWriter(store, JsonLinesEncoding()), journal, stop=stop
            )
            run.run()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous_handler)
            journal.close(finished=False)
    assert (run.done.rows, run.done.complete) == (2, False)


def fails(numbers: range) -> Callable[[Row], bool]:
    return lambda row: row.index in numbers


@pytest.mark.parametrize(
    ("limit", "failing_rows", "message"),
    [
        (MaxErrors(rows=2), range(3), "3 of 3 rows failed.*rows.jsonl:1"),
        (MaxErrors(rows=3), range(3), None),
        (MaxErrors(share=0.3), range(3), "3 of 9 rows failed"),
        (MaxErrors(share=0.34), range(3), None),
    ],
)
def test_too_many_errors_end_the_run_until_the_limit_is_raised(
    tmp_path: Path, limit: MaxErrors, failing_rows: range, message: str | None
) -> None:
    make_rows(tmp_path)
    if message is not None:
        with pytest.raises(CliError, match=message):
            run(tmp_path, "jsonl", EchoEngine(fails(failing_rows)), max_errors=limit)
        assert not (tmp_path / "out").exists()
    assert run(tmp_path, "jsonl", EchoEngine(fails(failing_rows))).done.errors == 3
    assert len(ids(tmp_path, "jsonl")) == ROWS


def test_a_row_that_fails_before_a_crash_has_one_file_after_it(tmp_path: Path) -> None:
    make_rows(tmp_path, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            BatchJournal, "commit", lambda journal, checkpoint: (_ for _ in ()).throw(ProcessDied)
        )
        with pytest.raises(ProcessDied):
            run(tmp_path, "directory", EchoEngine(fails(range(1))))
    run(tmp_path, "directory")
    assert ids(tmp_path, "directory") == ["rows.jsonl:1"]


def output_with_link(directory: Path, victim: Path) -> LocalStore:
    """Return an output whose work directory contains a link to `victim`."""
    (directory / "out.tsx-batch").mkdir(mode=0o700)
    victim.write_text("precious")
    (directory / "out.tsx-batch" / "partial").symlink_to(victim)
    return LocalStore(str(directory / "out"))


def test_a_link_in_the_work_directory_is_not_followed(tmp_path: Path) -> None:
    store = output_with_link(tmp_path, tmp_path / "victim")
    store.lock()
    store.put("journal.json", b"{}")
    store.close()
    assert (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / "out.tsx-batch" / "journal.json").read_text() == "{}"


@pytest.mark.parametrize("is_foreign", [True, False])
def test_only_links_of_the_same_user_are_followed_to_the_output(
    tmp_path: Path, is_foreign: bool
) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "target")
    (tmp_path / "way").symlink_to(tmp_path)
    if is_foreign:
        if not hasattr(os, "geteuid") or os.geteuid() != 0:
            pytest.skip("only root can give a link to another user")
        for name in ("out", "way"):
            os.chown(tmp_path / name, 54321, 54321, follow_symlinks=False)
    assert LocalStore(str(tmp_path / "out"))._path == tmp_path / ("out" if is_foreign else "target")
    if is_foreign:
        with pytest.raises(CliError, match=r"way belongs to another user"):
            LocalStore(str(tmp_path / "way" / "out.jsonl"))
    else:
        assert LocalStore(str(tmp_path / "way" / "out.jsonl"))._path == tmp_path / "out.jsonl"


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there modes are of no use")
@pytest.mark.parametrize("is_foreign", [True, False])
def test_a_work_directory_writable_by_another_user_is_refused(
    tmp_path: Path, is_foreign: bool
) -> None:
    store = output_with_link(tmp_path, tmp_path / "victim")
    if not is_foreign:
        (tmp_path / "out.tsx-batch").chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(tmp_path / "out.tsx-batch", 54321, 54321)
    else:
        pytest.skip("only root can give a directory to another user")
    reason = "belongs to another user" if is_foreign else "can be written by other users"
    with pytest.raises(CliError, match=f"out.tsx-batch {reason}.* name an output in a directory"):
        store.lock()
    assert sorted(path.name for path in (tmp_path / "out.tsx-batch").iterdir()) == ["partial"]


def test_two_runs_cannot_write_one_output(tmp_path: Path) -> None:
    make_rows(tmp_path)
    store = LocalStore(str(tmp_path / "out"))
    store.lock()
    with pytest.raises(CliError, match="another run writes"):
        run(tmp_path, "jsonl")
    store.close()
    assert run(tmp_path, "jsonl").done.complete
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "out"}


def test_a_stopped_run_with_s3_output_resumes_and_leaves_only_the_output(
    tmp_path: Path, bucket: Any
) -> None:
    make_rows(tmp_path, 12)
    for output in ("s3://data/out.jsonl", "s3://data/files/"):
        stop = threading.Event()
        assert not run(
            tmp_path,
            "directory" if output.endswith("/") else "jsonl",
            stopping_at(5, stop),
            stop,
            output=output,
        ).done.complete
        keys = [item["Key"] for item in bucket.list_objects_v2(Bucket="data")["Contents"]]
        assert f"{output.removeprefix('s3://data/').rstrip('/')}.tsx-batch/journal.json" in keys
        engine = EchoEngine()
        assert run(
            tmp_path, "directory" if output.endswith("/") else "jsonl", engine, output=output
        ).done.complete
        assert 0 < engine.answered_count < 12
    keys = [item["Key"] for item in bucket.list_objects_v2(Bucket="data")["Contents"]]
    assert sorted(keys) == sorted(
        ["out.jsonl", *(f"files/rows.jsonl:{number}.json" for number in range(1, 13))]
    )
    body = bucket.get_object(Bucket="data", Key="out.jsonl")["Body"].read()
    assert [json.loads(line)["output"]["x"] for line in body.splitlines()] == list(range(12))
