"""Event streams: their tokens, times to the first token and between tokens, and goodput."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.clients.scripted import Request, Step, scripted
from tsx_archiver.metadata.slo import parse_slo
from tsx_cli.bench.load.generator import run_load
from tsx_cli.bench.load.payloads import Payload
from tsx_cli.bench.load.plan import LoadPlan
from tsx_cli.bench.load.results import Round
from tsx_cli.bench.load.streams import (
    StreamedAnswer,
    StreamRecord,
    read_stream,
    stream_figures,
    streamed_answer,
)

DONE = b"data: [DONE]\n\n"


def event(value: object, end: str = "\n") -> bytes:
    return f"data: {json.dumps(value)}{end}{end}".encode()


def delta(**fields: object) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields}]}


CHAT = [
    delta(role="assistant", content=""),
    delta(content="Good "),
    delta(content="day"),
    delta(),
    {"choices": [], "usage": None},
]
COMPLETION = [
    {"choices": [{"text": "Good "}]},
    {"choices": [{"text": "day"}]},
    {"choices": [{"text": "", "finish_reason": "stop"}]},
]
HUGGING_FACE = [
    {"token": {"text": "Good "}},
    {"token": {"text": "day"}, "generated_text": "Good day", "details": {"generated_tokens": 2}},
]
RESPONSES = [
    {"type": "response.created"},
    {"type": "response.output_text.delta", "delta": "a"},
    {"type": "response.reasoning.delta"},
]
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}


@pytest.mark.parametrize(
    "values",
    [
        CHAT,
        COMPLETION,
        HUGGING_FACE,
        RESPONSES,
        ["Good", "day"],
        [{"text": "Good"}, {"text": "day"}],
    ],
)
def test_events_with_text_are_tokens(values: Sequence[object]) -> None:
    body = [(float(number), event(value)) for number, value in enumerate(values)]
    record = read_stream([*body, (9.0, DONE)])
    first = next(
        number for number, value in enumerate(values) if value not in (CHAT[0], RESPONSES[0])
    )
    assert record == StreamRecord(float(first), first + 1.0, 2)


@given(st.lists(st.integers(1, 200), max_size=20), st.sampled_from(["\n", "\r\n"]))
def test_the_chunks_of_a_body_affect_only_the_times(cuts: list[int], end: str) -> None:
    body = b"".join(event(value, end) for value in [*CHAT[:3], USAGE])
    places = sorted({min(cut, len(body)) for cut in [*cuts, len(body)]})
    pieces = [
        (float(end), body[start:end]) for start, end in zip([0, *places], places, strict=False)
    ]
    record = read_stream(pieces)
    assert (record.tokens, record.prompt_tokens, record.failed) == (5, 7, False)
    assert record.first is not None
    assert record.first >= body.index(b"Good")


def test_the_usage_of_the_last_event_overrides_the_event_count() -> None:
    """One event may hold several tokens."""
    assert read_stream([(1.0, event(delta(content="a b c"))), (2.0, event(USAGE))]).tokens == 5
    last = {
        "token": {"text": "x"},
        "generated_text": "x",
        "details": {"generated_tokens": 3, "input_length": 8},
    }
    assert read_stream([(1.0, event(last))]) == StreamRecord(1.0, 1.0, 3, 8)
    response = {
        "type": "response.completed",
        "response": {"usage": {"output_tokens": 4, "input_tokens": 3}, "error": None},
    }
    assert read_stream([(1.0, event(response))]) == StreamRecord(None, None, 4, 3)
    assert (
        read_stream(
            [(1.0, event({"token": {"text": ""}, "details": {"generated_tokens": 6}}))]
        ).tokens
        == 6
    )


@pytest.mark.parametrize(
    "last",
    [
        event({"error": {"message": "lost"}}),
        event({"error": "lost"}),
        b"event: error\ndata: lost\n\n",
    ],
)
def test_an_error_event_is_a_failed_request(last: bytes) -> None:
    assert read_stream([(1.0, event(CHAT[1])), (2.0, last)]) == StreamRecord(
        1.0, 1.0, 1, 0, failed=True
    )


def test_times_count_from_the_request() -> None:
    assert streamed_answer(3, 10.0, StreamRecord(10.5, 12.5, 5)) == StreamedAnswer(
        3, 0.5, 0.5, 5, 0
    )
    assert streamed_answer(0, 10.0, StreamRecord(10.5, 10.5, 1)) == StreamedAnswer(
        0, 0.5, None, 1, 0
    )
    assert streamed_answer(0, 10.0, StreamRecord(None, None, 0)) == StreamedAnswer(
        0, None, None, 0, 0
    )


def test_goodput_counts_responses_that_keep_every_limit() -> None:
    """The bound with the greater limit counts where a figure has two percentiles."""
    # The first response ended before the round began.
    streams = [StreamedAnswer(0, 9.0, 9.0, 99, 9)]
    streams += [
        StreamedAnswer(1, 0.1, 0.01, 10, 4),
        StreamedAnswer(2, 0.4, 0.01, 10, 4),
        StreamedAnswer(4, 0.1, None, 1, 4),
    ]
    streams += [StreamedAnswer(5, 0.1, 0.01, 10, 4)]
    slo = parse_slo("ttft.p50<50ms,ttft.p99<300ms,tpot.p99<50ms,p99<5s")
    figures = stream_figures(streams, array("f", [9, 1, 1, 6, 1, 1]), 1, 5, 2.0, slo)
    assert figures is not None
    assert (
        figures.answers,
        figures.tokens,
        figures.tokens_per_second,
        figures.prompt_tokens_per_second,
    ) == (4, 31, 10.5, 6.0)
    assert figures.goodput == 1.0
    assert figures.ttft.max_ms == pytest.approx(400)
    assert sum(count for _, count in figures.tpot_histogram) == 3
    assert stream_figures(streams, [], 6, 6, 2.0, slo) is None


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
PAUSE = 0.05


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def talking(number: int, request: Request) -> Sequence[Step]:
    if number % 5 == 4:
        return [
            HEAD,
            chunk(event(CHAT[1])),
            chunk(event({"error": {"message": "lost"}})),
            chunk(b""),
        ]
    chunks = [chunk(event(delta(content=f"{number} "))) for number in range(4)]
    return [
        HEAD + chunk(event(CHAT[0])),
        PAUSE,
        chunks[0],
        PAUSE,
        chunks[1],
        PAUSE,
        chunks[2] + chunks[3],
        chunk(event(USAGE)),
        chunk(DONE) + chunk(b""),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "load", [{"connections": 4}, {"connections": 64, "mode": "open", "rate": 60.0}]
)
def test_the_generator_times_the_tokens_of_a_stream(load: Mapping[str, Any]) -> None:
    payloads = (Payload(b"Good day", "text/plain"),)
    with scripted(talking) as url:
        plan = LoadPlan(
            url,
            "m",
            payloads,
            "openai-chat",
            seconds=1.0,
            warm_up=0.0,
            slo=parse_slo("ttft.p99<10s,tpot.p99<10s"),
            **load,
        )
        measured = asyncio.run(run_load(plan))
    assert set(measured.errors) == {"error event"}
    stream = measured.stream
    assert stream is not None
    assert stream.answers == measured.ok
    assert (stream.tokens, stream.prompt_tokens) == (5 * measured.ok, 7 * measured.ok)
    assert stream.goodput == pytest.approx(measured.throughput)
    assert stream.tokens_per_second == pytest.approx(5 * measured.throughput)
    # The role is sent at once and is not a token.
    assert stream.ttft.p50_ms >= 990 * PAUSE
    assert stream.tpot.p50_ms >= 990 * 2 * PAUSE / 4
    assert stream.ttft.p50_ms < measured.latency.p50_ms
    assert Round.model_validate_json(measured.model_dump_json()) == measured
