"""Lets a server count or not, as it is told: SIGUSR1 and it counts, SIGUSR2 and it does not.

`cost_of_metrics.py` puts this where Python imports it when it starts (`sitecustomize`). A function
that counts has two bodies, its own and one without what counts, and the signal exchanges them: the
process stays the same one, with all that it holds.
"""

from __future__ import annotations

import inspect
import signal
import struct
import sys
import textwrap
from types import CodeType, FunctionType
from typing import Any


def without(function: Any, changes: dict[str, str]) -> tuple[FunctionType, CodeType]:
    """The function, and its body with these changes.

    A server in which one of them finds nothing does not start.
    """
    source = textwrap.dedent(inspect.getsource(function))
    for text, instead in changes.items():
        if source.count(text) != 1:
            raise SystemExit(
                f"{function.__name__} has no {text!r} any more: change benchmarks/blind.py with it"
            )
        source = source.replace(text, instead)
    made: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source, function.__globals__, made)
    return function, made[function.__name__].__code__


def of_front_end() -> list[tuple[FunctionType, CodeType]]:
    from tsx_runtime.core.scheduling import channel
    from tsx_runtime.core.scheduling.dispatcher import Dispatcher
    from tsx_runtime.http.fast_lane.exchange import Exchange

    batch = {
        "times = extra if type(extra) is bytes and len(extra) == TIMES_SIZE else times_in(extra)": (
            ""
        ),
        "batch = (free, at, now, size, times, arrivals, None if codes.count(200) == size else codes)": (
            "batch = ()"
        ),
        "self.stats.add_batch(batch, jobs)": "pass",
    }
    vars(channel)["just_now"] = struct.Struct(
        "d"
    ).pack  # a batch that is sent while nothing is counted may come back when something is
    return [
        without(channel.Channel.send, {"arrivals(jobs)": "just_now(now) * len(jobs)"}),
        without(Dispatcher.on_reply, batch),
        without(Exchange.answer, {"lane.counts.plain += 1": ""}),
    ]


def of_worker() -> list[tuple[FunctionType, CodeType]]:
    """The steps of a handler that has some go on telling how long they take; what is measured has
    none.
    """
    from tsx_runtime.worker import main

    changes = {
        "laps = step_times.begin(ahead.laps)": "pass",
        "laps = step_times.begin_next()": "pass",
        "laps = []": "pass",
        "done = time.monotonic()": "",
        "model.prediction_time is not None and done >= model.prediction_time.due": "False",
        "step_times.times(start if began is None else began, done, laps)": 'b""',
    }
    return [without(main._reply, changes)]


def listen(both: list[tuple[FunctionType, CodeType]]) -> None:
    seeing = [(function, function.__code__) for function, _ in both]
    for number, bodies in ((signal.SIGUSR1, seeing), (signal.SIGUSR2, both)):
        signal.signal(number, lambda *_, bodies=bodies: use(bodies))


def use(bodies: list[tuple[FunctionType, CodeType]]) -> None:
    for function, body in bodies:
        function.__code__ = body


if __name__ == "sitecustomize" and "serve" in sys.orig_argv:
    listen(of_front_end())
elif __name__ == "sitecustomize" and any("forkserver" in argument for argument in sys.orig_argv):
    listen(of_worker())
