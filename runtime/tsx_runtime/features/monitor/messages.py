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
- `samples`: `model` and `version`. The body is samples one after the other: `SAMPLE`, and then the
  meta (see `wire`), the body, the answer's header block and the answer's body.
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
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from tsx_archiver.monitor.config import HEADER_PREFIX
from tsx_runtime.shared.redaction import is_secret_header
from tsx_runtime.wire import TENSORS_HEAD, Body, Parts, content_type_of

FRAME = struct.Struct("!II")
# The time of arrival, the seconds until the answer, its status, and the sizes of the four parts.
SAMPLE = struct.Struct("!ddHIIII")
MAX_HEAD_BYTES = 64 << 20
STORE_VARIABLE = "TSX_MONITOR_STORE"  # the store; other users can read a process's arguments


class RawSample(NamedTuple):
    """A request and its answer, as the front end has them."""

    at: float  # seconds since 1970 at which the request had arrived
    seconds: float  # the time until the answer
    status: int
    meta: bytes  # see `wire`
    body: Body
    answer_headers: bytes  # a header block
    answer: bytes


class MonitorSample(NamedTuple):
    """A request and its answer, as the monitor process gets them."""

    model: str
    version: str
    request_id: str
    at: float
    seconds: float
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


def encode_sample(sample: RawSample) -> bytes:
    """Return a sample for a `samples` message."""
    at, seconds, status, meta, body, answer_headers, answer = sample
    if isinstance(body, Parts):
        body = b"".join(body.pieces)
    sizes = len(meta), len(body), len(answer_headers), len(answer)
    return b"".join((SAMPLE.pack(at, seconds, status, *sizes), meta, body, answer_headers, answer))


def decode_samples(
    model: str, version: str, data: bytes, headers: re.Pattern[bytes]
) -> Iterator[MonitorSample]:
    """Yield the samples of a message, with the headers of a `header_pattern`."""
    end = 0
    while end < len(data):
        at, seconds, status, *sizes = SAMPLE.unpack_from(data, end)
        ends = [*accumulate(sizes, initial=end + SAMPLE.size)]
        meta, body, answer_headers, answer = (data[a:b] for a, b in pairwise(ends))
        end = ends[-1]
        yield MonitorSample(
            model,
            version,
            meta.partition(b"\r")[0].decode("latin-1"),
            at,
            seconds,
            status,
            {
                name.decode("latin-1").lower(): value.decode("latin-1")
                for name, value in headers.findall(meta)
            },
            content_type_of(answer_headers),
            body,
            answer,
        )


def header_pattern(paths: Iterable[str]) -> re.Pattern[bytes]:
    """Return the pattern of the headers that a sample needs, in the meta of a request.

    An archive may name any header; those with credentials are left out.
    """
    names = {b"content-type", TENSORS_HEAD}
    for path in paths:
        name = path.removeprefix(HEADER_PREFIX)
        if name != path and not is_secret_header(name):
            names.add(name.encode("latin-1", "replace"))
    return re.compile(
        rb"\r\n(%b): ([^\r\n]*)" % b"|".join(sorted(map(re.escape, names))), re.IGNORECASE
    )
