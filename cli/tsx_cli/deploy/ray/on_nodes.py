"""Tasks that run on nodes of a Ray cluster, with the Python and tsx of the nodes."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve._private.logging_utils import get_serve_logs_dir

from tsx_cli.deploy.container.deployment import predict
from tsx_runtime.targets.ray.application import build

MAX_READ_BYTES = 4 << 20  # largest part of a log file that is read at a time
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,]\d+)?(Z?)")
# Prefixes of lines that Ray itself writes.
_RAY_PREFIXES = (":job_id:", ":actor_name:", ":task_name:")

Lines = list[tuple[float, str]]  # seconds since 1970, and text


def deploy(arguments: dict[str, Any], route_prefix: str | None) -> None:
    """Deploy an application as `serve.run` does, without waiting; `status` shows the progress."""
    target = serve.RunTarget(build(arguments), arguments["name"], route_prefix)
    serve.run_many(
        [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
    )


def send_request(
    address: str, model: str, body: bytes, content_type: str, accept: str | None
) -> tuple[bytes, str]:
    response = predict(address, model, body, content_type, accept)
    return response.body(), response.content_type


def read_logs(
    patterns: Mapping[str, Sequence[str]],
    offsets: Mapping[str, int],
    count: int | None,
    since: float | None,
) -> tuple[Lines, dict[str, int]]:
    """Return new lines of the log files of each replica, and the new offsets of the files."""
    new_lines, new_offsets = Lines(), dict(offsets)
    for replica, globs in patterns.items():
        for path in (
            path for glob in globs for path in Path(get_serve_logs_dir()).parent.glob(glob)
        ):
            size, offset = path.stat().st_size, new_offsets.get(str(path), 0)
            offset = max(offset, size - MAX_READ_BYTES) if offset <= size else 0
            with path.open("rb") as file:
                file.seek(offset)
                content = file.read(MAX_READ_BYTES).rpartition(b"\n")[0]
            new_offsets[str(path)] = offset + len(content) + bool(content)
            line_time, lines = path.stat().st_mtime, Lines()
            for text in content.decode("utf-8", "replace").splitlines():
                if time_match := _TIME.search(text):
                    line_time = datetime.fromisoformat(
                        f"{time_match[1]}{'+00:00' if time_match[2] else ''}"
                    ).timestamp()
                if not text.startswith(_RAY_PREFIXES):
                    lines.append((line_time, f"[{replica}] {text}"))
            new_lines += deque(
                (line for line in lines if since is None or line[0] >= time.time() - since),
                maxlen=count,
            )
    return new_lines, new_offsets
