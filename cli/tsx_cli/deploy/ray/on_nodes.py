"""Tasks of Ray that run on nodes of the cluster, with the Python and tsx of the nodes."""

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

MAX_READ_BYTES = 4 << 20  # part of a log file that is read at a time
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,]\d+)?(Z?)")
_MARKS = (":job_id:", ":actor_name:", ":task_name:")  # lines of Ray itself

Lines = list[tuple[float, str]]  # seconds since 1970, and text


def deploy(arguments: dict[str, Any], route_prefix: str | None) -> None:
    """Deploy an application as `serve.run` does, without waiting; `status` shows the progress."""
    target = serve.RunTarget(build(arguments), arguments["name"], route_prefix)
    serve.run_many(
        [target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
    )


def ask(
    address: str, model: str, body: bytes, content_type: str, accept: str | None
) -> tuple[bytes, str]:
    answer = predict(address, model, body, content_type, accept)
    return answer.body(), answer.content_type


def read_logs(
    patterns: Mapping[str, Sequence[str]],
    offsets: Mapping[str, int],
    count: int | None,
    since: float | None,
) -> tuple[Lines, dict[str, int]]:
    """Return new lines of the log files of each replica, and the new offsets of the files."""
    new_lines, read = Lines(), dict(offsets)
    for replica, globs in patterns.items():
        for path in (
            path for glob in globs for path in Path(get_serve_logs_dir()).parent.glob(glob)
        ):
            size, begin = path.stat().st_size, read.get(str(path), 0)
            begin = max(begin, size - MAX_READ_BYTES) if begin <= size else 0
            with path.open("rb") as file:
                file.seek(begin)
                content = file.read(MAX_READ_BYTES).rpartition(b"\n")[0]
            read[str(path)] = begin + len(content) + bool(content)
            when, lines = path.stat().st_mtime, Lines()
            for text in content.decode("utf-8", "replace").splitlines():
                if stamp := _TIME.search(text):
                    when = datetime.fromisoformat(
                        f"{stamp[1]}{'+00:00' if stamp[2] else ''}"
                    ).timestamp()
                if not text.startswith(_MARKS):
                    lines.append((when, f"[{replica}] {text}"))
            new_lines += deque(
                (line for line in lines if since is None or line[0] >= time.time() - since),
                maxlen=count,
            )
    return new_lines, read
