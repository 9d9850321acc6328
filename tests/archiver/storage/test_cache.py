from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from tsx_archiver import ArchiveSpec, CacheError, default_cache, open_archive, write_archive
from tsx_archiver.errors import CorruptMember
from tsx_archiver.storage import cache as cache_module
from tsx_archiver.storage.cache import DAY_S, Cache, CacheLimits
from tsx_archiver.storage.digest import MIN_AGE_NS
from tsx_archiver.storage.locks import FileLock

HOUR = 3600.0


@pytest.fixture
def archive(spec: ArchiveSpec, tmp_path: Path) -> Path:
    path = write_archive(spec, tmp_path)
    long_ago = time.time() - 1000
    os.utime(path, (long_ago, long_ago))
    return path


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "archives" / "entries").iterdir())


def partial(cache: Path) -> list[Path]:
    return sorted((cache / "archives" / "partial").iterdir())


def test_an_archive_is_unpacked_once_under_its_sha256(archive: Path, cache: Path) -> None:
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    with open_archive(archive, cache=cache) as first, open_archive(archive, cache=cache) as second:
        assert first.directory == second.directory
        assert (first.digest, first.directory.parent.name.split(".")[0]) == (digest, digest)
    assert len(entries(cache)) == 1
    assert partial(cache) == []
    copy = archive.with_name("copy.mar")
    copy.write_bytes(archive.read_bytes())
    with open_archive(copy, cache=cache) as third:
        assert third.directory == first.directory


def test_a_changed_archive_is_unpacked_again(archive: Path, spec: ArchiveSpec, cache: Path) -> None:
    with open_archive(archive, cache=cache) as first:
        Path("handler.py").write_text("# new\n")
        write_archive(spec, archive, force=True)
        with open_archive(archive, cache=cache) as second:
            assert (second.directory / "handler.py").read_text() == "# new\n"
            assert (first.directory / "handler.py").read_text() != "# new\n"


def test_a_file_that_has_not_changed_is_not_read_again(
    archive: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_archive(archive, cache=cache) as first:
        monkeypatch.setattr("tsx_archiver.storage.digest.MIB", "no size to read")
        with open_archive(archive, cache=cache) as second:
            assert second.digest == first.digest


def test_a_cached_digest_is_used_only_while_the_file_is_unchanged(
    archive: Path, cache: Path
) -> None:
    open_archive(archive, cache=cache).close()
    notes = list((cache / "archives" / "seen").iterdir())
    assert len(notes) == 1
    notes[0].write_text(
        notes[0].read_text().replace(hashlib.sha256(archive.read_bytes()).hexdigest(), "0" * 64)
    )
    with open_archive(archive, cache=cache) as cached:
        assert cached.digest == "0" * 64
    archive.touch()
    with open_archive(archive, cache=cache) as updated:
        assert updated.digest == hashlib.sha256(archive.read_bytes()).hexdigest()


def test_the_digest_of_a_recently_written_file_is_not_cached(archive: Path, cache: Path) -> None:
    os.utime(archive, ns=(time.time_ns(), time.time_ns() + MIN_AGE_NS * 100))
    open_archive(archive, cache=cache).close()
    assert list((cache / "archives" / "seen").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        lambda files: (files / "handler.py").unlink(),
        lambda files: (files / "handler.py").write_text(""),
        lambda files: (
            (files / "handler.py").unlink(),
            (files / "handler.py").symlink_to("model.py"),
        ),
        lambda files: (files.parent / "complete.json").unlink(),
        lambda files: (files.parent / "complete.json").write_text("{"),
    ],
    ids=["missing file", "other size", "link", "no marker", "broken marker"],
)
@pytest.mark.parametrize("in_use", [False, True])
def test_a_damaged_entry_is_recreated(
    archive: Path, cache: Path, damage: Callable[[Path], object], in_use: bool
) -> None:
    user = open_archive(archive, cache=cache)
    content = (user.directory / "handler.py").read_text()
    if not in_use:
        user.close()
    damage(user.directory)
    with open_archive(archive, cache=cache) as second:
        assert (second.directory / "handler.py").read_text() == content
        assert user.directory.exists() == in_use, "what is in use stays, even damaged"
    user.close()


