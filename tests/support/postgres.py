"""A real PostgreSQL server with its own data directory and a unix socket."""

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
    """Return the directory of initdb and pg_ctl: Debian's newest version, or that on the PATH."""
    paths = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3])
    )
    on_path = shutil.which("initdb")
    return paths[-1].parent if paths else Path(on_path).parent if on_path else None


@contextmanager
def postgres_server() -> Iterator[str]:
    """Start a server, and yield its URL without a database.

    It writes to disk synchronously only if POSTGRES_FSYNC is set.
    """
    bin_directory = programs()
    if bin_directory is None:
        pytest.skip("there is no PostgreSQL server; scripts/install-postgres installs one")
    directory = Path(
        tempfile.mkdtemp(prefix="pg-")
    )  # short, since it contains the path of a socket
    owner = _owner()
    if owner is not None:
        os.chown(directory, owner, owner)

    def run(program: str, *arguments: str) -> None:
        command = [str(bin_directory / program), *arguments]
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
    """Return the user that runs the server if this user is root, which PostgreSQL refuses."""
    if os.geteuid():
        return None
    try:
        return pwd.getpwnam("postgres").pw_uid
    except KeyError:
        return pwd.getpwnam("nobody").pw_uid
