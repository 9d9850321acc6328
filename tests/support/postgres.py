"""A real PostgreSQL server: Debian's programs, a cluster of its own, a unix socket."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def programs() -> Path | None:
    """Where initdb and pg_ctl are: the newest of Debian's, else those on the PATH."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3])
    )
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


@contextmanager
def postgres_server() -> Iterator[str]:
    """Its URL, without a database.

    It does not wait for the disk, unlike a real one, unless POSTGRES_FSYNC is set.
    """
    place = programs()
    if place is None:
        pytest.skip("there is no PostgreSQL server; scripts/install-postgres installs one")
    directory = Path(tempfile.mkdtemp(prefix="pg-"))  # short: it is the path of a socket
    owner = _owner()
    if owner is not None:
        os.chown(directory, owner, owner)

    def run(program: str, *words: str) -> None:
        command = [str(place / program), *words]
        subprocess.run(
            command,
            check=True,
            user=owner,
            group=owner,
            extra_groups=None if owner is None else [],
            cwd=directory,
            stdout=subprocess.DEVNULL,
        )

    data, log = str(directory / "data"), str(directory / "log")
    run("initdb", "-D", data, "-U", "tsx", "-A", "trust", "-E", "UTF8", "--no-sync", "--no-locale")
    fsync = "on" if os.environ.get("POSTGRES_FSYNC") else "off"
    options = f"-c listen_addresses='' -c unix_socket_directories={directory} -c fsync={fsync} -c shared_buffers=16MB"
    try:
        run("pg_ctl", "-D", data, "-l", log, "-w", "-o", options, "start")
        yield f"postgresql://tsx@/DATABASE?host={directory}"
    finally:
        run("pg_ctl", "-D", data, "-m", "immediate", "-w", "stop")
        shutil.rmtree(directory, ignore_errors=True)


def _owner() -> int | None:
    """PostgreSQL does not run as root: then it runs as its own user."""
    if os.geteuid():
        return None
    try:
        return pwd.getpwnam("postgres").pw_uid
    except KeyError:
        return pwd.getpwnam("nobody").pw_uid
