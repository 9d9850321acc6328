"""Compressed bodies are decompressed in slices; corrupt or too large ones are refused early."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.api.encodings import MAX_INPUT_BYTES, MAX_OUTPUT_BYTES, decompress
from tsx_runtime.api.errors import error_response
from tsx_runtime.api.messages import (
    HEADER_NAMES,
    ClientGone,
    Message,
    read_body,
    unread_body_of,
)
from tsx_runtime.errors import BadRequest, PayloadTooLarge, TsxError, UnsupportedEncoding

LIMIT = 1 << 20
COMPRESS = {
    b"gzip": gzip.compress,
    b"X-GZIP": gzip.compress,
    b"deflate": zlib.compress,
    b"identity, gzip": gzip.compress,
}


class Sender:
    """The client's side of a body; it counts the messages that the server has read."""

    def __init__(self, *chunks: bytes, leaves: bool = False) -> None:
        self.messages: list[Message] = [
            {"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks
        ]
        self.messages += [{"type": "http.disconnect"} if leaves else {"type": "http.request"}]
        self.read_count = 0

    async def receive(self) -> Message:
        self.read_count += 1
        return self.messages[self.read_count - 1]


def scope_of(coding: bytes) -> dict[str, Any]:
    names = [b"Content-Encoding", b"Content-Length", b"X-Own"]
    headers = [
        (name.lower(), value) for name, value in zip(names, [coding, b"1", b"y"], strict=True)
    ]
    return {"headers": headers, HEADER_NAMES: names}


def read(
    coding: bytes, sender: Sender, limit: int = LIMIT, scope: dict[str, Any] | None = None
) -> bytes:
    return asyncio.run(read_body(scope or scope_of(coding), sender.receive, limit))


def read_refused(
    kind: type[TsxError], coding: bytes, *chunks: bytes, limit: int = LIMIT
) -> tuple[TsxError, Sender]:
    sender = Sender(*chunks)
    with pytest.raises(kind) as exc_info:
        read(coding, sender, limit)
    return exc_info.value, sender


@given(st.sampled_from([*COMPRESS]), st.binary(max_size=300), st.integers(1, 40), st.integers(1, 3))
def test_a_body_in_any_chunks_and_gzip_members_is_decompressed(
    coding: bytes, content: bytes, step: int, members: int
) -> None:
    members = 1 if coding == b"deflate" else members
    data = COMPRESS[coding](content) * members
    scope = scope_of(coding)
    assert (
        read(
            coding,
            Sender(*[data[start : start + step] for start in range(0, len(data), step)]),
            scope=scope,
        )
        == content * members
    )
    assert scope["headers"] == [
        (b"x-own", b"y"),
        (b"content-length", b"%d" % (len(content) * members)),
    ]
    assert scope[HEADER_NAMES] == [b"X-Own", b"Content-Length"]


@pytest.mark.parametrize(
    "size", [MAX_OUTPUT_BYTES - 1, MAX_OUTPUT_BYTES, MAX_OUTPUT_BYTES + 1, 3 * MAX_OUTPUT_BYTES]
)
def test_a_body_of_exactly_some_slices_is_complete(size: int) -> None:
    assert read(b"gzip", Sender(gzip.compress(bytes(size)))) == bytes(size)


def test_an_empty_compressed_body_stays_empty() -> None:
    assert read(b"gzip", Sender()) == b""


def test_an_identity_encoded_body_is_unchanged() -> None:
    scope = scope_of(b"identity")
    assert read(b"identity", Sender(b"x"), scope=scope) == b"x"
    assert (b"content-length", b"1") in scope["headers"]


@pytest.mark.parametrize(
    "chunks",
    [
        (b"no gzip",),
        (gzip.compress(b"x" * 100)[:-1],),
        (gzip.compress(b"x")[:5],),
        (gzip.compress(b"x") + b"trailing",),
        (gzip.compress(b"x") + b"\0" * 512,),
        (gzip.compress(b"x")[:-8] + b"\0" * 8,),
        (zlib.compress(b"x"),),
        (gzip.compress(b"x"), gzip.compress(b"y")[:-3]),
    ],
)
def test_a_corrupt_body_is_a_bad_request(chunks: tuple[bytes, ...]) -> None:
    error, _ = read_refused(BadRequest, b"gzip", *chunks)
    assert "Content-Encoding" in error.message


@pytest.mark.parametrize("coding", [b"br", b"zstd", b"gzip, gzip", b"compress", b"\xff"])
def test_an_unsupported_encoding_is_refused_with_the_supported_ones(coding: bytes) -> None:
    error, sender = read_refused(UnsupportedEncoding, coding, b"x")
    status, headers, _ = error_response(error)
    assert status == 415
    assert {(b"accept-encoding", b"gzip, deflate"), (b"connection", b"close")} <= set(headers)
    assert unread_body_of(error, sender.receive) is not None
    assert sender.read_count == 0


@pytest.mark.slow
def test_a_decompression_bomb_is_stopped_at_the_limit() -> None:
    bomb = gzip.compress(bytes(200 << 20))
    sizes: list[int] = []

    async def read_counted() -> None:
        receive = decompress(Sender(bomb).receive, 31).__anext__

        async def receive_counted() -> Message:
            message = await receive()
            sizes.append(len(message["body"]))
            return message

        await read_body({"headers": []}, receive_counted, LIMIT)

    with pytest.raises(PayloadTooLarge):
        asyncio.run(read_counted())
    assert max(sizes) <= MAX_OUTPUT_BYTES
    assert sum(sizes) <= LIMIT + MAX_OUTPUT_BYTES
    error, sender = read_refused(PayloadTooLarge, b"gzip", bomb)
    assert sender.read_count == 1
    assert unread_body_of(error, sender.receive) is not None


@pytest.mark.parametrize("chunk", [gzip.compress(b"") * 100, b"\0\0\0\xff\xff" * 400])
def test_compressed_bytes_without_content_count_against_the_limit(chunk: bytes) -> None:
    compressor = zlib.compressobj(wbits=31)
    head = compressor.compress(b"") + compressor.flush(zlib.Z_SYNC_FLUSH)
    chunks = [head if chunk.startswith(b"\0") else b"", *[chunk] * 100]
    error, sender = read_refused(PayloadTooLarge, b"gzip", *chunks, limit=10 * len(chunk))
    assert sender.read_count <= 12
    assert unread_body_of(error, sender.receive) is not None


def test_a_complete_bomb_is_refused_without_reading_further() -> None:
    sender = Sender(gzip.compress(bytes(4 * LIMIT)))
    sender.messages[0]["more_body"] = False
    with pytest.raises(PayloadTooLarge) as exc_info:
        read(b"gzip", sender)
    assert unread_body_of(exc_info.value, sender.receive) is None


def test_decompression_yields_to_the_event_loop_after_each_slice_or_member() -> None:
    async def count_turns_of(data: bytes) -> int:
        count = 0

        async def count_turns() -> None:
            nonlocal count
            while True:
                count += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(count_turns())
        await read_body(scope_of(b"gzip"), Sender(data).receive, 64 << 20)
        task.cancel()
        return count

    assert (
        asyncio.run(count_turns_of(gzip.compress(bytes(16 << 20))))
        >= (16 << 20) // MAX_OUTPUT_BYTES
    )
    assert asyncio.run(count_turns_of(gzip.compress(b"") * 1000)) >= 1000
    assert len(gzip.compress(b"") * 1000) > MAX_INPUT_BYTES


def test_a_client_that_leaves_is_noticed() -> None:
    with pytest.raises(ClientGone):
        read(b"gzip", Sender(gzip.compress(b"x")[:5], leaves=True))
