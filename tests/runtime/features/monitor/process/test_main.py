"""The monitor process, with a real store and the frames of a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.features.monitor.process.monitor_client import MonitorClient


@pytest.fixture
def client(tmp_path: Path) -> Iterator[MonitorClient]:
    client = MonitorClient(tmp_path / "monitor.sqlite")
    yield client
    client.close()


def test_samples_become_windows_groups_and_quality(client: MonitorClient) -> None:
    client.monitor({"groups": ["sex"], "windowSamples": 100})
    for number in range(250):
        request = {"age": 20 + number % 50, "sex": "fm"[number % 2]}
        client.sample(f"r{number}", request, {"cat": 0.9, "dog": 0.1})
    truths = ["cat" if number % 4 else "dog" for number in range(200)]
    result = client.give_feedback(
        *({"request_id": f"r{number}", "truth": truth} for number, truth in enumerate(truths))
    )
    assert result == {"accepted": 200, "duplicates": 0, "errors": []}
    version = client.report()["versions"][0]
    assert (version["samples"], version["windows"], version["alarm"]) == (250, 2, False)
    assert version["quality"]["accuracy"]["value"] == 0.75
    groups = version["groups"][0]["groups"]
    assert [(group["group"], group["count"]) for group in groups] == [("f", 125), ("m", 125)]
    state = client.read_state()
    while state["accuracy"] is None:
        state = client.read_state()
    assert (state["feedback"], state["accuracy"]) == (200, 0.75)
