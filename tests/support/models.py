"""Archives and directories of models that consist only of a handler."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

# A handler that adds each number to the total of its sequence. Some words make it fail, wait for a
# file, or close its sequence.
STATEFUL = """
import os, time
from pathlib import Path
from ts.handler_utils.utils import send_intermediate_predict_response

totals = {}

def handle(data, context):
    if data is None:
        return None
    answers = []
    for idx, row in enumerate(data):
        id = context.get_sequence_id(idx)
        if context.get_request_header(idx, context.header_key_sequence_start) == "true":
            totals[id] = 0
        word = bytes(row.get("data") or row["body"]).decode()
        if word == "exit":
            os._exit(7)
        if word == "raise":
            raise ValueError("no number")
        if word.startswith("/"):
            deadline = time.monotonic() + 90
            while not Path(word).exists() and time.monotonic() < deadline:
                time.sleep(0.002)
            word = "0"
        if word == "stream":
            send_intermediate_predict_response(["part "], {idx: context.get_request_id(idx)}, "", 200, context)
            word = "0"
        if word == "close":
            context.set_response_header(idx, context.header_key_sequence_end, "true")
            word = "0"
        totals[id] = totals.get(id, 0) + int(word)
        answers.append({"total": totals[id], "pid": os.getpid(), "together": len(data)})
    return answers
"""


def make_model(
    path: Path,
    handler: str,
    *,
    name: str | None = None,
    version: str = "1.0",
    config: str = "",
    **more: str,
) -> Path:
    """Write a model: an archive if `path` ends in .mar, otherwise a directory.

    Its name is that of the path unless `name` is given; `more` are fields of its manifest.
    """
    model = {
        "modelName": name or path.stem,
        "modelVersion": version,
        "handler": "handler.py",
        **more,
    }
    files = {"handler.py": handler}
    if config:
        files["model-config.yaml"] = config
        model["configFile"] = "model-config.yaml"
    files["MAR-INF/MANIFEST.json"] = json.dumps({"runtime": "python", "model": model})
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".mar":
        with zipfile.ZipFile(path, "w") as archive:
            for member, text in files.items():
                archive.writestr(member, text)
        return path
    for member, text in files.items():
        (path / member).parent.mkdir(parents=True, exist_ok=True)
        (path / member).write_text(text)
    return path


def make_war(path: Path, spec: str, handler: str | None, *, name: str = "", **members: str) -> Path:
    """Write the archive of a workflow, whose name is the file's unless `name` is given.

    Empty members are left out.
    """
    workflow = {"workflowName": name or path.stem, "specFile": "spec.yaml"} | (
        {"handler": "handler.py"} if handler else {}
    )
    files = {
        "spec.yaml": spec,
        "handler.py": handler or "",
        "WAR-INF/MANIFEST.json": json.dumps({"workflow": workflow}),
    } | members
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in files.items():
            if text:
                archive.writestr(member, text)
    return path
