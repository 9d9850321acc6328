"""The frames between the front end and a worker, over one stream socket per worker.

A frame is a fixed header, a table, the items, and an extra, all little-endian:

    header   u8   kind          one of `Kind`
             u8   version       `VERSION`; both ends come from one installation, so it must agree
             u16  (zero)
             u32  batch         number of the batch; a reply repeats its request's
             u32  items         number of rows of the table
             u64  size          bytes after the header
    table    u32 code of each item, then u32 length of meta and u32 length of body of each item
    items    meta and body of the first item, meta and body of the second, ...
    extra    the remaining bytes of `size`

    kind      from      items                            extra
    LOAD      front     none                             `LoadOrder`, JSON
    LOADED    worker    none                             facts about the model, JSON (below)
    FAILED    worker    none; the worker exits           {"message", "traceback", "outline",
                                                         "out_of_memory"}, JSON
    BATCH     front     one per request: code 0,         empty
                        meta, body as received
    PIECE     worker    one: code = position in the      empty
                        batch, body = the piece,
                        meta = header block (only
                        with a request's first piece)
    REPLY     worker    one per request, in order:       empty, or `TIMES`, then `MetricDelta`s
                        code = HTTP status,              as JSON or nothing
                        meta = header block,
                        body = the answer
    PING      front     none                             empty
    PONG      worker    none; answers a PING,            empty
                        between batches
    CANCEL    front     none                             empty
    THREADS   front     none; the number of the batch    empty
                        is torch's number of threads
                        from the next batch on
    REPORT    worker    none; sent at any time           errors, output and metrics, JSON (below)
    ADAPTER   front     none; the worker takes or drops  {"name", "directory": null drops it},
                        an adapter while it serves       JSON
    ADAPTER   worker    none; the answer                 {"error": text or null}, JSON

LOADED has {"device": "cpu" or "cuda:0", "prefetch": whether the worker prepares a batch ahead,
"input": the handler's kind of input or null, "example": whether its description has an example,
"signature" and "monitor_fields": these attributes of the handler or null,
"precision": the precision in force or null, "form": the one of `forms` in use or null,
"forms_passed_over": [reason ...]}.

REPORT has {"errors": [{"message", "traceback", "count", "request_ids"}], "lines": [[time, stream,
text, [request id of the batch ...]]], "lost": number of omitted lines, "metrics"}. It covers the
time since the last one. Its metrics are those of asynchronous handlers, as in a REPLY.

After CANCEL no client waits for the batch. A worker that takes one batch after the other stops at
the next part of a stream; a REPLY still closes the batch.

`TIMES` are five f64: the start of the batch in the worker, the seconds until its end, and the
handler's seconds in preprocess, inference and postprocess. The start is time.monotonic(), which all
processes of a machine share. A missing step is NaN; a handler without steps spends all its time in
inference.

A request's meta is its id, its query string and its headers, each on a line ended by CRLF. A worker
parses it only if its handler asks. A header block consists of header lines only. All of it is
latin-1, as HTTP is. The worker ends when the front end closes the socket; the front end takes the
end of the stream for the worker's death.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias, TypedDict

VERSION = 2
HEADER = struct.Struct("<BBHIIQ")
TIMES = struct.Struct("<5d")
ROW = 12  # bytes of the table for one item
MAX_ITEMS = 1 << 16
MAX_SIZE = 1 << 36
MAX_FIELD = (1 << 32) - 1
# Bytes. A payload up to this size is copied once and cut, which is faster than making views.
MAX_COPIED_BYTES = 64 << 10
BATCH_COST = "tsx_batch_cost_total"  # the metric by which a worker reports a batch's cost
# The content type of a body of named inputs. Each input is u32 length of the name, u64 length of
# the value, name, value.
INPUTS = b"application/vnd.tsx.inputs"
# The header block of a response that a worker has written as JSON.
JSON_HEADER = b"content-type: application/json\r\n"
# The server adds it to a request of the Open Inference Protocol, for handlers.
V2_HEADER = (b"x-tsx-protocol", b"v2")
V2_META = b"\r\n%b: %b\r\n" % V2_HEADER  # this header within a request's meta
OPENAI_HEADER = (b"x-tsx-protocol", b"openai")  # The server adds it to a request of OpenAI's API.
OPENAI_META = b"\r\n%b: %b\r\n" % OPENAI_HEADER
# The server adds it to a traced request. In the response, it has attributes of the span as JSON.
SPAN_HEADER = "x-tsx-span"
# The position of a workflow's node: first, inner or last. No client can send this name.
NODE_HEADER = b":workflow-node"
# The server adds it to requests of models that generate text. Its value is the same for requests
# with the same credentials, and tells nothing else about them. No client can send this name.
TENANT_HEADER = b":tenant-key"
# The headers of requests to stateful models.
SEQUENCE_HEADERS = SEQUENCE_ID, SEQUENCE_START, SEQUENCE_END = (
    "ts_request_sequence_id",
    "ts_request_sequence_start",
    "ts_request_sequence_end",
)
# A header of a body of tensors: the bytes of the JSON before the tensors.
TENSORS_HEAD = b"inference-header-content-length"

Buffer: TypeAlias = bytes | bytearray | memoryview
Item: TypeAlias = tuple[int, Buffer, Buffer]  # code, meta, body


class Parts:
    """A large body (more than `MAX_COPIED_BYTES`), in the pieces in which it was received."""

    __slots__ = ("pieces", "size")

    def __init__(self, pieces: list[Buffer], size: int) -> None:
        self.pieces = pieces
        self.size = size  # sum of the lengths of `pieces`

    def __len__(self) -> int:
        return self.size


Body: TypeAlias = Buffer | Parts


class Kind(enum.IntEnum):
    LOAD = 1
    LOADED = 2
    FAILED = 3
    BATCH = 4
    PIECE = 5
    REPLY = 6
    PING = 7
    PONG = 8
    CANCEL = 9
    REPORT = 10
    THREADS = 11
    ADAPTER = 12


class DeclaredMetric(TypedDict):
    """A metric that handlers may report, as `metrics.yaml` declares it."""

    name: str
    type: str  # counter, gauge or histogram
    unit: str
    dimensions: list[str]


class LoadOrder(TypedDict):
    """The data that a worker needs to load a model."""

    model_name: str
    model_version: str
    model_dir: str  # absolute; becomes the worker's working directory
    manifest: dict[str, Any]  # the parsed MANIFEST.json, or its equivalent
    model_config: str  # YAML, since JSON lacks dates and number keys
    handler: str  # the handler of the manifest; may be empty
    worker: str  # the worker's number in the server
    gpu_id: int | None
    batch_size: int
    max_batch_cost: int  # limit of the sum of the handler's `cost` in a call; 0: no limit
    response_timeout: float  # timeout of a batch in seconds
    threads: int | None  # threads within one operation; None: torch decides
    shares_cores: bool  # whether THREADS frames change `threads`, as workers share the cores
    cores: list[int] | None  # CPU affinity of the process; None: all cores of the server
    variables: dict[str, str]  # environment variables that are set before the model's imports
    ranks: int  # processes of the worker; more than 1 for a torchrun group
    gpus: int  # number of GPUs, `gpu_id` first
    limit_max_image_pixels: bool
    properties: dict[str, Any]  # system properties of the handler that features add
    decode_input_request: bool
    max_response_size: int
    server_version: str
    envelope: str  # the name of the format around requests and answers; empty: none
    # The socket for the worker's output. If empty, the worker prints where the front end does.
    output: str
    # The socket gets only output that Python does not print, to escape control characters.
    at_terminal: bool
    log_json: bool  # whether to print JSON lines
    model_metrics: list[DeclaredMetric]
    # batch: one after the other; continuous: requests join between calls; async: a task each.
    mode: str
    # Whether a request changes later responses. The handler must not get such a request twice.
    stateful: bool
    json_nan: str  # how NaN and infinities are written in JSON: null, string or literal
    guess_content_type: bool  # whether to add a content type to an answer without one
    handler_error_status: int  # the status for a request whose handler raised


class MetricDelta(TypedDict):
    """One value that a handler has reported; the front end adds them up."""

    name: str
    type: str  # counter, gauge or histogram
    unit: str
    value: float
    dimensions: dict[str, str]


class FrameError(ValueError):
    """The bytes are not a frame, so the connection cannot be used any more."""


class Header(NamedTuple):
    kind: Kind
    batch: int
    items: int
    size: int


class Frame(NamedTuple):
    kind: Kind
    batch: int
    codes: Sequence[int]  # the codes of `items`
    items: list[Item]
    extra: Buffer


def encode(kind: Kind, batch: int, items: Iterable[Item] = (), extra: Buffer = b"") -> list[Buffer]:
    """Return the frame as buffers for `writelines` or `sendmsg`, without copying a body."""
    codes: list[int] = []
    fields: list[Body] = []
    for code, meta, body in items:
        codes.append(code)
        fields += (meta, body)
    return encode_fields(kind, batch, codes, fields, extra)


def encode_fields(
    kind: Kind, batch: int, codes: Sequence[int], fields: Sequence[Body], extra: Buffer = b""
) -> list[Buffer]:
    """Return the frame as `encode` does; `fields` has meta, body, meta, body ... of the items."""
    count = len(codes)
    if count > MAX_ITEMS:
        raise FrameError(f"{count} items do not fit a frame; the most is {MAX_ITEMS}")
    lengths = [*map(len, fields)]
    size = sum(lengths)
    try:
        table = _table(count).pack(*codes, *lengths)
    except struct.error:
        raise FrameError(
            f"a body of {max(lengths)} bytes does not fit a frame; the most is {MAX_FIELD}"
        ) from None
    flat: Iterable[Buffer] = fields if size <= MAX_COPIED_BYTES else _flatten(fields)  # type: ignore[assignment]  # a small frame has no `Parts`
    return [
        HEADER.pack(kind, VERSION, 0, batch, count, len(table) + size + len(extra)) + table,
        *flat,
        extra,
    ]


def _flatten(fields: Iterable[Body]) -> Iterator[Buffer]:
    for field in fields:
        if isinstance(field, Parts):
            yield from field.pieces
        else:
            yield field


def decode_header(buffer: Buffer) -> Header:
    """Read the header from the start of `buffer` (at least `HEADER.size` bytes)."""
    if len(buffer) < HEADER.size:
        raise FrameError(f"{len(buffer)} bytes are not a header, which has {HEADER.size}")
    kind, version, zero, batch, items, size = HEADER.unpack_from(buffer)
    if version != VERSION or zero or kind not in _KINDS:
        raise FrameError(f"not a frame of version {VERSION}: {bytes(buffer[: HEADER.size]).hex()}")
    if items > MAX_ITEMS or size > MAX_SIZE or items * ROW > size:
        raise FrameError(f"a frame cannot hold {items} items in {size} bytes")
    return Header(_KINDS[kind], batch, items, size)


def decode_row(header: Header, row: Buffer) -> tuple[int, int, int]:
    """Return the code and the lengths of meta and body of a frame's only item."""
    code, meta, body = struct.unpack("<3I", row)
    if ROW + meta + body > header.size:
        raise FrameError(
            f"the item of a frame ends at {ROW + meta + body}, behind its end at {header.size}"
        )
    return code, meta, body


