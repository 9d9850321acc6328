"""The detection of tool calls in a model's text.

Hermes and Qwen write `<tool_call>{...}</tool_call>`. Llama writes only JSON.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection

from tsx_runtime.worker.codecs.bodies import JsonObject

OPEN_TAG, CLOSE_TAG = "<tool_call>", "</tool_call>"


class ToolText:
    """A text that arrives in pieces. Parts that may be tool calls are held back until the end."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held_text = ""
        self._has_text = False  # Text other than whitespace has arrived.
        self._holds_all = False  # All further text is held back.

    def add(self, text: str) -> str:
        """Add a piece, and return the text that can be sent now."""
        self._held_text += text
        if not self._has_text and (start := self._held_text.lstrip()[:1]):
            self._has_text, self._holds_all = True, start in "{["
        if self._holds_all or not self._has_text:
            return ""
        end = self._held_text.find(OPEN_TAG)
        self._holds_all = end >= 0
        if end < 0:
            max_size = min(len(OPEN_TAG) - 1, len(self._held_text))
            end = len(self._held_text) - next(
                (
                    size
                    for size in range(max_size, 0, -1)
                    if OPEN_TAG.startswith(self._held_text[-size:])
                ),
                0,
            )
        sendable_text, self._held_text = self._held_text[:end], self._held_text[end:]
        return sendable_text

    def end(self) -> tuple[str, list[JsonObject]]:
        """Return the remaining text and the calls.

        If the calls cannot be parsed, they remain in the text.
        """
        text, self._held_text = self._held_text, ""
        calls: list[JsonObject] = []
        remaining = text
        if OPEN_TAG in text:
            remaining, *blocks = text.split(OPEN_TAG)
            for block in blocks:
                inner, _, trailing = block.partition(CLOSE_TAG)
                block_calls = _parse_calls(inner)
                if not block_calls:
                    return text, []
                calls += block_calls
                remaining += trailing
        elif text.lstrip()[:1] in ("{", "["):
            calls = _parse_calls(text)
            if not calls or any(call["function"]["name"] not in self._names for call in calls):
                return text, []
            remaining = ""
        return ("" if calls and not remaining.strip() else remaining), calls


def _parse_calls(text: str) -> list[JsonObject]:
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
        arguments_json = (
            arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        )
        calls.append(
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call["name"], "arguments": arguments_json},
            }
        )
    return calls
