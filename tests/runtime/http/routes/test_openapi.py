"""Requests generated from the server's own OpenAPI documents: none causes a server error.

The documents must list every status. Each operation gets a valid request here, and every tenth an
invalid one; `scripts/fuzz-api` makes ten thousand.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from tests.support.models import make_model
from tests.support.typed_models import TYPED

schemathesis = pytest.importorskip("schemathesis")

# The number of valid and of invalid requests per operation.
CASES = int(os.environ.get("TSX_API_CASES", "1"))
HANDLER = "def handle(data, context):\n    return data and ['{}'] * len(data)\n"
NOT_READY = {
    "/readyz",
    "/v2/health/ready",
    "/v2/models/{model}/ready",
    "/v2/models/{model}/versions/{version}/ready",
}


@pytest.fixture(scope="module")
def server(
    start_server: Callable[..., AbstractContextManager[Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """Run a server with the example model of the documents and at most two workers."""
    store = tmp_path_factory.mktemp("documented")
    make_model(store / "digits.mar", HANDLER)
    make_model(store / "sentiment.mar", TYPED)
    with pytest.MonkeyPatch.context() as patch, start_server(model_store=store) as server:
        patch.setattr("tsx_runtime.core.models.plan.MAX_WORKERS", 2)
        for archive in ("digits.mar", "sentiment.mar"):
            server.register(archive, initial_workers=1)
        yield server


@pytest.mark.nightly
@pytest.mark.parametrize("role", ["inference", "metrics", "management"])
def test_no_documented_request_causes_a_server_error(server: Any, role: str) -> None:
    document = schemathesis.openapi.from_url(f"{server.addresses[role]}/openapi.json")
    for mode in ("positive", "negative"):
        statuses: Counter[int] = Counter()
        for number, operation in enumerate(document.get_all_operations()):
            # Generating an invalid request takes half a second of CPU time.
            if mode == "positive" or CASES > 1 or number % 10 == 0:
                _send_requests(operation.ok(), mode, server, role, statuses)
        # All of a few invalid requests may be refused.
        assert mode == "negative" or statuses[200]
        print(f"\n{role}, {mode}: {statuses.total()} requests: {dict(sorted(statuses.items()))}")


def _send_requests(
    operation: Any, mode: str, server: Any, role: str, statuses: Counter[int]
) -> None:
    strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))
    documented = set(operation.definition.raw["responses"])

    @settings(
        max_examples=CASES,
        deadline=None,
        database=None,
        derandomize=CASES < 10,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def send(case: Any) -> None:
        if "digits" not in server.registry.models:
            server.register("digits.mar", initial_workers=1)
        # Every second request names the model that exists.
        if statuses.total() % 2:
            for name in case.path_parameters.keys() & {"model", "version"}:
                case.path_parameters[name] = {"model": "digits", "version": "1.0"}[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer = case.call(base_url=server.addresses[role], timeout=60)
        statuses[answer.status_code] += 1
        failure = (case.as_curl_command(), answer.status_code, answer.text)
        if answer.status_code >= 500:
            assert answer.status_code == 503, failure
            # There may be no worker, or the time limit may be exceeded.
            assert (
                operation.path in NOT_READY
                or answer.json()["type"] == "ServiceUnavailableException"
            ), failure
        assert str(answer.status_code) in documented, failure

    # An operation without parameters has no invalid request.
    with suppress(Unsatisfiable):
        send()
