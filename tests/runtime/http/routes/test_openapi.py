"""Requests made from the server's own OpenAPI documents, good ones and bad ones: none makes it
fail, and each status is documented.

A good one for each operation here and a bad one for every sixth; `scripts/fuzz-api` makes ten
thousand.
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

schemathesis = pytest.importorskip("schemathesis")

CASES = int(os.environ.get("TSX_API_CASES", "1"))  # for each operation, good and bad ones each
HANDLER = "def handle(data, context):\n    return data and ['{}'] * len(data)\n"
REAL = {"model": "digits", "version": "1.0"}
NOT_READY = {
    "/readyz",
    "/v2/health/ready",
    "/v2/models/{model}/ready",
    "/v2/models/{model}/versions/{version}/ready",
}


@pytest.fixture(scope="module")
def asked(
    start_server: Callable[..., AbstractContextManager[Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    """A server with the model of the documents' examples, which never has more than two workers."""
    store = tmp_path_factory.mktemp("documented")
    make_model(store / "digits.mar", HANDLER)
    with pytest.MonkeyPatch.context() as patch, start_server(model_store=store) as server:
        patch.setattr("tsx_runtime.core.models.plan.MOST_WORKERS", 2)
        server.register("digits.mar", initial_workers=1)
        yield server


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("role", ["inference", "metrics", "management"])
def test_no_request_makes_the_server_fail(asked: Any, role: str, mode: str) -> None:
    document = schemathesis.openapi.from_url(f"{asked.addresses[role]}/openapi.json")
    statuses: Counter[int] = Counter()
    for number, found in enumerate(document.get_all_operations()):
        if (
            mode == "positive" or CASES > 1 or number % 6 == 0
        ):  # to find a bad one takes half a second of the processor
            _try(found.ok(), mode, asked, role, statuses)
    assert mode == "negative" or statuses[200]  # of few bad ones all may be refused
    print(
        f"\n{role}, {mode}: {statuses.total()} requests, by status: {dict(sorted(statuses.items()))}"
    )


def _try(operation: Any, mode: str, server: Any, role: str, statuses: Counter[int]) -> None:
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
    def ask(case: Any) -> None:
        if "digits" not in server.registry.models:
            server.register("digits.mar", initial_workers=1)
        if statuses.total() % 2:  # else nearly all would ask for models that there are not
            case.path_parameters.update(
                {name: value for name, value in REAL.items() if name in case.path_parameters}
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            answer = case.call(base_url=server.addresses[role], timeout=60)
        statuses[answer.status_code] += 1
        if answer.status_code >= 500:
            assert answer.status_code == 503, (case.as_curl_command(), answer.text)
            refused = (
                operation.path in NOT_READY
                or answer.json()["type"] == "ServiceUnavailableException"
            )  # no worker, or no time
            assert refused, (case.as_curl_command(), answer.text)
        assert str(answer.status_code) in documented, (case.as_curl_command(), answer.status_code)

    with suppress(Unsatisfiable):  # there is no wrong way to call what takes nothing
        ask()
