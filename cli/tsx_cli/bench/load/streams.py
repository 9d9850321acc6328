"""Answers that are server-sent events, as text generation has them: their tokens, and the time to
the first one and between them.

It reads the events of Hugging Face's inference API and of OpenAI's chat completions, completions
and responses. Of any other events each one counts as a token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tsx_archiver.metadata.slo import Slo
from tsx_cli.bench.load.histogram import Histogram
from tsx_cli.bench.load.results import StreamFigures

CONTENT_TYPE = b"text/event-stream"
FAILED = "error event"  # the kind of error of an answer that ended with one
TOKENS = (
    "completion_tokens",
    "output_tokens",
    "generated_tokens",
)  # of OpenAI's `usage`, of its responses, of Hugging Face's `details`
PROMPT_TOKENS = ("prompt_tokens", "input_tokens", "input_length")


class StreamRecord(NamedTuple):
    """The tokens of one answer.

    Times are seconds by the clock of its pieces; without a token they are None.
    """

    first: float | None
    last: float | None
    tokens: int
    prompt_tokens: int = 0
    failed: bool = False


class StreamedAnswer(NamedTuple):
    """`position` is that of its latency in `Load.accepted`.

    Seconds; None where it has too few tokens to tell.
    """

    position: int
    ttft: float | None
    tpot: float | None
    tokens: int
    prompt_tokens: int


def read_stream(pieces: Sequence[tuple[float, bytes]]) -> StreamRecord:
    """Of a body that came in these pieces, each with its time.

    An event's time is that of the piece that ends it.
    """
    first = last = None
    events = 0
    counts: dict[str, Any] = {}
    failed = False
    for at, name, value in _events(pieces):
        failed |= name == "error" or (isinstance(value, Mapping) and bool(value.get("error")))
        counts |= _usage(value)
        if not failed and _holds_text(value):
            first, last, events = at if first is None else first, at, events + 1
    tokens = _count(counts, TOKENS) or events
    return StreamRecord(first, last, tokens, _count(counts, PROMPT_TOKENS), failed)


def answer_of(position: int, since: float, record: StreamRecord) -> StreamedAnswer:
    """`since`: when its latency counts from."""
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
    """Of the accepted answers from `begin` on; rates are of those before `end`, which came within
    the `seconds`. None without a stream.
    """
    found = [each for each in streams if each.position >= begin]
    if not found:
        return None
    in_time = [each for each in found if each.position < end]
    ttft, tpot = Histogram(), Histogram()
    ttft.add([each.ttft for each in found if each.ttft is not None])
    tpot.add([each.tpot for each in found if each.tpot is not None])
    limits = {} if slo is None else slo.limits
    return StreamFigures(
        answers=len(found),
        tokens=sum(each.tokens for each in found),
        prompt_tokens=sum(each.prompt_tokens for each in found),
        tokens_per_second=sum(each.tokens for each in in_time) / seconds,
        prompt_tokens_per_second=sum(each.prompt_tokens for each in in_time) / seconds,
        goodput=(
            sum(_is_good(each, accepted[each.position], limits) for each in in_time) / seconds
            if limits
            else None
        ),
        ttft=ttft.latency(),
        tpot=tpot.latency(),
        ttft_histogram=ttft.coarse(),
        tpot_histogram=tpot.coarse(),
    )


def _is_good(answer: StreamedAnswer, latency: float, limits: Mapping[str, float]) -> bool:
    took = {"": latency, "ttft": answer.ttft, "tpot": answer.tpot or 0.0}
    return all(
        (seconds := took[part]) is not None and 1000 * seconds <= limit
        for part, limit in limits.items()
    )


def _events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, str, Any]]:
    """(time, name, value of its data as JSON, else as text); without the mark of the end."""
    rest, at = b"", 0.0
    for at, data in pieces:
        *events, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        yield from (found for event in events if (found := _event(at, event)) is not None)
    if (found := _event(at, rest)) is not None:
        yield found


def _event(at: float, event: bytes) -> tuple[float, str, Any] | None:
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
        return at, name, json.loads(data)
    except (ValueError, RecursionError):
        return at, name, data


def _usage(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        return {}
    own = value.get("response")
    found = (
        value.get("usage")
        or (own.get("usage") if isinstance(own, Mapping) else None)
        or value.get("details")
    )
    return found if isinstance(found, Mapping) else {}


def _count(counts: Mapping[str, Any], names: Sequence[str]) -> int:
    return next((count for name in names if isinstance(count := counts.get(name), int)), 0)


def _holds_text(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return bool(value)
    if isinstance(choices := value.get("choices"), list):
        return any(_choice_holds_text(choice) for choice in choices if isinstance(choice, Mapping))
    if isinstance(kind := value.get("type"), str):
        return kind.endswith(".delta")  # of responses
    return (
        bool(value.get("token")) if "token" in value else not value.keys() <= {"usage", "details"}
    )


def _choice_holds_text(choice: Mapping[str, Any]) -> bool:
    """The first event of a chat has a role and no text."""
    delta = choice.get("delta")
    return bool(choice.get("text")) or (
        isinstance(delta, Mapping) and any(value for name, value in delta.items() if name != "role")
    )
