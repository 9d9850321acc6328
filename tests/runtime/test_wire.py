"""Frames survive a round trip, and other bytes are refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime import wire
from tsx_runtime.wire import HEADER, FrameError, Kind

kinds = st.sampled_from(list(Kind))
numbers = st.integers(0, 2**32 - 1)
items = st.lists(st.tuples(numbers, st.binary(max_size=60), st.binary(max_size=200)), max_size=12)
tokens = st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,12}", fullmatch=True)
header_values = st.text(
    st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=30
)


def read(data: bytes) -> wire.Frame:
    return wire.decode(wire.decode_header(data), memoryview(data)[HEADER.size :])


@given(kinds, numbers, items, st.binary(max_size=50))
def test_frames_survive_a_round_trip(
    kind: Kind, batch: int, rows: list[tuple[int, bytes, bytes]], extra: bytes
) -> None:
    frame = read(b"".join(wire.encode(kind, batch, rows, extra)))
    assert (frame.kind, frame.batch, bytes(frame.extra)) == (kind, batch, extra)
    assert [(code, bytes(meta), bytes(body)) for code, meta, body in frame.items] == rows


@given(kinds, items, st.binary(max_size=20))
def test_bodies_are_not_copied_into_the_frame(
    kind: Kind, rows: list[tuple[int, bytes, bytes]], extra: bytes
) -> None:
    buffers = wire.encode(kind, 1, rows, extra)
    assert [buffers[2 + 2 * index] is row[2] for index, row in enumerate(rows)] == [True] * len(
        rows
    )


@given(st.integers(0, 20), st.binary(max_size=300))
def test_random_bytes_after_a_valid_header_give_a_frame_or_an_error(
    count: int, payload: bytes
) -> None:
    try:
        read(HEADER.pack(Kind.REPLY, wire.VERSION, 0, 1, count, len(payload)) + payload)
    except FrameError:
        pass


@given(kinds, items.filter(bool), st.binary(max_size=20), st.data())
def test_a_truncated_frame_is_a_frame_error(
    kind: Kind, rows: list[tuple[int, bytes, bytes]], extra: bytes, data: st.DataObject
) -> None:
    frame = b"".join(wire.encode(kind, 7, rows, extra))
    length = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(FrameError):
        read(frame[:length])


def test_an_item_table_beyond_the_frame_is_refused() -> None:
    payload = struct.pack("<3I", 200, 10, 1000) + b"x" * 20
    header = HEADER.pack(Kind.REPLY, wire.VERSION, 0, 1, 1, len(payload))
    with pytest.raises(FrameError, match="behind its end"):
        read(header + payload)


@pytest.mark.parametrize(
    ("kind", "version", "zero", "count", "size"),
    [
        (0, wire.VERSION, 0, 0, 0),
        (99, wire.VERSION, 0, 0, 0),
        (Kind.BATCH, wire.VERSION + 1, 0, 0, 0),
        (Kind.BATCH, wire.VERSION, 1, 0, 0),
        (Kind.BATCH, wire.VERSION, 0, 1, wire.ROW - 1),
        (Kind.BATCH, wire.VERSION, 0, wire.MAX_ITEMS + 1, 1 << 30),
        (Kind.BATCH, wire.VERSION, 0, 0, wire.MAX_SIZE + 1),
    ],
)
def test_an_invalid_header_is_refused(
    kind: int, version: int, zero: int, count: int, size: int
) -> None:
    with pytest.raises(FrameError):
        wire.decode_header(HEADER.pack(kind, version, zero, 1, count, size))


def test_encoding_too_many_items_is_refused() -> None:
    with pytest.raises(FrameError, match="do not fit"):
        wire.encode(Kind.BATCH, 1, [(0, b"", b"")] * (wire.MAX_ITEMS + 1))


@pytest.mark.slow
@given(
    st.uuids(),
    st.binary(max_size=60).filter(lambda query: b"\r" not in query and b"\n" not in query),
    st.lists(st.tuples(tokens, header_values)),
)
def test_request_metadata_survives_a_round_trip(
    request_id: object, query: bytes, headers: list[tuple[str, str]]
) -> None:
    pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers]
    meta = wire.request_meta(str(request_id), query, pairs)
    parsed_id, parsed_query, block = wire.parse_request_meta(meta)
    assert (parsed_id, parsed_query.encode("latin-1")) == (str(request_id), query)
    assert list(wire.parse_header_block(block)) == headers


@given(st.binary(max_size=60))
def test_invalid_request_metadata_is_a_frame_error(data: bytes) -> None:
    try:
        wire.parse_request_meta(data)
    except FrameError:
        assert data.count(b"\r\n") < 2