def test_files_that_a_handler_adds_do_not_count_as_damage(archive: Path, cache: Path) -> None:
    with open_archive(archive, cache=cache) as first:
        (first.directory / "__pycache__").mkdir()
        (first.directory / "compiled.bin").touch()
        with open_archive(archive, cache=cache) as second:
            assert second.directory == first.directory


@pytest.mark.usefixtures("processes")
def test_two_processes_that_open_an_archive_together_unpack_it_once(
    archive: Path, cache: Path
) -> None:
    code = "import sys, tsx_archiver\nsys.stdin.read(1)\nprint(tsx_archiver.open_archive(sys.argv[1], cache=sys.argv[2]).directory)"
    command = [sys.executable, "-c", code, str(archive), str(cache)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("x")
        process.stdin.flush()
    directories = {process.communicate(timeout=30)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert directories == {str(entries(cache)[0] / "files")}


def test_threads_that_open_an_archive_together_unpack_it_once(archive: Path, cache: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(lambda _: open_archive(archive, cache=cache), range(16)))
    assert len({archive.directory for archive in opened}) == len(entries(cache)) == 1
    for archive in opened:
        archive.close()


@pytest.mark.usefixtures("processes")
def test_files_of_a_killed_process_are_removed_by_the_next_one(archive: Path, cache: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tsx_archiver.storage.cache import Cache\n"
        "def make(target):\n"
        "    (target / 'half').write_text('x'); print('making', flush=True); sys.stdin.read()\n"
        "Cache(Path(sys.argv[1])).open('a' * 64, make)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(cache)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "making\n"
    Cache(cache).clean()
    assert len(partial(cache)) == 1, "its maker is alive"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    open_archive(archive, cache=cache).close()
    wait_until_cleaned()
    assert partial(cache) == []


def make_entry(cache: Cache, letter: str, size: int) -> Path:
    def make(target: Path) -> dict[str, int]:
        (target / "data").write_bytes(bytes(size))
        return {"data": size}

    entry = cache.open(letter * 64, make)
    entry.lock.close()
    return entry.files.parent


def test_entries_that_are_unused_for_long_are_removed(tmp_path: Path) -> None:
    cache = Cache(tmp_path, CacheLimits(age=DAY_S))
    old, new = make_entry(cache, "a", 1), make_entry(cache, "b", 1)
    cache.clean(time.time() + DAY_S / 2)
    assert old.exists()
    os.utime(old / "complete.json", (0, 0))
    cache.clean()
    assert not old.exists()
    assert new.exists()


@pytest.mark.parametrize("limits", [{"total": 250}, {"entries": 2}])
def test_a_full_cache_removes_the_least_recently_used_entries(
    tmp_path: Path, limits: dict[str, int]
) -> None:
    cache = Cache(
        tmp_path, CacheLimits(age=float("inf"))
    )  # There is no limit yet, since opening an entry would clean the cache.
    paths = [make_entry(cache, letter, 100) for letter in "abc"]
    for number, entry in enumerate(paths):
        os.utime(entry / "complete.json", (1e9 + number, 1e9 + number))
    cache = Cache(tmp_path, CacheLimits(**limits, age=float("inf")))
    cache.clean()
    assert [entry.exists() for entry in paths] == [False, True, True]


def wait_until_cleaned() -> None:
    for thread in threading.enumerate():
        if thread.name == "tsx-cache":
            thread.join(60)


def test_opening_an_archive_cleans_the_cache_in_the_background(
    archive: Path, tmp_path: Path
) -> None:
    old = make_entry(Cache(tmp_path), "a", 100)
    wait_until_cleaned()
    os.utime(old / "complete.json", (0, 0))
    with open_archive(archive, cache=Cache(tmp_path)) as opened:
        wait_until_cleaned()
        assert not old.exists()
        assert opened.directory.exists()


def test_a_full_disk_cleans_the_cache_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = make_entry(Cache(tmp_path), "a", 100)
    wait_until_cleaned()
    cache = Cache(tmp_path, CacheLimits(total=0))
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=0 if old.exists() else 200)
    )
    cache.check_room(200)
    assert not old.exists()


def test_an_entry_in_use_is_never_removed(tmp_path: Path) -> None:
    cache = Cache(tmp_path, CacheLimits(total=0, age=0))
    entry = cache.open("a" * 64, lambda target: {})
    os.utime(entry.files.parent / "complete.json", (0, 0))
    cache.clean()
    assert entry.files.exists()
    entry.lock.close()
    cache.clean()
    assert not entry.files.exists()


def test_an_entry_counts_as_used_until_it_is_closed(archive: Path, tmp_path: Path) -> None:
    with open_archive(archive, cache=tmp_path) as opened:
        os.utime(opened.directory.parent / "complete.json", (0, 0))
    Cache(tmp_path).clean()
    assert opened.directory.exists()


def test_an_entry_that_another_process_removes_is_recreated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path)
    entry = make_entry(cache, "a", 1)

    def remove_and_check(directory: Path) -> bool:
        shutil.rmtree(directory)
        return is_trusted(directory)

    is_trusted = cache_module._is_trusted_directory
    monkeypatch.setattr(cache_module, "_is_trusted_directory", remove_and_check)
    assert make_entry(cache, "a", 1) != entry


