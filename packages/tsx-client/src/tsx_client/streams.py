"""The pieces of a streamed answer: server-sent events, text, or bytes."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any, NamedTuple


class Event(NamedTuple):
    """https://html.spec.whatwg.org/multipage/server-sent-events.html"""

    data: str
    event: str = "message"
    id: str = ""

    def json(self) -> Any:
        return json.loads(self.data)


class Pieces:
    """Turns the bytes of an answer, as they come, into what its content type says they are."""

    def __init__(self, content_type: str) -> None:
        self._is_events = content_type.startswith("text/event-stream")
        is_text = self._is_events or content_type.startswith("text/")
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace") if is_text else None  # a piece may end within a character
        self._rest = ""
        self.done = False  # OpenAI's last event has come

    def feed(self, data: bytes, *, last: bool = False) -> Iterator[Event | str | bytes]:
        if self._decoder is None:
            yield from [data] if data else []
            return
        text = self._decoder.decode(data, last)
        if not self._is_events:
            yield from [text] if text else []
            return
        text = self._rest + text + ("\n\n" if last else "")  # many servers leave out the last empty line
        held = "\r" if text.endswith("\r") and not last else ""  # maybe the half of a line's end
        *blocks, rest = text[: len(text) - len(held)].replace("\r\n", "\n").replace("\r", "\n").split("\n\n")
        self._rest = rest + held
        for block in blocks:
            event = _event(block)
            self.done = self.done or (event is not None and event.data == "[DONE]")
            if event is not None and not self.done:
                yield event


def _event(block: str) -> Event | None:
    fields: dict[str, list[str]] = {}
    for line in block.split("\n"):
        name, _, value = line.partition(":")
        fields.setdefault(name, []).append(value.removeprefix(" "))
    if "data" not in fields:
        return None
    return Event("\n".join(fields["data"]), fields.get("event", ["message"])[-1], fields.get("id", [""])[-1])
