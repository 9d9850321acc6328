"""The form that a version runs in, as the description, metrics, log and web page show it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.formed import REASON, doubling

pytestmark = pytest.mark.usefixtures("processes")


def test_an_unsuitable_form_is_skipped_and_the_fallback_is_reported(
    start_server: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    doubling(tmp_path / "doubling")
    doubling(tmp_path / "plain", "[channels-last]")
    with start_server(model_store=tmp_path) as server, caplog.at_level(logging.INFO, "tsx"):
        server.register("doubling", initial_workers=2)
        server.register("plain", initial_workers=1)
        assert server.ask(b"21", "/predictions/doubling").text == "42 by channels-last"
        description = server.management.get("/models/doubling").json()[0]
        assert (description["form"], description["formsPassedOver"]) == ("channels-last", [REASON])
        assert "formsPassedOver" not in server.management.get("/models/plain").json()[0]
        families = {
            family.name: family
            for family in text_string_to_metric_families(server.metrics.get("/metrics").text)
        }
        forms = families["tsx_model_form"].samples
        assert {
            (sample.labels["model_name"], sample.labels["form"]): sample.value for sample in forms
        } == {
            ("doubling", "channels-last"): 2,
            ("plain", "channels-last"): 1,
        }
        fallen_back = families["tsx_model_form_fallback"].samples
        assert {sample.labels["model_name"]: sample.value for sample in fallen_back} == {
            "doubling": 2,
            "plain": 0,
        }
        shown_version = server.management.get("/ui/api/state").json()["models"][0]["versions"][0]
        assert (shown_version["form"], shown_version["formsPassedOver"]) == (
            "channels-last",
            [REASON],
        )
    records = [record for record in caplog.records if "the model runs as" in record.message]
    assert [(record.levelno, REASON in record.message) for record in records] == [
        (logging.WARNING, True),
        (logging.INFO, False),
    ]
