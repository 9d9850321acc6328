"""Models whose batches are limited by cost, behind a server."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.runtime.conftest import RunningServer, make_settings, running_server
from tests.support.models import make_model
from tsx_runtime.core.scheduling.costs import CostQueue
from tsx_runtime.core.scheduling.queue import RequestQueue

SUMS = """
def handle(data, context):
    costs = [cost(row) for row in data or []]
    declared = [float(context.get_request_header(idx, "x-tsx-cost") or 0) for idx in range(len(costs))]
    return [{"costs": costs, "declared": declared}] * len(costs)
"""
COST = (
    SUMS
    + """
def cost(request):
    return len(bytes(request["body"]).split())
"""
)
NO_COST = SUMS.replace("cost(row)", "1")


@pytest.fixture(scope="module")
def cost_server(
    processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    store = tmp_path_factory.mktemp("costs")
    make_model(store / "tokens.mar", COST, config="batchSize: 16\nmaxBatchTokens: 10\n")
    make_model(store / "declared.mar", NO_COST, config="batchSize: 16\n")
    make_model(store / "both.mar", NO_COST, config="maxBatchCost: 1\nmaxBatchTokens: 1\n")
    make_model(store / "flow.mar", NO_COST, config="batchBuckets: [1]\ncontinuousBatching: true\n")
    with running_server(
        make_settings(store, models={"declared": {"maxBatchCost": 10, "batch_buckets": [1, 2, 4]}})
    ) as server:
        for model in ("tokens", "declared"):
            server.register(f"{model}.mar", initial_workers=1)
        yield server


def answers(
    server: RunningServer, model: str, bodies: list[bytes], costs: list[int] | None = None
) -> list[dict[str, Any]]:
    """Return the answers to clients that send their requests concurrently."""

    def ask(body: bytes, cost: int | None) -> dict[str, Any]:
        headers = {} if cost is None else {"x-tsx-cost": str(cost)}
        kind = "application/octet-stream"
        answer = server.ask(body, f"/predictions/{model}", content_type=kind, **headers)
        return dict(answer.raise_for_status().json())

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(ask, bodies, costs or [None] * len(bodies)))


def queue_of(server: RunningServer, model: str) -> RequestQueue:
    return server.registry.models[model].versions["1.0"].dispatcher.queue


def test_the_handlers_cost_limits_batches_and_is_learned(cost_server):
    bodies = [b"word " * (1 + index % 12) for index in range(64)]
    for answer in answers(cost_server, "tokens", bodies):
        assert len(answer["costs"]) == 1 or sum(answer["costs"]) <= 10
    queue = queue_of(cost_server, "tokens")
    assert isinstance(queue, CostQueue)
    assert queue._rate == pytest.approx(0.2)
    text = cost_server.metrics.get("/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith("tsx_batch_cost_total{")]
    assert float(line.rpartition(" ")[2]) == sum(1 + index % 12 for index in range(64))


def test_a_client_may_declare_the_cost_of_its_request(cost_server):
    for answer in answers(
        cost_server, "declared", [b"x"] * 64, [1 + idx % 12 for idx in range(64)]
    ):
        assert len(answer["declared"]) == 1 or sum(answer["declared"]) <= 10
        assert len(answer["declared"]) <= 16


@pytest.mark.parametrize(
    ("file", "message"),
    [("both.mar", "two names of one bound"), ("flow.mar", "do not apply to sequences")],
)
def test_conflicting_batch_limits_are_refused(cost_server, file, message):
    answer = cost_server.management.post(f"/models?url={file}")
    assert answer.status_code == 400
    assert message in answer.text