def decode(header: Header, payload: Buffer) -> Frame:
    """Split the payload after a header into items, which are views if the payload is large."""
    size, count = len(payload), header.items
    if size != header.size:
        raise FrameError(f"a frame of {header.size} bytes has {size}")
    data: Buffer = bytes(payload) if size <= MAX_COPIED_BYTES else memoryview(payload)
    numbers = _table(count).unpack_from(data)
    codes = numbers[:count]
    ends = [*accumulate(numbers[count:], initial=ROW * count)]
    if ends[-1] > size:
        raise FrameError(f"the items of a frame end at {ends[-1]}, behind its end at {size}")
    items: list[Item] = [
        (code, data[start:middle], data[middle:end])
        for code, start, middle, end in zip(codes, ends[::2], ends[1::2], ends[2::2], strict=False)
    ]
    return Frame(header.kind, header.batch, codes, items, data[ends[-1] :])


def request_meta(request_id: str, query: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the meta of a request; the names of headers keep their case."""
    return b"%b\r\n%b\r\n%b" % (request_id.encode("latin-1"), query, header_block(headers))


def header_block(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%b: %b\r\n" % pair for pair in headers])


def parse_request_meta(meta: Buffer) -> tuple[str, str, str]:
    """Return the id, the query string and the header block of a request's meta."""
    parts = str(meta, "latin-1").split("\r\n", 2)
    if len(parts) != 3:
        raise FrameError(
            f"the meta of a request has {len(parts)} parts, not its id, its query string and its"
            " headers"
        )
    return parts[0], parts[1], parts[2]


def parse_header_block(block: str) -> Iterator[tuple[str, str]]:
    for line in block.split("\r\n"):
        if line:
            name, _, value = line.partition(": ")
            yield name, value


@lru_cache(256)
def content_type_of(block: bytes) -> str:
    """Return the content type of a header block, or an empty string."""
    return {name.lower(): value for name, value in parse_header_block(block.decode("latin-1"))}.get(
        "content-type", ""
    )


def _table(count: int) -> struct.Struct:
    return _TABLES[count] if count < len(_TABLES) else struct.Struct(f"<{3 * count}I")


_TABLES = [
    struct.Struct(f"<{3 * count}I") for count in range(129)
]  # formats for the sizes of nearly all batches
_KINDS = {int(kind): kind for kind in Kind}
