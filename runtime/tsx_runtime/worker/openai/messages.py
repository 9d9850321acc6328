"""Reads the messages and the tools of a chat, into the form that chat templates know."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tsx_runtime.worker.generation.interface import TextGenerator
from tsx_runtime.worker.openai.errors import RefusedField
from tsx_runtime.worker.openai.fields import Fields, shown

ROLES = ("system", "developer", "user", "assistant", "tool")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def read_messages(given: Any, name: str) -> list[dict[str, Any]]:
    """Raises RefusedField."""
    if not isinstance(given, list) or not given:
        raise RefusedField(
            f'The field \'{name}\' must be a list with at least one message, such as {{"role": "user", "content": "Hi"}}.', name
        )
    return [_message(each, f"{name}[{idx}]") for idx, each in enumerate(given)]


def read_tools(fields: Fields) -> tuple[list[dict[str, Any]], str | None]:
    """The tools that the model is told of, and the name of the one that it must call; empty: any of them. Raises RefusedField."""
    given, choice = fields.take("tools"), fields.take("tool_choice")
    tools = [_tool(each, f"tools[{idx}]") for idx, each in enumerate(given if isinstance(given, list) else [given] if given else [])]
    names = [tool["function"]["name"] for tool in tools]
    if choice in (None, "auto"):
        return tools, None
    if choice == "none":
        return [], None
    wanted = "" if choice == "required" else _name_of(choice)
    if wanted is None or not tools or (wanted and wanted not in names):
        text = f"auto, none, required or one of the functions in 'tools' ({', '.join(names) or 'there are none'})"
        raise fields.wrong("tool_choice", choice, text)
    return tools, wanted


def encode(generator: TextGenerator, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
    """Raises RefusedField where the chat template shows no tools, and InvalidInput."""
    tokens = generator.encode_chat(messages, tools)
    if tools and tokens == generator.encode_chat(messages):
        raise RefusedField(
            "The model's chat template knows no tools. Send the request without 'tools', or serve a model that has them.", "tools"
        )
    return tokens


def schema_of_call(tools: Sequence[Mapping[str, Any]], wanted: str) -> dict[str, Any]:
    """That makes a text a call of the wanted tool; of any where none is."""
    kinds = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"].get("parameters", {"type": "object"}),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
        if not wanted or tool["function"]["name"] == wanted
    ]
    return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}


def _message(given: Any, place: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise RefusedField(f"The message '{place}' must be an object with 'role' and 'content'.", place)
    role = given.get("role")
    if role not in ROLES:
        raise RefusedField(
            f"The role of '{place}' is {shown(role)}; it must be one of {', '.join(ROLES)}.", f"{place}.role", code="invalid_value"
        )
    if given.get("audio") is not None or given.get("function_call") is not None:
        raise RefusedField(f"The message '{place}' has audio or a function_call, which are not supported here.", place)
    calls = given.get("tool_calls") or []
    content = given.get("content")
    if content is None and not (role == "assistant" and calls):
        raise RefusedField(f"The message '{place}' has no content.", f"{place}.content", code="missing_required_parameter")
    message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": _text(content, f"{place}.content")}
    if calls:
        message["tool_calls"] = [_past_call(call, f"{place}.tool_calls[{idx}]") for idx, call in enumerate(calls)]
    message |= {name: given[name] for name in ("name", "tool_call_id") if isinstance(given.get(name), str)}
    return message


def _text(content: Any, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RefusedField(f"The field '{place}' must be a string or a list of parts.", place)
    texts = []
    for idx, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS or not isinstance(text, str):
            raise RefusedField(f"The part '{place}[{idx}]' is of the type {shown(kind)}; this model reads text alone.", f"{place}[{idx}]")
        texts.append(text)
    return "".join(texts)


def _past_call(call: Any, place: str) -> dict[str, Any]:
    """Templates write the arguments as JSON themselves."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RefusedField(f"The tool call '{place}' must be a function with a name and arguments.", place)
    arguments = function.get("arguments") or "{}"
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError) as error:
        raise RefusedField(f"The arguments of '{place}' are not JSON: {error}.", place) from None
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": parsed}}


def _tool(given: Any, place: str) -> dict[str, Any]:
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not isinstance(function.get("parameters", {}), dict):
        text = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
        raise RefusedField(f"The tool '{place}' must be such as {text}; other kinds are not supported here.", place)
    kept = {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}
    return {"type": "function", "function": kept}


def _name_of(choice: Any) -> str | None:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None
