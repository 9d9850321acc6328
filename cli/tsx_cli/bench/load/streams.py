"""The tokens of answers that are server-sent events, and the times of these tokens.

The supported events are those of Hugging Face's inference API, and of OpenAI's chat completions,
completions and responses. Any other event counts as one token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tsx_archiver.metadata.slo import Slo
from tsx_cli.bench.load.histogram import Histogram
from tsx_cli.bench.load.results import StreamFigures

CONTENT_TYPE = b"text/event-stream"
FAILED = "error event"  # the outcome of an answer that contains an error event
# Keys of `usage` in OpenAI's completions and responses, and of `details` in Hugging Face's API.
TOKEN_KEYS = ("completion_tokens", "output_tokens", "generated_tokens")
PROMPT_TOKEN_KEYS = ("prompt_tokens", "input_tokens", "input_length")


class StreamRecord(NamedTuple):
    """The tokens of one answer, and the times of the first and the last token.

    Times are in seconds, by the clock of the pieces. They are None if there are no tokens.
    """

    first: float | None
    last: float | None
    tokens: int
    prompt_tokens: int = 0
    failed: bool = False


class StreamedAnswer(NamedTuple):
    """An answer with tokens; `position` is the position of its latency in `Load.accepted`.

    Times are in seconds, or None if there are too few tokens.
    """

    position: int
    ttft: float | None
    tpot: float | None
    tokens: int
    prompt_tokens: int


def read_stream(pieces: Sequence[tuple[float, bytes]]) -> StreamRecord:
    """Return the tokens of a body, whose pieces have a time each.

    The time of an event is the time of the piece that completes it.
    """
    first = last = None
    events = 0
    counts: dict[str, Any] = {}
    failed = False
    for event_time, name, value in _events(pieces):
        failed |= name == "error" or (isinstance(value, Mapping) and bool(value.get("error")))
        counts |= _usage(value)
        if not failed and _has_text(value):
            first, last, events = event_time if first is None else first, event_time, events + 1
    tokens = _count(counts, TOKEN_KEYS) or events
    return StreamRecord(first, last, tokens, _count(counts, PROMPT_TOKEN_KEYS), failed)


def streamed_answer(position: int, since: float, record: StreamRecord) -> StreamedAnswer:
    """Return the times and tokens of an answer whose latency counts from `since`."""
    ttft = tpot = None
    if record.first is not None and record.last is not None:
        ttft = record.first - since
        tpot = (record.last - record.first) / (record.tokens - 1) if record.tokens > 1 else None
    return StreamedAnswer(position, ttft, tpot, record.tokens, record.prompt_tokens)


def stream_figures(
    streams: Sequence[StreamedAnswer],
    accepted: Sequence[float],
    begin: int,
    end: int,
    seconds: float,
    slo: Slo | None,
) -> StreamFigures | None:
    """Return the figures of the accepted answers from `begin` on, or None if there is no stream.

    Rates are based on the answers before position `end`, which came within the `seconds`.
    """
    streamed_answers = [answer for answer in streams if answer.position >= begin]
    if not streamed_answers:
        return None
    timely_answers = [answer for answer in streamed_answers if answer.position < end]
    ttft, tpot = Histogram(), Histogram()
    ttft.add([answer.ttft for answer in streamed_answers if answer.ttft is not None])
    tpot.add([answer.tpot for answer in streamed_answers if answer.tpot is not None])
    limits = {} if slo is None else slo.limits
    return StreamFigures(
        answers=len(streamed_answers),
        tokens=sum(answer.tokens for answer in streamed_answers),
        prompt_tokens=sum(answer.prompt_tokens for answer in streamed_answers),
        tokens_per_second=sum(answer.tokens for answer in timely_answers) / seconds,
        prompt_tokens_per_second=sum(answer.prompt_tokens for answer in timely_answers) / seconds,
        goodput=(
            sum(_is_good(answer, accepted[answer.position], limits) for answer in timely_answers)
            / seconds
            if limits
            else None
        ),
        ttft=ttft.latency(),
        tpot=tpot.latency(),
        ttft_histogram=ttft.coarse(),
        tpot_histogram=tpot.coarse(),
    )


def _is_good(answer: StreamedAnswer, latency: float, limits: Mapping[str, float]) -> bool:
    times = {"": latency, "ttft": answer.ttft, "tpot": answer.tpot or 0.0}
    return all(
        (seconds := times[part]) is not None and 1000 * seconds <= limit
        for part, limit in limits.items()
    )


def _events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, str, Any]]:
    """Yield (time, name, data) of each event except the end mark; data is JSON or else text."""
    buffer, piece_time = b"", 0.0
    for piece_time, data in pieces:
        *events, buffer = (buffer + data).replace(b"\r\n", b"\n").split(b"\n\n")
        yield from (parsed for event in events if (parsed := _event(piece_time, event)) is not None)
    if (parsed := _event(piece_time, buffer)) is not None:
        yield parsed


def _event(event_time: float, event: bytes) -> tuple[float, str, Any] | None:
    fields = [
        (name, value.removeprefix(b" "))
        for name, _, value in (line.partition(b":") for line in event.split(b"\n"))
    ]
    data = b"\n".join(value for name, value in fields if name == b"data")
    if not data or data == b"[DONE]":
        return None
    name = next((value for name, value in fields if name == b"event"), b"").decode(
        "utf-8", "replace"
    )
    try:
        return event_time, name, json.loads(data)
    except (ValueError, RecursionError):
        return event_time, name, data


def _usage(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        return {}
    response = value.get("response")
    usage = (
        value.get("usage")
        or (response.get("usage") if isinstance(response, Mapping) else None)
        or value.get("details")
    )
    return usage if isinstance(usage, Mapping) else {}


def _count(counts: Mapping[str, Any], names: Sequence[str]) -> int:
    return next((count for name in names if isinstance(count := counts.get(name), int)), 0)


def _has_text(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return bool(value)
    if isinstance(choices := value.get("choices"), list):
        return any(_choice_has_text(choice) for choice in choices if isinstance(choice, Mapping))
    if isinstance(kind := value.get("type"), str):
        return kind.endswith(".delta")  # an event of OpenAI's responses
    return (
        bool(value.get("token")) if "token" in value else not value.keys() <= {"usage", "details"}
    )


def _choice_has_text(choice: Mapping[str, Any]) -> bool:
    """Tell whether a choice has text; the first event of a chat has only a role."""
    delta = choice.get("delta")
    return bool(choice.get("text")) or (
        isinstance(delta, Mapping) and any(value for name, value in delta.items() if name != "role")
    )
