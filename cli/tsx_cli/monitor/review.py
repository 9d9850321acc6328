"""What a review looks at: recorded requests, explanations, and facts of archives."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from urllib3.filepost import encode_multipart_formdata

from tsx_archiver.monitor.baseline import read_baseline
from tsx_cli.common.client import RequestFailed, Server, path
from tsx_cli.common.failure import CliError
from tsx_cli.common.management import Addresses
from tsx_cli.common.options import open_cached
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.content_types import BYTES

MAX_TEXT_BYTES = 2000  # shown bytes of a request
MAX_WORST = 9  # shown answers


def read_recorded(server: Server, model: str, request_id: str) -> dict[str, Any]:
    """Return a request that the server has recorded, with its `content_type` and its `text`.

    Raises:
        CliError: The server does not know the request, or has not recorded it.
    """
    address = path("models", model, "monitor", "requests", request_id)
    recorded: dict[str, Any] | None = server.call_json("GET", address)["recorded"]
    if recorded is None:
        raise CliError(
            f"the request {request_id} is not in a recording; `tsx models record {model} --share"
            " 100%` records later ones"
        )
    headers = {name.lower(): value for name, value in recorded["headers"]}
    text = base64.b64decode(recorded["body"])[:MAX_TEXT_BYTES].decode("utf-8", "replace")
    return recorded | {"content_type": headers.get("content-type", BYTES), "text": text}


def explain(server: Server, model: str, recorded: Mapping[str, Any], prediction: object) -> Any:
    """Return the model's explanation of its answer to a recorded request.

    A request in JSON cannot name the class to explain, so it gets the handler's default.

    Raises:
        RequestFailed: The handler cannot explain, as the message says.
    """
    body, kind = base64.b64decode(recorded["body"]), recorded["content_type"]
    if isinstance(prediction, str) and "json" not in kind:
        data = ("request", body, kind)
        body, kind = encode_multipart_formdata({"data": data, "target": prediction})
    address = path("explanations", model, recorded["version"])
    try:
        text = server.call("POST", address, body, {"Content-Type": kind}).body().decode()
    except RequestFailed as error:
        raise error.hinted("docs/guides/handlers.md lists the handlers that explain") from error
    with suppress(ValueError):
        return json.loads(text)
    return text


def worst_answers(servers: Addresses, model: str, version: str) -> Iterator[dict[str, Any]]:
    """Yield the worst answers with their requests and explanations, where these exist."""
    address = path("models", model, "monitor", "worst", version=version, count=MAX_WORST)
    for answer in servers.management.call_json("GET", address, kind=list):
        recorded = explanation = None
        with suppress(CliError):
            recorded = read_recorded(servers.management, model, answer["request_id"])
            explanation = explain(servers.inference, model, recorded, answer["prediction"])
        yield answer | {"recorded": recorded, "explanation": explanation}


def archive_facts(file: Path, settings: Settings) -> dict[str, Any]:
    """Return the facts of an archive: digest, manifest, requirements, baseline."""
    with open_cached(file, settings) as archive:
        manifest, baseline = archive.manifest, read_baseline(archive.directory)
        facts = {"archive": file.name, "SHA-256": archive.digest, **manifest.data.get("model", {})}
        requirements = archive.directory / (manifest.requirements_file or "requirements.txt")
        if requirements.is_file():
            facts["requirements"] = requirements.read_text(encoding="utf-8", errors="replace")
        if baseline is not None:
            facts["baseline"] = f"{baseline.rows:,} rows of {baseline.source}"
    return facts
