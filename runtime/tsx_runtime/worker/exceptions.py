"""The exceptions of workers and handlers.

ClientsGone             all clients of a streamed answer have disconnected; not an `Exception`, so that handlers do not catch it by chance
PredictionException     the handler's own refusal of the whole batch, with a status
├── InvalidInput        ... because of the client's input: 400
├── BadRows             ... of some rows only: the others are run again without them
EngineDied              the engine that generates text has ended, and the worker with it
LoadError               the model cannot be loaded; the message says what to do
MetricsCacheKeyError, MetricsCacheTypeError, MetricsCacheValueError     a metric that is reported wrongly
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from tsx_runtime.errors import shortened

# characters of an exception's message in reports; a traceback may have four times as many
LONGEST = 8000

Given = TypeVar("Given")
Result = TypeVar("Result")


class ClientsGone(BaseException):
    """Raised where a handler sends a part of an answer after all clients of its batch have
    disconnected.
    """


class PredictionException(Exception):
    """A handler's refusal: the client gets `message` with the status `error_code`."""

    def __init__(self, message: str, error_code: int = 500) -> None:
        super().__init__(message)
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"message : {self.message}"


class InvalidInput(PredictionException):
    """The input cannot be used: the client gets `message` with the status 400.

    It is no failure of the handler: nothing is logged. Of a batch, the requests are tried alone, so
    that only the bad one is refused; `BadRows` names it at once.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, 400)


class BadRows(PredictionException):
    """Some rows of the batch cannot be used: position in the data -> what is wrong with it.

    These rows are answered with `error_code`, and the handler is called again with the others, so
    that one broken request does not fail its neighbours. A handler raises it before it sends parts
    of answers: answers that have begun are broken off.
    """

    def __init__(self, faults: Mapping[int, str], error_code: int = 400) -> None:
        super().__init__("; ".join(faults.values()), error_code)
        self.faults = dict(faults)


class EngineDied(Exception):
    """The engine that generates text has ended: this process answers nothing more, and the worker
    exits. Let it through.
    """


class LoadError(Exception):
    """The model cannot be loaded, for a reason that is known: the message names it and the next
    step.
    """


class MetricsCacheKeyError(KeyError):
    """No metric of this name and type has been added."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # a KeyError quotes its text


class MetricsCacheTypeError(TypeError):
    """A value that is no name, or no type, of a metric."""


class MetricsCacheValueError(ValueError):
    """A name or a unit that a metric cannot have."""


def in_words(error: BaseException) -> str:
    """`ValueError: its text`, or the name alone where the text is empty."""
    text = text_of(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def text_of(error: BaseException) -> str:
    """Its message, cut and valid UTF-8: the class may be a user's own, and the message may quote a
    batch.
    """
    try:
        text = str(error)
    except BaseException as second:  # the boundary to a user's code
        return f"(no message: {type(second).__name__} in its __str__)"
    return presentable(text)


def presentable(text: str, most: int = LONGEST) -> str:
    """The text as valid UTF-8 (a file's name may hold other bytes), cut to a length that people
    read.
    """
    return shortened(text, most, tail=most // 2).encode(errors="backslashreplace").decode()


def each_or_bad(
    function: Callable[[int, Given], Result],
    rows: Iterable[Given],
    kind: type[ValueError] = ValueError,
) -> list[Result]:
    """Call `function(position, row)` for all rows.

    Raises BadRows with what is wrong with those for which it raises InvalidInput or `kind`.
    """
    results, faults = list[Result](), dict[int, str]()
    for position, row in enumerate(rows):
        try:
            results.append(function(position, row))
        except InvalidInput as error:
            faults[position] = error.message
        except kind as error:
            faults[position] = str(error)
    if faults:
        raise BadRows(faults)
    return results


def form_advice(row: Any) -> str:
    """Return advice for a text or a file that `curl -d` sent as a form: fields of that name,
    without a value.
    """
    if not isinstance(row, dict):
        return ""
    if _is_binary(row):
        return (
            " `curl -d` changes the bytes of a file: send it with -T FILE, or with --data-binary"
            " @FILE."
        )
    return (
        " `curl -d` sends a text as a form: add -H 'content-type: text/plain'."
        if b"" in row.values()
        else ""
    )


def field_names(row: Iterable[str]) -> str:
    """Return the names of a form's fields for a message; they may be the bytes of a file."""
    return "binary data" if _is_binary(row) else ", ".join(map(repr, row)) or "nothing"


def _is_binary(row: Iterable[str]) -> bool:
    text = "".join(row)
    return not text.isprintable() or "\ufffd" in text
