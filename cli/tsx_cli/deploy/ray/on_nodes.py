"""What a deployment has done on nodes of the cluster, by their Python and their tsx: each function
is a task of Ray.
"""

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

MOST = 4 << 20  # bytes that are read of a log file at a time
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,]\d+)?(Z?)")
_MARKS = (":job_id:", ":actor_name:", ":task_name:")  # of Ray itself

Lines = list[tuple[float, str]]  # when, in seconds since 1970, and the text


def deploy(arguments: dict[str, Any], route_prefix: str | None) -> None:
    """As `serve.run`, without a wait: `status` says how far it is."""
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
    """New lines of the files of each replica below Ray's directory of logs, and how far each file
    has been read.
    """
    found, read = Lines(), dict(offsets)
    for replica, globs in patterns.items():
        for path in (
            path for glob in globs for path in Path(get_serve_logs_dir()).parent.glob(glob)
        ):
            size, begin = path.stat().st_size, read.get(str(path), 0)
            begin = max(begin, size - MOST) if begin <= size else 0
            with path.open("rb") as file:
                file.seek(begin)
                whole = file.read(MOST).rpartition(b"\n")[0]
            read[str(path)] = begin + len(whole) + bool(whole)
            when, lines = path.stat().st_mtime, Lines()
            for text in whole.decode("utf-8", "replace").splitlines():
                if stamp := _TIME.search(text):
                    when = datetime.fromisoformat(
                        f"{stamp[1]}{'+00:00' if stamp[2] else ''}"
                    ).timestamp()
                if not text.startswith(_MARKS):
                    lines.append((when, f"[{replica}] {text}"))
            found += deque(
                (line for line in lines if since is None or line[0] >= time.time() - since),
                maxlen=count,
            )
    return found, read
