"""Clients that keep a server busy while a test changes it."""

from __future__ import annotations

import http.client
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from tests.runtime.conftest import RunningServer


class Answer(NamedTuple):
    body: bytes
    status: int
    content: bytes
    headers: Mapping[str, str]


@contextmanager
def load(
    server: RunningServer,
    request: Callable[[int], tuple[str, bytes, dict[str, str]]],
    *,
    clients: int,
    least: int,
) -> Iterator[list[Answer]]:
    """Send requests by both lanes until the block ends, at least `least` from each client.

    `request` returns the path, body and headers of the request with a number.
    """
    numbers, stop = itertools.count(), threading.Event()
    answers: list[Answer] = []

    def run() -> None:
        url = server.inference.base_url
        connection = http.client.HTTPConnection(url.host, url.port, timeout=60)
        for turn in itertools.count():
            if turn >= least and stop.is_set():
                break
            path, body, headers = request(next(numbers))
            chunked = turn % 3 == 0
            content = iter([body]) if chunked else body
            connection.request("POST", path, content, headers, encode_chunked=chunked)
            response = connection.getresponse()
            answers.append(Answer(body, response.status, response.read(), response.headers))
        connection.close()

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(run) for _ in range(clients)]
        try:
            yield answers
        finally:
            stop.set()
        for client in running:
            client.result()
