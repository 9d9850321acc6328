"""Directories that no other user of the machine can change."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from tsx_archiver import ArchiveSpec, CacheError, default_cache, open_archive, write_archive
from tsx_archiver.storage.cache import Cache
from tsx_archiver.storage.private_directory import (
    CAN_CHECK,
    OTHERS_WRITE,
    check_directory,
    private_directory,
    private_opener,
)

if not CAN_CHECK:
    pytest.skip("this system's directories cannot be checked", allow_module_level=True)

STRANGER = 54321  # a user id without a name, as in most containers
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Make a directory like /tmp."""
    directory = tmp_path / "shared"
    directory.mkdir()
    directory.chmod(0o1777)
    return directory


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


FORK = multiprocessing.get_context("fork")  # another user may not be allowed to start this Python


@contextmanager
def as_stranger(
    function: Callable[..., object], *arguments: object, group: int = STRANGER
) -> Iterator[ForkProcess]:
    """Run a function as another user until the context ends."""

    def run() -> None:
        os.setgroups([])
        os.setgid(group)
        os.setuid(STRANGER)
        function(*arguments)

    child = FORK.Process(target=run)
    child.start()
    try:
        yield child
    finally:
        child.kill()
        child.join()


@contextmanager
def umask(value: int) -> Iterator[None]:
    previous_umask = os.umask(value)
    try:
        yield
    finally:
        os.umask(previous_umask)


@pytest.mark.parametrize("value", [0, 0o022, 0o077])
def test_missing_directories_are_created_private_whatever_the_umask(
    tmp_path: Path, value: int
) -> None:
    with umask(value):
        private_directory(tmp_path / "a" / "b" / "c")
    assert [mode(tmp_path / name) for name in ("a", "a/b", "a/b/c")] == [0o700] * 3


def test_a_parent_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError, match=f"{tmp_path}/open can be written by other users"):
        private_directory(tmp_path / "open" / "cache")
    assert not (tmp_path / "open" / "cache").exists()
    with pytest.raises(PermissionError, match="can be written by other users"):
        check_directory(tmp_path / "open")


def test_a_user_directory_inside_a_sticky_one_is_private(shared: Path) -> None:
    private_directory(shared / "cache")
    private_directory(shared / "cache")
    with pytest.raises(PermissionError, match="can be written by other users"):
        private_directory(shared)


def test_links_of_the_same_user_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "absolute").symlink_to(tmp_path / "real")
    (tmp_path / "relative").symlink_to("absolute")
    private_directory(tmp_path / "relative" / ".." / "relative" / "cache")
    assert (tmp_path / "real" / "cache").is_dir()


def test_circular_links_end_in_an_error(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="symbolic links"):
        private_directory(tmp_path / "one")


def test_the_error_of_a_file_in_the_path_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as caught:
        private_directory(tmp_path / "file" / "cache")
    assert caught.value.filename == str(tmp_path / "file")


