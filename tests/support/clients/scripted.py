"""A server with scripted responses: pieces of bytes, delays, and closed connections."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nOK"
CLOSE = None
Step = bytes | float | None  # bytes to send, seconds to wait, or the end of the connection
Script = Callable[[int, "Request"], Sequence[Step]]


class Request(NamedTuple):
    line: bytes
    headers: dict[bytes, bytes]
    body: bytes


@contextmanager
def scripted(script: Script, *, port: int = 0) -> Iterator[str]:
    """Answer the n-th request, counted over all connections, with `script(n, request)`."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    numbers = iter(range(10**9))
    address = ""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                line, *lines = head[:-4].split(b"\r\n")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (field.partition(b":") for field in lines)
                }
                body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
                for step in script(next(numbers), Request(line, headers, body)):
                    if step is None:
                        return
                    if isinstance(step, float):
                        await asyncio.sleep(step)
                    else:
                        writer.write(step)
                        await writer.drain()
                        await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def main() -> None:
        nonlocal address
        listening = await asyncio.start_server(serve, "127.0.0.1", port, backlog=256)
        address = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        listening.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert ready.wait(60)
    try:
        yield address
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()
