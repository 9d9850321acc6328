"""`tsx predict` sends one request to a running server, and prints or saves the response."""

from __future__ import annotations

import base64
import codecs
import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, BinaryIO
from urllib.parse import unquote

import typer
from rich.console import Console
from rich.json import JSON
from rich.text import Text

from tsx_cli.common.client import AnswerCommand, Response, Server, path
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.options import (
    AsJson,
    Config,
    InputOption,
    PredictedModel,
    Token,
    Url,
    read_settings,
    read_token,
)
from tsx_cli.common.output import human, print_json
from tsx_cli.predict.typed_fields import encode_fields
from tsx_runtime.shared.content_types import guess_content_type
from tsx_runtime.shared.log_format import UNSAFE, escaped

BAR_WIDTH = 30
MAX_LABELS = 20
TEXT_TYPES = ("text/", "application/json")
TEXT_STARTS = ("{", "[", '"')

Content = tuple[str, bytes, str]  # name of a file, bytes, content type

app = typer.Typer(add_completion=False)


@app.command(cls=AnswerCommand)
def predict(
    model: PredictedModel,
    input: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE|TEXT|-", help="A file or a text to send; - reads standard input."
        ),
    ] = None,
    input_option: InputOption = None,
    sample: Annotated[
        bool,
        typer.Option(
            "--sample", help="Send a sample of the model, or one generated for it, instead of FILE."
        ),
    ] = False,
    version: Annotated[
        str | None, typer.Option(help="Version of the model; by default its default version.")
    ] = None,
    content_type: Annotated[
        str | None, typer.Option(help="Content type of what is sent, if the guess is wrong.")
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--field",
            metavar="NAME[=VALUE]",
            help="Field of a form; without a value, it holds what is sent; may be repeated. For a"
            " model with a signature, a field of its JSON.",
        ),
    ] = None,
    token: Token = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the answer, unchanged, to this file."),
    ] = None,
    as_json: AsJson = False,
    url: Url = None,
    config: Config = None,
) -> None:
    """Send a file, a text or a sample to a model of a running server and print the answer.

    On a terminal the answer is formatted; otherwise it is written unchanged, and a text ends a
    line.
    """
    check_delivery(output, as_json=as_json)
    sources = sample + (input is not None) + (input_option is not None)
    if sources > 1 or not (sources or fields):
        hint = f"`tsx predict {model} --sample` sends one that fits the model"
        raise UsageError(f"give one file or text, or --sample: {hint}")
    input = input_option if input is None else input
    settings, _ = read_settings(config)
    server = Server(
        url or settings.inference_address,
        read_token(token) or settings.inference_token,
        certificate=settings.certificate_file,
    )
    name, kind, data = "", "", b""
    if sample:
        name, kind, data = _sample(server, model, version)
    elif input is not None:
        name, kind, data = _read(input)
    kind = content_type or kind
    typed = None if kind or not fields else _typed_body(server, model, version, fields)
    if typed is not None:
        data, kind = typed, "application/json"
    elif fields:
        from urllib3.filepost import encode_multipart_formdata  # a slow import

        data, kind = encode_multipart_formdata(_form(fields, (name, data, kind) if kind else None))
    target = path("predictions", model, *([] if version is None else [version]))
    response = server.call("POST", target, data, {"Content-Type": kind})
    deliver(response, output, as_json=as_json)


def _typed_body(server: Server, model: str, version: str | None, fields: list[str]) -> bytes | None:
    """Return the fields as JSON if the model has a signature with fields, else None."""
    segments = [] if version is None else ["versions", version]
    try:
        metadata = server.call_json("GET", path("v2", "models", model, *segments))
    except CliError:  # The prediction reports it, unless the server only lacks this path.
        return None
    signature = metadata.get("signature")
    return None if signature is None else encode_fields(fields, signature["input"])


def check_delivery(output: Path | None, *, as_json: bool) -> None:
    """Refuse the combination of --output and --json.

    Raises:
        UsageError: Both are given.
    """
    if output is not None and as_json:
        raise UsageError(
            "--output writes the answer to a file and --json prints it; give only one of them"
        )


def deliver(response: Response, output: Path | None, *, as_json: bool) -> None:
    """Write a response to a file, as JSON, formatted for a terminal, or unchanged."""
    if output is not None:
        with output.open("wb") as sink:
            _copy_body(response, sink)
    elif as_json:
        print_json(describe(response))
    elif sys.stdout.isatty():
        show(response, Console())
    else:
        sys.stdout.flush()
        _copy_body(response, sys.stdout.buffer, ends_line=True)


