"""What another program prints: run once, and not for longer than somebody waits for it."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from contextlib import suppress


async def output_of(words: Sequence[str], seconds: float, *, quiet: bool = False, env: dict[str, str] | None = None) -> tuple[int, bytes]:
    """Its exit code, and what it wrote to stdout; `quiet` drops what it says on stderr. `env`: this process's if not given.

    Raises OSError where it cannot be started, and TimeoutError where it takes longer. It is ended then, and when this is cancelled.
    """
    process = await asyncio.create_subprocess_exec(*words, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL if quiet else None, env=env)
    try:
        output, _ = await asyncio.wait_for(process.communicate(), seconds)
    except asyncio.TimeoutError:  # in Python 3.10 it is not the built-in one
        raise TimeoutError from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output
