"""Finds the tool calls in a model's text: `<tool_call>{...}</tool_call>`, as Hermes and Qwen write
them, or nothing but JSON, as Llama.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection

from tsx_runtime.worker.codecs.bodies import JsonObject

OPENS, CLOSES = "<tool_call>", "</tool_call>"


class ToolText:
    """Splits text that comes in pieces into what is shown and what may be calls, which is held back
    until its end.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._is_begun = False  # there is more than blanks
        self._is_held = False  # all that follows

    def add(self, text: str) -> str:
        """What of it can be shown."""
        self._held += text
        if not self._is_begun and (start := self._held.lstrip()[:1]):
            self._is_begun, self._is_held = True, start in "{["
        if self._is_held or not self._is_begun:
            return ""
        at = self._held.find(OPENS)
        self._is_held = at >= 0
        if at < 0:
            most = min(len(OPENS) - 1, len(self._held))
            at = len(self._held) - next(
                (size for size in range(most, 0, -1) if OPENS.startswith(self._held[-size:])), 0
            )
        shown, self._held = self._held[:at], self._held[at:]
        return shown

    def end(self) -> tuple[str, list[JsonObject]]:
        """The rest of the text that is shown, and the calls.

        What cannot be read as calls is shown as it is.
        """
        text, self._held = self._held, ""
        calls: list[JsonObject] = []
        rest = text
        if OPENS in text:
            rest, *blocks = text.split(OPENS)
            for block in blocks:
                inner, _, behind = block.partition(CLOSES)
                found = _calls_in(inner)
                if not found:
                    return text, []
                calls += found
                rest += behind
        elif text.lstrip()[:1] in ("{", "["):
            calls = _calls_in(text)
            if not calls or any(call["function"]["name"] not in self._names for call in calls):
                return text, []
            rest = ""
        return ("" if calls and not rest.strip() else rest), calls


def _calls_in(text: str) -> list[JsonObject]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = []
    for call in value if isinstance(value, list) else [value]:
        arguments = (
            call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
        )
        if not isinstance(arguments, dict | str) or not isinstance(call.get("name"), str):
            return []
        written = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        calls.append(
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call["name"], "arguments": written},
            }
        )
    return calls
