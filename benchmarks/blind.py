"""A switch for the metrics of a running server: SIGUSR1 turns them on, and SIGUSR2 off.

`cost_of_metrics.py` makes this file the `sitecustomize` that Python imports at its start. Each
counting function gets a second body, without counting, and the signal exchanges the two. Everything
else in the process stays the same.
"""

from __future__ import annotations

import inspect
import signal
import struct
import sys
import textwrap
from types import CodeType, FunctionType
from typing import Any


def changed_body(function: Any, changes: dict[str, str]) -> tuple[FunctionType, CodeType]:
    """Return the function, and its body with these textual changes.

    If a change does not apply to the source, the server exits.
    """
    source = textwrap.dedent(inspect.getsource(function))
    for text, replacement in changes.items():
        if source.count(text) != 1:
            raise SystemExit(
                f"{function.__name__} has no {text!r} any more: change benchmarks/blind.py with it"
            )
        source = source.replace(text, replacement)
    namespace: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source, function.__globals__, namespace)
    return function, namespace[function.__name__].__code__


def front_end_bodies() -> list[tuple[FunctionType, CodeType]]:
    from tsx_runtime.core.scheduling import channel
    from tsx_runtime.core.scheduling.dispatcher import Dispatcher
    from tsx_runtime.http.fast_lane.exchange import Exchange

    names = ("free_since", "sent_at", "now", "size", "times", "arrivals")
    items = "".join(
        f"        {item},\n" for item in (*names, "None if codes.count(200) == size else codes")
    )
    batch = {
        "times = extra if type(extra) is bytes and len(extra) == TIMES_SIZE else times_in(extra)": (
            ""
        ),
        f"batch = (\n{items}    )": "batch = ()",
        "self.stats.add_batch(batch, jobs)": "pass",
    }
    # Counting may be switched on while a batch is at a worker; its reply then needs a sending time.
    vars(channel)["just_now"] = struct.Struct("d").pack
    return [
        changed_body(channel.Channel.send, {"pack_arrivals(jobs)": "just_now(now) * len(jobs)"}),
        changed_body(Dispatcher.on_reply, batch),
        changed_body(Exchange.answer, {"lane.counts.plain += 1": ""}),
    ]


def worker_bodies() -> list[tuple[FunctionType, CodeType]]:
    """Return the bodies of a worker, for a handler without steps, which would still be timed."""
    from tsx_runtime.worker import main

    changes = {
        "laps = step_times.begin(prepared.laps)": "pass",
        "laps = step_times.begin_next()": "pass",
        "laps = []": "pass",
        "end = time.monotonic()": "",
        "model.prediction_time is not None and end >= model.prediction_time.next_report_at": "False",
        "step_times.encode_times(start if started_at is None else started_at, end, laps)": 'b""',
    }
    return [changed_body(main._reply, changes)]


def listen(blind_bodies: list[tuple[FunctionType, CodeType]]) -> None:
    counting_bodies = [(function, function.__code__) for function, _ in blind_bodies]
    for number, bodies in ((signal.SIGUSR1, counting_bodies), (signal.SIGUSR2, blind_bodies)):
        signal.signal(number, lambda *_, bodies=bodies: install(bodies))


def install(bodies: list[tuple[FunctionType, CodeType]]) -> None:
    for function, body in bodies:
        function.__code__ = body


if __name__ == "sitecustomize" and "serve" in sys.orig_argv:
    listen(front_end_bodies())
elif __name__ == "sitecustomize" and any("forkserver" in argument for argument in sys.orig_argv):
    listen(worker_bodies())
