"""The pieces of a streamed answer: server-sent events, text, or bytes."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from tsx_client.errors import InvalidAnswer, StreamInterrupted, reading, words_of

_LINE_END = re.compile("\r\n|\n|\r")  # and no other, such as that of U+2028, which JSON may hold
_EVENT_END = re.compile("\r\n\r\n|\n\n|\r\r")


class Event(NamedTuple):
    """https://html.spec.whatwg.org/multipage/server-sent-events.html"""

    data: str
    event: str = "message"
    id: str = ""

    def json(self) -> Any:
        with reading(f"The event of {len(self.data)} characters"):
            return json.loads(self.data)


Piece: TypeAlias = "Event | str | bytes"


class Pieces:
    """Turns the bytes of an answer, as they come, into what its content type says they are."""

    def __init__(self, content_type: str) -> None:
        self._is_events = content_type.startswith("text/event-stream")
        is_text = content_type.startswith("text/")
        self._decoder = (
            codecs.getincrementaldecoder("utf-8")("replace") if is_text else None
        )  # a piece may end within a character
        self._rest = ""
        self._done = False  # OpenAI's last event has come

    def feed(self, data: bytes, *, last: bool = False) -> Iterator[Piece]:
        """Raises StreamInterrupted for an event that is an error."""
        if self._decoder is None or not self._is_events:
            piece = data if self._decoder is None else self._decoder.decode(data, last)
            yield from [piece] if piece else []
            return
        text = (
            self._rest + self._decoder.decode(data, last) + ("\n\n" if last else "")
        )  # many servers leave out the last empty line
        *blocks, self._rest = _EVENT_END.split(text)
        for event in filter(None, map(_event, blocks)):
            self._done = self._done or event.data == "[DONE]"
            if not self._done and _is_error(event):
                raise StreamInterrupted(words_of(event.data.encode())[1])
            if not self._done:
                yield event


def _is_error(event: Event) -> bool:
    """A handler's own events may have a field of that name, null where nothing is wrong."""
    if not event.data.startswith('{"error"'):
        return False
    try:
        return bool(event.json()["error"])
    except InvalidAnswer:
        return False


def _event(block: str) -> Event | None:
    fields: dict[str, list[str]] = {}
    for line in _LINE_END.split(block):
        name, _, value = line.partition(":")
        fields.setdefault(name, []).append(value.removeprefix(" "))
    if "data" not in fields:
        return None
    return Event(
        "\n".join(fields["data"]), fields.get("event", ["message"])[-1], fields.get("id", [""])[-1]
    )
