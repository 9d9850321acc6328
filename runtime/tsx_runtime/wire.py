"""The frames between the front end and a worker, over one stream socket per worker.

A frame is a fixed header, a table, the items, and an extra, all little-endian:

    header   u8   kind          one of `Kind`
             u8   version       `VERSION`; both ends come from one installation, so a difference is an error
             u16  (zero)
             u32  batch         number of the batch; a reply repeats its request's
             u32  items         how many rows the table has
             u64  size          bytes that follow the header
    table    u32 code of each item, then u32 length of meta and u32 length of body of each item
    items    meta and body of the first item, meta and body of the second, ...
    extra    what is left of `size`

    kind      from      items                                                   extra
    LOAD      front     none                                                    the load order, JSON (`LoadOrder`)
    LOADED    worker    none                                                    {"device": "cpu" or "cuda:0", "prefetch":
                                                                            whether it prepares a
                                                                            batch ahead, "input":
                                                                            what the handler takes,
                                                                            or null, "example":
                                                                            whether its description
                                                                            has one, "precision":
                                                                            that it heeds, or null,
                                                                            "form": which of `forms`
                                                                            it has, or null,
                                                                            "forms_passed_over":
                                                                            [why ...]}, JSON
    FAILED    worker    none                                                    {"message", "traceback", "outline",
                                                                            "out_of_memory"}, JSON;
                                                                            the worker exits
    BATCH     front     a row a request: code 0, meta and body as it came       empty
    PIECE     worker    one: code = position in the batch, body = the piece,    empty
                        meta = header block (first piece of a request only)
    REPLY     worker    a row a request, in the batch's order: code = HTTP      `TIMES`, then `MetricDelta`s, JSON,
                        status, meta = header block, body = the answer          or nothing; or empty
    PING      front     none                                                    empty
    PONG      worker    none; answers a PING, between batches                   empty
    CANCEL    front     none: no client waits for this batch now. A worker    empty
                        that takes one batch after the other stops at the
                        next part of a stream; a REPLY still closes it
    THREADS   front     none; in place of the batch's number: the threads   empty
                        that torch may use from the next batch on
    REPORT    worker    none; at any time: what was raised and printed since    {"errors": [{"message", "traceback",
                        the last one; of asynchronous handlers also their       "count", "request_ids"}], "lines":
                        metrics, as a REPLY has them                        [[time, stream, text, [request id of the
                                                                            batch ...]]], "lost":
                                                                            lines left out,
                                                                            "metrics"}, JSON

`TIMES` are five f64: when the worker began with the batch (time.monotonic(), which all processes of
a machine share), the seconds until it was done, and those of them that the handler spent in
preprocess, inference and postprocess (NaN for a step that it does not have; a handler without steps
has spent all of them in inference).

A request's meta is its id, its query string and its headers, each on a line ended by CRLF, so that
a worker can put off parsing what its handler may never ask for; a header block is header lines
alone. All of it is latin-1, as HTTP is. The worker ends when the front end closes the socket; the
front end takes the end of the stream for the worker's death.
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
COPIED = (
    64 << 10
)  # payloads up to this size are copied once and cut into bytes, which is quicker than making views
BATCH_COST = "tsx_batch_cost_total"  # the metric by which a worker reports what a batch has cost
# the content type of a body of named inputs: u32 length of the name, u64 length, name, value; and
# so on
INPUTS = b"application/vnd.tsx.inputs"
# the header block of an answer that a worker has written as JSON
JSON_HEADER = b"content-type: application/json\r\n"
V2_HEADER = (
    b"x-tsx-protocol",
    b"v2",
)  # of a request to a route of the Open Inference Protocol: a handler may want to know
V2_META = b"\r\n%b: %b\r\n" % V2_HEADER  # in the metadata of its requests
OPENAI_HEADER = (b"x-tsx-protocol", b"openai")  # the same of a request to a route of OpenAI's API
OPENAI_META = b"\r\n%b: %b\r\n" % OPENAI_HEADER
NODE_HEADER = b":workflow-node"  # a node's place: first, inner or last; no client can send the name
SEQUENCE_HEADERS = SEQUENCE_ID, SEQUENCE_START, SEQUENCE_END = (  # of requests to stateful models
    "ts_request_sequence_id",
    "ts_request_sequence_start",
    "ts_request_sequence_end",
)
# the header of a body of tensors: bytes of the JSON before them
TENSORS_HEAD = b"inference-header-content-length"

Buffer: TypeAlias = bytes | bytearray | memoryview
Item: TypeAlias = tuple[int, Buffer, Buffer]  # code, meta, body


class Parts:
    """A large body (more than `COPIED` bytes) in the pieces in which it came: it is sent on from
    where they lie.
    """

    __slots__ = ("pieces", "size")

    def __init__(self, pieces: list[Buffer], size: int) -> None:
        self.pieces = pieces
        self.size = size  # the sum of their lengths

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
    manifest: dict[str, Any]  # the parsed MANIFEST.json, or what stands in for it
    model_config: str  # model-config.yaml as YAML: JSON has neither its dates nor its number keys
    handler: str  # as in the manifest; empty where nothing names one
    worker: str  # its number among the server's workers
    gpu_id: int | None
    batch_size: int
    max_batch_cost: int  # of one call of the handler, by its own `cost`; 0: no limit
    response_timeout: float  # seconds that the front end gives a batch
    threads: int | None  # torch's threads within one operation; None leaves torch's own choice
    shares_cores: bool  # `threads` is its share of the cores, which THREADS frames change
    cores: list[int] | None  # that the process keeps to; None for all that the server has
    variables: dict[str, str]  # of the environment, set before anything is imported for the model
    ranks: int  # processes of the worker; 1 unless it is a torchrun group
    gpus: int  # that the worker has, `gpu_id` first
    limit_max_image_pixels: bool
    trust_remote_code: bool  # whether the operator lets code that lies in a Hugging Face model run
    decode_input_request: bool
    max_response_size: int
    server_version: str
    envelope: str  # what stands around requests and answers; empty where nothing does
    # socket that takes what the worker prints; empty: it prints to where the front end does
    output: str
    at_terminal: (
        bool  # that socket takes only what Python does not print, for it to be made harmless
    )
    log_json: bool  # what it prints becomes JSON lines
    model_metrics: list[DeclaredMetric]
    # batch: one after the other; continuous: requests join between two calls; async: each is a task
    mode: str
    # a request changes what later ones are answered, so that the handler must not get it twice
    stateful: bool
    json_nan: str  # how NaN and infinities are written as JSON: null, string or literal
    guess_content_type: bool  # an answer without a content type gets one
    handler_error_status: int  # of the answer to a request that made the handler raise


class MetricDelta(TypedDict):
    """One value that a handler reported; the front end adds it up."""

    name: str
    type: str  # counter, gauge or histogram
    unit: str
    value: float
    dimensions: dict[str, str]


class FrameError(ValueError):
    """The bytes are not a frame: the peer is broken and the connection is of no further use."""


class Header(NamedTuple):
    kind: Kind
    batch: int
    items: int
    size: int


class Frame(NamedTuple):
    kind: Kind
    batch: int
    codes: Sequence[int]  # those of the items, by themselves
    items: list[Item]
    extra: Buffer


def encode(kind: Kind, batch: int, items: Iterable[Item] = (), extra: Buffer = b"") -> list[Buffer]:
    """The frame as buffers for `writelines` or `sendmsg`; no body is copied."""
    codes: list[int] = []
    fields: list[Body] = []
    for code, meta, body in items:
        codes.append(code)
        fields += (meta, body)
    return encode_fields(kind, batch, codes, fields, extra)


def encode_fields(
    kind: Kind, batch: int, codes: Sequence[int], fields: Sequence[Body], extra: Buffer = b""
) -> list[Buffer]:
    """As `encode`, where meta and body of each item already follow each other in `fields`."""
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
    flat: Iterable[Buffer] = fields if size <= COPIED else _flatten(fields)  # type: ignore[assignment]  # a small frame has no `Parts`
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
    """Code, and lengths of meta and body, of a frame's only item."""
    code, meta, body = struct.unpack("<3I", row)
    if ROW + meta + body > header.size:
        raise FrameError(
            f"the item of a frame ends at {ROW + meta + body}, behind its end at {header.size}"
        )
    return code, meta, body


def decode(header: Header, payload: Buffer) -> Frame:
    """Split what follows the header; the items of a large payload are views into it."""
    size, count = len(payload), header.items
    if size != header.size:
        raise FrameError(f"a frame of {header.size} bytes has {size}")
    data: Buffer = bytes(payload) if size <= COPIED else memoryview(payload)
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
    """The meta of a request; names keep the case in which they came."""
    return b"%b\r\n%b\r\n%b" % (request_id.encode("latin-1"), query, header_block(headers))


def header_block(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"".join([b"%b: %b\r\n" % pair for pair in headers])


def parse_request_meta(meta: Buffer) -> tuple[str, str, str]:
    """(request id, query string, header block) of a request's meta."""
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
    """Of a header block; empty where it names none."""
    return {name.lower(): value for name, value in parse_header_block(block.decode("latin-1"))}.get(
        "content-type", ""
    )


def _table(count: int) -> struct.Struct:
    return _TABLES[count] if count < len(_TABLES) else struct.Struct(f"<{3 * count}I")


_TABLES = [struct.Struct(f"<{3 * count}I") for count in range(129)]  # of nearly all batches
_KINDS = {int(kind): kind for kind in Kind}