def _sample(server: Server, model: str, version: str | None) -> tuple[str, str, bytes]:
    """Return the name, the content type and the body of a sample."""
    response = server.call(
        "GET",
        path("v2", "models", model, *([] if version is None else ["versions", version]), "sample"),
    )
    source, body = unquote(response.headers.get("x-tsx-sample", "generated")), response.body()
    if sys.stderr.isatty():
        origin = (
            "a generated sample" if source == "generated" else f"{escaped(source)} of the archive"
        )
        print(f"sending {origin} ({response.content_type}, {human(len(body))})", file=sys.stderr)
    return Path(source).name, response.content_type, body


def describe(response: Response) -> dict[str, object]:
    """Return a response for a program: its JSON, its text, or its bytes in base64."""
    body = response.body()
    answer: dict[str, object] = {
        "status": response.status,
        "content_type": response.content_type or None,
    }
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        return {**answer, "base64": base64.b64encode(body).decode()}
    try:
        return {**answer, "answer": json.loads(text)}
    except (ValueError, RecursionError):
        return {**answer, "answer": text}


def show(response: Response, console: Console) -> None:
    """Format a response for people; a stream of text is printed as it arrives."""
    if response.content_type.startswith("text/"):
        # A part may end in the middle of a character.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        last_text = ""
        for part in response.parts:
            text = escaped(decoder.decode(part))
            last_text = text or last_text
            console.file.write(text)
            console.file.flush()
        if not last_text.endswith("\n"):
            console.file.write("\n")
        return
    body = response.body()
    try:
        value = _escape_controls(json.loads(body))
    except (ValueError, RecursionError):
        _show_unparsed(body, response.content_type, console)
        return
    if labels := as_probabilities(value):
        width = max(len(escaped(label)) for label, _ in labels)
        for label, probability in labels:
            console.print(
                Text(f"{escaped(label):<{width}}  {probability:7.2%}  "),
                Text("█" * round(probability * BAR_WIDTH), "green"),
                sep="",
            )
    else:
        console.print(JSON.from_data(value, ensure_ascii=False))


def as_probabilities(value: object) -> list[tuple[str, float]]:
    """Return the labels and probabilities of a classifier's response, or an empty list."""
    if not isinstance(value, dict) or not 0 < len(value) <= MAX_LABELS:
        return []
    if not all(isinstance(number, float) and 0 <= number <= 1 for number in value.values()):
        return []
    return list(value.items())


def _escape_controls(value: object) -> object:
    """Escape control characters that JSON does not escape."""
    if isinstance(value, str):
        return UNSAFE.sub(lambda match: escaped(match[0]) if match[0] > " " else match[0], value)
    if isinstance(value, dict):
        return {_escape_controls(key): _escape_controls(item) for key, item in value.items()}
    return [_escape_controls(item) for item in value] if isinstance(value, list) else value


def _show_unparsed(body: bytes, content_type: str, console: Console) -> None:
    try:
        console.print(Text(escaped(body.decode("utf-8"))))
    except UnicodeDecodeError:
        kind = f" of {content_type}" if content_type else " that are not text"
        raise CliError(
            f"the answer is {human(len(body))}{kind}; write it into a file with --output FILE"
        ) from None


def _form(fields: list[str], content: Content | None) -> list[tuple[str, Any]]:
    """Return the fields of a form; a field without a value contains the sent content.

    Raises:
        UsageError: The number of fields without a value is wrong.
    """
    parts = [field.partition("=") for field in fields]
    if sum(not equals for _, equals, _ in parts) != (content is not None):
        raise UsageError(
            "--field takes NAME=VALUE, and once the NAME for the file or text, if there is one"
        )
    return [(name, value if equals else content) for name, equals, value in parts]


def _read(argument: str) -> tuple[str, str, bytes]:
    """Return the name, the content type and the bytes of a file, of stdin, or of a text."""
    try:
        data = sys.stdin.buffer.read() if argument == "-" else Path(argument).read_bytes()
    except OSError as error:  # Opening a text also fails if it is too long for a file name.
        from tsx_archiver.names import similar_file  # a slow import

        if not any(map(str.isspace, argument)) and argument[:1] not in TEXT_STARTS:
            hint = f"To send it as a text: echo {shlex.quote(argument)} | tsx predict MODEL -"
            raise CliError(
                f"the file '{argument}' cannot be read"
                f" ({error.strerror}){similar_file(Path(argument)) or '.'} {hint}"
            ) from error
        data, argument = argument.encode(), "-"
    return Path(argument).name, guess_content_type(argument, data), data


def _copy_body(response: Response, sink: BinaryIO, *, ends_line: bool = False) -> None:
    last_byte = b""
    for part in response.parts:
        last_byte = part[-1:]
        sink.write(part)
        sink.flush()
    if ends_line and last_byte not in (b"", b"\n") and response.content_type.startswith(TEXT_TYPES):
        sink.write(b"\n")
        sink.flush()
