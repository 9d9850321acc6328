"""What a deployment has done on nodes of the cluster, by their Python and their tsx: each function is a task of Ray."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import ray
from ray import serve
from ray.serve._private.build_app import build_app
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve._private.logging_utils import get_serve_logs_dir
from ray.serve.context import _get_global_client

from tsx_cli.deploy.container.deployment import predict
from tsx_cli.deploy.kubernetes.canary import Counters, read_counters
from tsx_runtime.metrics.exposition import Families
from tsx_runtime.metrics.version_metrics import add_version
from tsx_runtime.targets.ray.application import build

MOST = 4 << 20  # bytes that are read of a log file at a time
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,]\d+)?(Z?)")
_MARKS = (":job_id:", ":actor_name:", ":task_name:")  # of Ray itself

Lines = list[tuple[float, str]]  # when, in seconds since 1970, and the text


def deploy(arguments: dict[str, Any], route_prefix: str | None, surge: float) -> None:
    """As `serve.run`, but with `surge` percent more replicas while they are replaced, and without a wait: `status` says how far it is."""
    environment = ray.get_runtime_context().runtime_env
    built = build_app(build(arguments), name=arguments["name"], route_prefix=route_prefix, default_runtime_env=environment)
    for deployment in built.deployments:
        deployment._deployment_config.max_surge_percent = math.ceil(surge)
    client = _get_global_client()
    assert client is not None  # as it raises where there is none
    client.deploy_applications([built], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def ask(address: str, model: str, body: bytes, content_type: str, accept: str | None) -> tuple[bytes, str]:
    answer = predict(address, model, body, content_type, accept)
    return answer.body(), answer.content_type


def counters(actors: Sequence[str]) -> dict[str, Counters]:
    """What the replicas of these names have counted since they started."""
    return {name: ray.get(ray.get_actor(name, namespace=SERVE_NAMESPACE).__ray_call__.remote(_counted), timeout=10) for name in actors}


def _counted(replica: Any) -> Counters:
    """Runs in a replica's own process, where its registry is."""
    families, served = Families(), cast(Any, serve.get_replica_context().servable_object)
    for model in served._registry.models.values():
        for version in model.versions.values():
            add_version(families, version, "", {}, {})
    return read_counters(b"".join(families.text()).decode())


def read_logs(
    patterns: Mapping[str, Sequence[str]], offsets: Mapping[str, int], count: int | None, since: float | None
) -> tuple[Lines, dict[str, int]]:
    """New lines of the files of each replica below Ray's directory of logs, and how far each file has been read."""
    found, read = Lines(), dict(offsets)
    for replica, globs in patterns.items():
        for path in (path for glob in globs for path in Path(get_serve_logs_dir()).parent.glob(glob)):
            size, begin = path.stat().st_size, read.get(str(path), 0)
            begin = max(begin, size - MOST) if begin <= size else 0
            with path.open("rb") as file:
                file.seek(begin)
                whole = file.read(MOST).rpartition(b"\n")[0]
            read[str(path)] = begin + len(whole) + bool(whole)
            when, lines = path.stat().st_mtime, Lines()
            for text in whole.decode("utf-8", "replace").splitlines():
                if stamp := _TIME.search(text):
                    when = datetime.fromisoformat(f"{stamp[1]}{'+00:00' if stamp[2] else ''}").timestamp()
                if not text.startswith(_MARKS):
                    lines.append((when, f"[{replica}] {text}"))
            found += deque((line for line in lines if since is None or line[0] >= time.time() - since), maxlen=count)
    return found, read
