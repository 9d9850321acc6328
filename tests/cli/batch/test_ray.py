"""`tsx batch --on` a Ray cluster of two nodes: the output is that of a local run, whatever happens to a node."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from tests.support.models import make_model
from tsx_cli.batch.ray.engine import ClusterLayout, layout
from tsx_cli.main import main

HANDLER = """
import os, time
from pathlib import Path

GATE = Path({gate!r})


def handle(data, context):
    return None if data is None else [answer(row["body"], context, position) for position, row in enumerate(data)]


def answer(body, context, position):
    if isinstance(body, dict) and body["n"] % 50 == 7:
        raise ValueError("it is seven")
    if isinstance(body, dict) and body["n"] == 600 and GATE.with_suffix(".armed").exists():  # of the run whose node is lost
        GATE.touch()
        while GATE.exists():
            time.sleep(0.01)
    return {{"n": body["n"] * 2}} if isinstance(body, dict) else str(len(body))
"""
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}
# A lost node is noticed within a second: nothing here is far away.
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200, "health_check_failure_threshold": 3}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("batch")
    make_model(directory / "double.mar", HANDLER.format(gate=str(directory / "gate")), config="batchSize: 8\n")
    (directory / "rows.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(1000)))
    (directory / "files").mkdir()
    for number in range(60):
        (directory / "files" / f"{number:02}.bin").write_bytes(b"x" * number)
    return directory


@pytest.fixture(scope="module")
def cluster(free_ports: Callable[[int], list[int]]) -> Iterator[tuple[Cluster, str]]:
    [port] = free_ports(1)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(True, head_node_args={**NODE, "ray_client_server_port": port, "include_dashboard": False, "_system_config": QUICK})
    cluster.add_node(**NODE)
    yield cluster, f"ray://127.0.0.1:{port}"
    cluster.shutdown()


def run(directory: Path, inputs: str, output: str, *words: str) -> bytes:
    model = [str(directory / "double.mar"), str(directory / inputs), "-o", str(directory / output), "--batch-size", "8"]
    assert main(["batch", *model, *words]) == 0
    return (directory / output).read_bytes()


def test_lines_are_sent_by_the_driver_and_the_output_is_that_of_a_local_run(
    directory: Path, cluster: tuple[Cluster, str], capsys: pytest.CaptureFixture[str]
) -> None:
    local = run(directory, "rows.jsonl", "local.jsonl")
    assert b"it is seven" in local
    assert run(directory, "rows.jsonl", "ray.jsonl", "--on", cluster[1]) == local
    assert "2 replicas on 2 nodes, 1 CPUs and 0 GPUs each; this machine reads the inputs and sends the rows" in capsys.readouterr().err


def test_nodes_read_the_files_that_they_see(directory: Path, cluster: tuple[Cluster, str], capsys: pytest.CaptureFixture[str]) -> None:
    local = run(directory, "files", "local-files.jsonl")
    assert run(directory, "files", "ray-files.jsonl", "--on", cluster[1]) == local
    assert "the nodes read the inputs" in capsys.readouterr().err


def test_a_node_that_is_lost_loses_no_row(directory: Path, cluster: tuple[Cluster, str]) -> None:
    (directory / "gate.armed").touch()

    def lose() -> None:
        while not (directory / "gate").exists():
            threading.Event().wait(0.02)
        cluster[0].remove_node(cluster[0].worker_nodes.copy().pop(), allow_graceful=False)
        (directory / "gate.armed").unlink()
        (directory / "gate").unlink()

    thread = threading.Thread(target=lose)
    thread.start()
    assert run(directory, "rows.jsonl", "lost.jsonl", "--on", cluster[1]) == (directory / "local.jsonl").read_bytes()
    thread.join()


def test_replicas_fill_the_nodes_with_as_many_cpus_as_a_worker_has_threads() -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": 7.0, "GPU": 2.0}}, {"Alive": True, "Resources": {"CPU": 4.0}}, {"Alive": False}]
    assert layout(nodes, 2, None, gpus=False) == ClusterLayout(5, 2, 0)
    assert layout(nodes, 2, None, gpus=True) == ClusterLayout(2, 2, 1)
    assert layout(nodes, None, 3, gpus=False) == ClusterLayout(3, 1, 0)
