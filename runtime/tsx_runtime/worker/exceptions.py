"""The exceptions of workers and handlers.

ClientsGone                 all clients of a streamed response have disconnected
PredictionException         the handler refuses the whole batch, with a status
├── InvalidInput            ... because of the client's input: 400
└── BadRows                 ... because of some rows; the handler runs again without them
EngineDied                  the engine that generates text has ended, and the worker with it
LoadError                   the model cannot be loaded; the message says what to do
MetricsCacheKeyError        there is no such metric
MetricsCacheTypeError       the name or the type of a metric has a wrong type
MetricsCacheValueError      the name or the unit of a metric has a wrong value

ClientsGone is not derived from `Exception`, so that handlers do not catch it by accident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from tsx_runtime.errors import shortened

MAX_MESSAGE_CHARS = 8000  # Tracebacks may be four times as long.

RowT = TypeVar("RowT")
ResultT = TypeVar("ResultT")


class ClientsGone(BaseException):
    """Raised when a handler sends a piece after all clients of its batch have disconnected."""


class PredictionException(Exception):
    """An error that a handler raises for the whole batch.

    Each client gets `message` with the HTTP status `error_code`.

    Attributes:
        message: The text for the clients.
        error_code: The HTTP status.

    Examples:
        >>> str(PredictionException("The camera is off.", 503))
        'message : The camera is off.'
    """

    def __init__(self, message: str, error_code: int = 500) -> None:
        """Refuse the batch with a text and an HTTP status."""
        super().__init__(message)
        self.message = message
        self.error_code = error_code

    def __str__(self) -> str:
        return f"message : {self.message}"


class InvalidInput(PredictionException):
    """An error for input that cannot be used: the client gets `message` with the status 400.

    The error is not logged as a failure of the handler. The requests of the batch are then tried
    one by one, so that only the bad one is refused. A handler that knows the bad rows raises
    `BadRows` instead, which avoids these retries.
    """

    def __init__(self, message: str) -> None:
        """Refuse the request with a text."""
        super().__init__(message, 400)


class BadRows(PredictionException):
    """An error for some requests of the batch.

    Their clients get a text with the status `error_code`, and the handler runs again with the other
    requests. A handler must raise it before it sends pieces of a response: after the first piece, a
    response can only be cut off.

    Attributes:
        faults: The text for each bad request, by its position in the data.
    """

    def __init__(self, faults: Mapping[int, str], error_code: int = 400) -> None:
        """Refuse the requests at the positions of `faults`."""
        super().__init__("; ".join(faults.values()), error_code)
        self.faults = dict(faults)


class EngineDied(Exception):
    """The engine that generates text has ended. The worker exits; handlers must not catch this."""


class LoadError(Exception):
    """The model cannot be loaded; the message names the reason and the next step."""


class MetricsCacheKeyError(KeyError):
    """No metric of this name and type has been added."""

    def __str__(self) -> str:
        return Exception.__str__(self)  # KeyError itself quotes its text.


class MetricsCacheTypeError(TypeError):
    """The name of a metric is no str, or its type is unknown."""


class MetricsCacheValueError(ValueError):
    """The name of a metric is empty, or its unit does not fit."""


def describe_error(error: BaseException) -> str:
    """Return an error as `ValueError: text`, or only its class if the text is empty."""
    text = error_text(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def error_text(error: BaseException) -> str:
    """Return the message of an error, shortened and as valid UTF-8.

    The class may be a user's: its `__str__` may fail, and its message may quote a whole batch.
    """
    try:
        text = str(error)
    except BaseException as failure:  # the boundary to a user's code
        return f"(no message: {type(failure).__name__} in its __str__)"
    return shorten_and_escape(text)


def shorten_and_escape(text: str, max_chars: int = MAX_MESSAGE_CHARS) -> str:
    """Shorten a text, and escape characters that UTF-8 cannot encode, such as in file names."""
    return (
        shortened(text, max_chars, tail=max_chars // 2).encode(errors="backslashreplace").decode()
    )


def map_rows(
    function: Callable[[int, RowT], ResultT],
    rows: Iterable[RowT],
    kind: type[ValueError] = ValueError,
) -> list[ResultT]:
    """Call `function(position, row)` for each row.

    Raises:
        BadRows: The function raised InvalidInput or `kind` for some rows.

    Examples:
        >>> map_rows(lambda position, row: int(row), ["1", "2"])
        [1, 2]
    """
    results, faults = list[ResultT](), dict[int, str]()
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
    """Return advice if a row is a text or a file that `curl -d` has sent as a form.

    In such a form, the content is the name of a field without a value.
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


def quote_field_names(row: Iterable[str]) -> str:
    """Quote the names of a form's fields for a message; a name may be the bytes of a file."""
    return "binary data" if _is_binary(row) else ", ".join(map(repr, row)) or "nothing"


def _is_binary(row: Iterable[str]) -> bool:
    text = "".join(row)
    return not text.isprintable() or "\ufffd" in text
