"""The pieces of a streamed response: server-sent events, text, or bytes."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from tsx_client.errors import InvalidAnswer, StreamInterrupted, error_of, reading

_LINE_END = re.compile("\r\n|\n|\r")  # JSON may contain other line ends, such as U+2028.
_EVENT_END = re.compile("\r\n\r\n|\n\n|\r\r")


class Event(NamedTuple):
    """A server-sent event (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

    data: str
    event: str = "message"
    id: str = ""

    def json(self) -> Any:
        """Parse the data.

        Raises:
            InvalidAnswer: The data is not JSON.
        """
        with reading(f"The event of {len(self.data)} characters"):
            return json.loads(self.data)


Piece: TypeAlias = "Event | str | bytes"


class Pieces:
    """A decoder that splits the bytes of a response into pieces by its content type."""

    def __init__(self, content_type: str) -> None:
        self._is_events = content_type.startswith("text/event-stream")
        is_text = content_type.startswith("text/")
        # The decoder is incremental, because a piece may end within a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace") if is_text else None
        self._buffer = ""
        self._is_done = False  # whether OpenAI's last event has arrived

    def feed(self, data: bytes, *, last: bool = False) -> Iterator[Piece]:
        """Yield the pieces that `data` completes.

        Raises:
            StreamInterrupted: An event reports an error.
        """
        if self._decoder is None or not self._is_events:
            piece = data if self._decoder is None else self._decoder.decode(data, last)
            yield from [piece] if piece else []
            return
        # Many servers omit the empty line after the last event.
        text = self._buffer + self._decoder.decode(data, last) + ("\n\n" if last else "")
        *blocks, self._buffer = _EVENT_END.split(text)
        for event in filter(None, map(_event, blocks)):
            self._is_done = self._is_done or event.data == "[DONE]"
            if not self._is_done and _is_error(event):
                raise StreamInterrupted(error_of(event.data.encode())[1])
            if not self._is_done:
                yield event


def _is_error(event: Event) -> bool:
    """Tell whether an event reports an error; a handler's events may have a null `error`."""
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
