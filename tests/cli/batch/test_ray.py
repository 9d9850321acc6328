"""`tsx batch --on` a Ray cluster of two nodes has the same output as a local run."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from tests.support.models import make_model
from tsx_cli.batch.ray.engine import ClusterLayout, layout
from tsx_cli.main import main

HANDLER = """
from pathlib import Path

ARMED, REACHED, GO_ON = (Path({place!r}, name) for name in ("armed", "reached", "go-on"))


def handle(data, context):
    return None if data is None else [answer(row["body"]) for row in data]


def answer(body):
    if isinstance(body, dict):
        return {{"n": body["n"] * 2}} if body["n"] % 50 != 7 else 1 / 0
    if len(body) > 20 and ARMED.exists():
        REACHED.write_text("x")
        with GO_ON.open("rb", 0) as pipe:
            pipe.read(1)
    return str(len(body))
"""
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}
# A lost node is noticed within a second: nothing here is far away.
FAST_FAILURE_DETECTION = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "health_check_failure_threshold": 3,
}

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("batch")
    make_model(
        directory / "double.mar", HANDLER.format(place=str(directory)), config="batchSize: 8\n"
    )
    (directory / "rows.jsonl").write_text(
        "".join(f'{{"n": {number}}}\n' for number in range(200)) + "{\n"
    )
    (directory / "files").mkdir()
    for number in range(200):
        (directory / "files" / f"{number:03}.bin").write_bytes(b"x" * number)
    return directory


@pytest.fixture(scope="module")
def cluster(free_ports: Callable[[int], list[int]]) -> Iterator[tuple[Cluster, str]]:
    [port] = free_ports(1)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(
        True,
        head_node_args={
            **NODE,
            "ray_client_server_port": port,
            "include_dashboard": False,
            "_system_config": FAST_FAILURE_DETECTION,
        },
    )
    cluster.add_node(**NODE)
    yield cluster, f"ray://127.0.0.1:{port}"
    cluster.shutdown()


def run(directory: Path, inputs: str, output: str, *options: str, code: int = 0) -> bytes:
    model = shlex.split(
        f"{directory / 'double.mar'} {directory / inputs} -o {directory / output} --batch-size 8"
    )
    assert main(["batch", *model, *options]) == code
    return (directory / output).read_bytes() if code == 0 else b""


def test_the_output_equals_a_local_runs_and_an_unfinished_run_resumes(
    directory: Path, cluster: tuple[Cluster, str], capsys: pytest.CaptureFixture[str]
) -> None:
    local_output = run(directory, "rows.jsonl", "local.jsonl")
    assert local_output.count(b"division by zero") == 4
    arguments = ("rows.jsonl", "ray.jsonl", "--on", cluster[1])
    run(directory, *arguments, "--max-errors", "2", code=1)
    log = capsys.readouterr().err
    assert "2 replicas on 2 nodes, 1 CPU and 0 GPUs each" in log
    assert "more than --max-errors allows" in log
    assert run(directory, *arguments, "--json") == local_output
    assert json.loads(capsys.readouterr().out)["rows_before"] >= 108


def test_no_row_is_lost_with_a_node(directory: Path, cluster: tuple[Cluster, str]) -> None:
    local_output = run(directory, "files", "local-files.jsonl")
    pipes = []
    for name in ("reached", "go-on"):
        os.mkfifo(directory / name)
        pipes.append(os.open(directory / name, os.O_RDWR))

    def kill_node() -> None:
        """Kill a node while the replicas of both nodes are busy."""
        for _ in range(2):
            os.read(pipes[0], 1)
        (directory / "armed").unlink()
        cluster[0].remove_node(next(iter(cluster[0].worker_nodes)), allow_graceful=False)
        os.write(pipes[1], b"xx")

    (directory / "armed").touch()
    with ThreadPoolExecutor(1) as thread:
        killing = thread.submit(kill_node)
        assert (
            run(directory, "files", "ray-files.jsonl", "--on", cluster[0].address) == local_output
        )
        killing.result()


def test_a_cluster_with_gpus_gives_one_to_each_replica(
    directory: Path, cluster: tuple[Cluster, str], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster[0].add_node(**NODE, num_gpus=1)
    local_output = run(directory, "rows.jsonl", "local-gpus.jsonl")
    assert run(directory, "rows.jsonl", "gpus.jsonl", "--on", cluster[0].address) == local_output
    assert "1 GPU each" in capsys.readouterr().err


def test_replicas_fill_the_nodes_with_one_cpu_per_thread() -> None:
    nodes = [{"CPU": 7.0, "GPU": 2.0}, {"CPU": 4.0}]
    assert layout(nodes, 2, None, gpus=False) == ClusterLayout(5, 2, 0)
    assert layout(nodes, 2, None, gpus=True) == ClusterLayout(2, 2, 1)
    assert layout(nodes, None, 3, gpus=False) == ClusterLayout(3, 1, 0)
