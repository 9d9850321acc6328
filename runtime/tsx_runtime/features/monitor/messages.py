"""The messages between a server and its monitor process.

A message is a frame: the sizes of its head and of its body as two 32-bit big-endian numbers, the
head as JSON, and the body as bytes. The process reads frames from stdin and writes frames to
stdout. `kind` in the head is the kind of the message. Messages to the process, with the other
members of their heads:

- `version`: `model`, `version`, `config` (`MonitorConfig`), `fields` (of the handler), `signature`
  (input schema), `registered` (seconds since 1970), `recording` (whether the model is recorded now)
  and `recordings` (the directory of its recordings, or null). The body is the file of the baseline,
  or empty.
- `end`: `model` and `version`.
- `sample`: `sizes` (of request and answer), and the fields of `MonitorSample` except the bodies.
  The body is the request's and the answer's body.
- `call`: `id`, `operation` and `arguments`. The body is that of the request.

A version is announced again after each change, and with all others after the process was started
again. Messages from the process:

- `ready`: `problem`, which is why the store cannot be used, or null.
- `result`: `id` and `status`. The body is the JSON of the response.
- `state`: `states`, a list of `VersionState`.

The operations of `call` are `feedback`, `report`, `contests`, `answer_contest`, `quality`, `worst`
and `request`; see `process/operations.py`. The body of a `result` whose status is not 200 is an
error's JSON (`tsx_runtime.errors.error_body`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

FRAME = struct.Struct("!II")
MAX_HEAD_BYTES = 64 << 20
STORE_VARIABLE = "TSX_MONITOR_STORE"  # the store; other users can read a process's arguments


class MonitorSample(NamedTuple):
    """A request and its answer, as the monitor process gets them."""

    model: str
    version: str
    request_id: str
    at: float  # seconds since 1970 at which the request had arrived
    seconds: float  # the time until the answer
    status: int
    headers: Mapping[str, str]  # lower-case names; the content type, and declared headers
    answer_type: str  # the content type of the answer
    body: bytes
    answer: bytes


class VersionState(NamedTuple):
    """The state of a monitored version, for `/metrics`, alerts and rollouts."""

    model: str
    version: str
    samples: int  # samples since the process was started
    windows: int  # complete windows since then
    drift: float | None  # the largest population stability index in the last window
    drifted: list[str]  # columns with an alarm, by the last window
    fields: dict[str, float]  # population stability index by column in the last window
    feedback: int  # answers whose truth is known
    accuracy: float | None
    mean_error: float | None  # mean absolute error


def encode_frame(head: Mapping[str, Any], *body: bytes) -> bytes:
    """Return a frame; the parts of the body are joined."""
    text = json.dumps(head).encode()
    return b"".join((FRAME.pack(len(text), sum(map(len, body))), text, *body))