def test_an_entry_that_is_being_removed_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path)
    make_entry(cache, "a", 1)
    wait_until_cleaned()
    with monkeypatch.context() as patch:
        # It simulates a process that is killed before it removes the files.
        patch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
        cache.prune(0)
    assert entries(tmp_path) == []
    cache.clean()
    assert partial(tmp_path) == []


def test_a_recent_partial_entry_without_a_lock_is_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    (cache.root / "partial" / "young").mkdir()
    cache.clean()
    assert len(partial(tmp_path)) == 1
    cache.clean(time.time() + 2 * HOUR)
    assert partial(tmp_path) == []


def test_a_new_entry_whose_directory_is_removed_gets_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path)
    lock_shared = FileLock.lock_shared
    calls = []

    def remove_lock_once(lock: FileLock) -> bool:
        calls.append(lock.path)
        if len(calls) == 1:
            lock.path.unlink()
        return lock_shared(lock)

    monkeypatch.setattr(FileLock, "lock_shared", remove_lock_once)
    assert make_entry(cache, "a", 1).exists()
    assert len(calls) == 2


def test_a_failure_while_creating_an_entry_leaves_nothing(tmp_path: Path) -> None:
    def fail(target: Path) -> dict[str, int]:
        (target / "half").touch()
        raise CorruptMember("no")

    with pytest.raises(CorruptMember):
        Cache(tmp_path).open("a" * 64, fail)
    assert partial(tmp_path) == entries(tmp_path) == []


def test_different_archives_do_not_wait_for_each_other(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    started, continue_ = threading.Event(), threading.Event()

    def slow(target: Path) -> dict[str, int]:
        started.set()
        assert continue_.wait(10)
        return {}

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(cache.open, "a" * 64, slow)
        assert started.wait(10)
        make_entry(cache, "b", 1)
        continue_.set()
        future.result(10).lock.close()


def test_an_archive_that_changes_during_unpacking_is_refused(
    archive: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_room(self: Cache, size: int) -> None:
        archive.touch()

    monkeypatch.setattr(Cache, "check_room", check_room)
    with pytest.raises(CorruptMember, match="changed while it was unpacked"):
        open_archive(archive, cache=cache)
    assert entries(cache) == partial(cache) == []


def test_too_little_disk_space_is_reported_before_anything_is_written(
    archive: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tsx_archiver.storage.cache.shutil.disk_usage", lambda path: SimpleNamespace(free=100)
    )
    with pytest.raises(CacheError, match=r"has 100 bytes free, and the archive needs 1\d\.\d kB"):
        open_archive(archive, cache=cache)


def test_the_error_of_a_cache_that_cannot_be_created_names_it(
    archive: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="cannot be used as a cache"):
        open_archive(archive, cache=tmp_path / "file")


def test_the_default_cache_belongs_to_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "tsx"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "tsx"
    monkeypatch.setenv("HOME", "/nonexistent")
    temporary = default_cache()
    assert temporary == default_cache(), "one for the whole process"
    assert temporary.stat().st_mode & 0o777 == 0o700
