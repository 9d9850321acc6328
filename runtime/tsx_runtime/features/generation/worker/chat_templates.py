"""A limit of a chat template's output, since a few characters of a template may write gigabytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from functools import partial, update_wrapper
from string import Formatter
from typing import Any

from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

# The limit of a rendering: characters for each token of the context, but at least MIN_CHARS.
MIN_CHARS, CHARS_PER_TOKEN = 8 << 20, 1024
_remaining_chars = ContextVar("_remaining_chars", default=MIN_CHARS)
# Filters and methods that may repeat, pad or enlarge parts of a value.
_WIDENING_NAMES = re.compile(
    "batch|center|e(scape)?|expandtabs|forceescape|format(_map)?|indent|join|[lr]just|pprint"
    "|replace|round|slice|string|sum|to(json|_bytes)|translate|url(encode|ize)|wordwrap|xmlattr"
    "|zfill"
)


def limit_next_rendering(context_length: int = 0) -> None:
    """Limit the next rendering of a template by transformers to what such a context may need."""
    from transformers.utils import chat_template_utils  # an extra

    chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment
    _remaining_chars.set(max(MIN_CHARS, CHARS_PER_TOKEN * context_length))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox in which a template raises ValueError before it writes too much."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(lambda parts: "".join(map(_count, parts)))

    def from_string(self, source: Any, *args: Any, **options: Any) -> Any:
        """Compile a template with counters at its loops, assignments and concatenations."""
        widening_filters = {
            name: function
            for name, function in self.filters.items()
            if _WIDENING_NAMES.fullmatch(name)
        }
        self.filters |= {
            name: update_wrapper(partial(_call_counted_filter, function), function)
            for name, function in widening_filters.items()
        }
        self.filters |= {"tsx_count": _count, "tsx_items": _count_items}
        self.globals.pop("lipsum", None)
        self.finalize = _count
        tree = self.parse(source)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "tsx_items", [], [], None, None)
        for assignment in tree.find_all(nodes.Assign):
            assignment.node = nodes.Filter(assignment.node, "tsx_count", [], [], None, None)
        for concat in tree.find_all(nodes.Concat):
            concat.nodes = [
                nodes.Filter(part, "tsx_count", [], [], None, None) for part in concat.nodes
            ]
        return super().from_string(tree, *args, **options)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _count([left, right])
        elif isinstance(left, int | float) and isinstance(right, int | float):
            _subtract(_max_chars(left) * int(right if operator == "**" else 2))
        else:
            text, factor = (right, left) if isinstance(left, int) else (left, right)
            _count_widened(
                "format" if operator == "%" else "",
                text,
                *(factor if isinstance(factor, tuple) else (factor,)),
            )
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **options: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)
        if _WIDENING_NAMES.fullmatch(name := getattr(method, "__name__", "")):
            text = getattr(method, "__self__", "")
            if name in ("format", "format_map") and _has_dynamic_widths(text):
                _subtract(_remaining_chars.get() + 1)
            _count_widened(name, text, *args, *options.values())
        # Texts in arguments are counted, since a macro may call itself with more and more text.
        _count([arg for arg in (*args, *options.values()) if isinstance(arg, str)])
        return super().call(context, obj, *args, **options)


def _call_counted_filter(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    values = [list(arg) if isinstance(arg, Iterator) else arg for arg in args]
    _count_widened(
        function.__name__, *values[hasattr(function, "jinja_pass_arg") :], *options.values()
    )
    return function(*values, **options)


def _count_widened(name: str, value: Any, *args: Any) -> None:
    """Count the value as if the longest argument were written for each of its parts."""
    # Numbers in the arguments of a format are data, not repetitions, unless a width is an argument.
    if "format" in name and isinstance(value, str):
        data = args if re.search(r"%[-+ #0-9.]*\*", value) else [args]
        args = (*data, *map(int, re.findall(r"\d{1,9}", value)))
    longest = max(
        (abs(arg) if isinstance(arg, int) else _max_chars(arg) for arg in args), default=0
    )
    _subtract((1 + _max_chars(value)) * (1 + longest))


def _has_dynamic_widths(text: Any) -> bool:
    """Tell whether a format takes a width from its arguments, as in `{:{widths[0]}}`.

    The width may be anywhere in the arguments, so its size cannot be counted.
    """
    return isinstance(text, str) and any(
        "{" in (spec or "") for _, _, spec, _ in Formatter().parse(text)
    )


def _count(value: Any) -> Any:
    _subtract(_max_chars(value))
    return value


def _count_items(values: Any) -> Any:
    values = list(values) if isinstance(values, Iterator) else values
    _subtract(len(values) if isinstance(values, Collection) else 1)
    return values


def _max_chars(value: Any) -> int:
    """Return an upper limit for the number of characters of a value's text."""
    if isinstance(value, str | bytes | int):
        return value.bit_length() // 3 + 1 if isinstance(value, int) else len(value)
    size, parts = 1, [*value, *value.values()] if isinstance(value, Mapping) else value
    for part in parts if isinstance(parts, Collection) else ():
        size += 1 + _max_chars(part)
        if size > _remaining_chars.get():
            break
    return size


def _subtract(characters: int) -> None:
    remaining = _remaining_chars.get() - max(characters, 1)
    if remaining < 0:
        raise ValueError(
            "it writes much more than the model's context holds. Send shorter messages"
        )
    _remaining_chars.set(remaining)