def test_a_check_creates_no_directories(tmp_path: Path) -> None:
    check_directory(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


@as_root
def test_a_directory_of_another_user_is_refused(shared: Path) -> None:
    (shared / "taken").mkdir()
    os.chown(shared / "taken", STRANGER, STRANGER)
    with pytest.raises(PermissionError, match=rf"taken belongs to another user \(uid {STRANGER}\)"):
        private_directory(shared / "taken" / "cache")


@as_root
def test_a_link_of_another_user_is_refused_wherever_it_leads(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir(mode=0o700)
    (shared / "link").symlink_to(tmp_path / "own")
    os.chown(shared / "link", STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(PermissionError, match="link belongs to another user"):
        private_directory(shared / "link")


@as_root
def test_only_the_root_group_may_write_parent_directories(tmp_path: Path) -> None:
    """A container of OpenShift runs as any user in root's group, which writes its directories."""
    (tmp_path / "group").mkdir()
    (tmp_path / "group").chmod(0o775)
    private_directory(tmp_path / "group" / "cache")
    os.chown(tmp_path / "group", 0, STRANGER)
    with pytest.raises(PermissionError, match="can be written by other users"):
        private_directory(tmp_path / "group" / "cache")


@pytest.mark.usefixtures("processes")
@as_root
def test_an_unnamed_user_in_the_root_group_has_its_own_cache(
    shared: Path, make_reachable: Callable[[Path], None]
) -> None:
    shared.chmod(0o1775)  # the mode of /tmp in images for OpenShift
    make_reachable(shared)
    with as_stranger(Cache, shared / "cache", group=0) as child:
        child.join(60)
        assert child.exitcode == 0
    assert (shared / "cache" / "archives" / "entries").stat().st_uid == STRANGER


@as_root
def test_a_volume_owned_by_root_is_trusted_in_a_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume").chmod(0o777)
    with pytest.raises(PermissionError):
        private_directory(tmp_path / "volume" / "cache")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    private_directory(tmp_path / "volume" / "cache")


def test_a_file_is_opened_private_and_without_following_links(tmp_path: Path) -> None:
    with umask(0), open(tmp_path / "file", "w", opener=private_opener):
        assert mode(tmp_path / "file") == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with (
        pytest.raises(OSError, match="symbolic links"),
        open(tmp_path / "link", "a", opener=private_opener),
    ):
        pass
    assert not (tmp_path / "victim").exists()


# The cache


@pytest.fixture
def archive(spec: ArchiveSpec, tmp_path: Path) -> Path:
    return write_archive(spec, tmp_path)


def test_the_cache_is_created_private_whatever_the_umask(archive: Path, cache: Path) -> None:
    with umask(0):
        open_archive(archive, cache=cache).close()
    directories = [
        cache,
        cache / "archives",
        *(path for path in (cache / "archives").iterdir()),
        *(cache / "archives/entries").iterdir(),
    ]
    assert {mode(path) for path in directories} == {0o700}


def test_others_cannot_write_in_the_cache_whatever_the_umask(
    archive: Path, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "shared").touch()

    def make(files: Path) -> dict[str, int]:
        for path in (files / "lib" / "module.py", files / ".hidden" / ".x"):
            path.parent.mkdir(parents=True)
            path.touch()
        (files / "lib" / "linked").symlink_to(tmp_path / "shared")
        (files / "lib" / "same").hardlink_to(tmp_path / "shared")
        return {}

    os.utime(archive, (1, 1))  # only digests of files that are not recent are cached
    with umask(0):
        (tmp_path / "shared").chmod(0o666)
        open_archive(archive, cache=cache).close()
        entry = Cache(cache, kind="environments").open("0" * 64, make)
        entry.lock.close()
    assert list((cache / "archives" / "seen").iterdir())
    writable_names = {
        path.name
        for path in cache.rglob("*")
        if not path.is_symlink() and mode(path) & OTHERS_WRITE
    }
    assert writable_names == {"same"}  # a hard link to a file outside of the cache


@pytest.mark.parametrize("name", ["archives", "archives/entries", "archives/seen"])
@pytest.mark.parametrize("bits", [0o770, 0o707])
def test_a_cache_that_a_group_or_others_can_write_is_refused(
    archive: Path, cache: Path, name: str, bits: int
) -> None:
    open_archive(archive, cache=cache).close()
    (cache / name).chmod(bits)
    with pytest.raises(
        CacheError, match=r"can be written by other users.* Choose another cache directory"
    ):
        open_archive(archive, cache=cache)


@as_root
@pytest.mark.parametrize("name", ["entries", "seen", "partial", "building"])
def test_a_cache_directory_of_another_user_is_refused(
    archive: Path, cache: Path, name: str
) -> None:
    open_archive(archive, cache=cache).close()
    (cache / "archives").chmod(0o770)
    os.chown(cache / "archives" / name, STRANGER, STRANGER)
    (cache / "archives").chmod(0o700)
    with pytest.raises(CacheError, match=f"{name} belongs to another user"):
        open_archive(archive, cache=cache)


@as_root
def test_an_entry_of_another_user_is_ignored(archive: Path, cache: Path) -> None:
    with open_archive(archive, cache=cache) as opened:
        planted_entry = opened.directory.parent
    (planted_entry / "files" / "handler.py").write_text("planted")
    os.chown(planted_entry, STRANGER, STRANGER)
    with open_archive(archive, cache=cache) as opened:
        assert (opened.directory / "handler.py").read_text() != "planted"


@pytest.mark.usefixtures("processes")
def test_the_cache_of_a_user_without_a_home_has_an_unpredictable_name(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    predictable_path = shared / f"tsx-{os.getuid()}"
    predictable_path.mkdir()
    code = f"import tempfile; tempfile.tempdir = {str(shared)!r}; from tsx_archiver import default_cache; print(default_cache())"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    cache_path = Path(result.stdout.strip())
    assert cache_path.parent == shared
    assert cache_path != predictable_path
    assert "set cache_dir to keep one" in result.stderr
    assert not cache_path.exists(), "it goes with the process"


@as_root
def test_no_cache_is_created_in_the_home_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sudo -E` keeps a home whose owner could swap the files that root then runs."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    assert default_cache() == tmp_path / "home" / ".cache" / "tsx"
    os.chown(tmp_path / "home", STRANGER, STRANGER)
    assert default_cache().parent != tmp_path / "home" / ".cache"


def swap(parent: Path, planted_entry: Path, has_started: Event) -> None:
    """Replace a directory by a link to another one and back, in an endless loop."""
    moved = parent.with_name("away")
    while True:
        with suppress(OSError):
            parent.rename(moved)
        with suppress(OSError):
            parent.symlink_to(planted_entry)
            parent.unlink()
        with suppress(OSError):
            moved.rename(parent)
        has_started.set()


@pytest.mark.usefixtures("processes")
@as_root
@pytest.mark.parametrize("attack", ["in a sticky directory", "in a directory of the attacker's"])
def test_a_cache_that_is_swapped_during_opening_never_returns_a_strangers_entry(
    attack: str, archive: Path, tmp_path: Path, make_reachable: Callable[[Path], None]
) -> None:
    parent = tmp_path / "place"
    parent.mkdir()
    parent.chmod(0o1777)
    if attack == "in a directory of the attacker's":
        os.chown(parent, STRANGER, STRANGER)
    make_reachable(parent)
    planted_entry = tmp_path / "planted"
    digest = open_and_plant(archive, planted_entry)
    for path in (planted_entry, *planted_entry.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
    cache = parent / "cache"
    cache.mkdir(mode=0o700)
    has_started = FORK.Event()
    opened = 0
    with as_stranger(swap, cache, planted_entry, has_started):
        assert has_started.wait(60)
        for _ in range(100):
            try:
                with open_archive(archive, cache=cache) as entry:
                    opened += 1
                    assert entry.digest == digest
                    assert entry.directory.stat().st_uid == os.geteuid()
                    assert not (entry.directory / "handler.py").read_text().startswith("planted")
            except CacheError:
                continue
    assert opened == (100 if attack == "in a sticky directory" else 0)


def open_and_plant(archive: Path, cache: Path) -> str:
    """Make a cache entry of the archive with another handler, and return the entry's digest."""
    with open_archive(archive, cache=cache) as opened:
        handler = opened.directory / "handler.py"
        handler.write_bytes(b"planted".ljust(handler.stat().st_size))
        assert opened.digest is not None
        return opened.digest


@pytest.fixture
def make_reachable(tmp_path: Path) -> Callable[[Path], None]:
    """Return a function that lets other users reach a directory below the tests' own."""

    def open_parents(path: Path) -> None:
        for parent in path.parents:
            if parent == tmp_path or parent.name.startswith(("pytest-", "popen-")):
                parent.chmod(0o711)

    return open_parents


def test_the_cache_is_checked_once_per_opening(
    archive: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def count_call(path: Path, *, strict: bool) -> None:
        calls.append(path)
        private_directory(path, strict=strict)

    monkeypatch.setattr("tsx_archiver.storage.cache.private_directory", count_call)
    open_archive(archive, cache=cache).close()
    assert len(calls) == 5
