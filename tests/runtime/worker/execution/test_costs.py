"""Batches that a worker cuts by the handler's own `cost` of a request."""

from __future__ import annotations

import json

from tests.runtime.worker.conftest import StartWorker

TOGETHER = """
    def handle(data, context):
        return [{"together": [bytes(row["body"]).decode() for row in data or []]}] * len(data or [])

    def cost(request):
        if request["body"] == b"odd":
            raise KeyError("no such word")
        return float(request["body"])
"""
CLASS = """
    class Handler:
        def initialize(self, context):
            pass

        def cost(self, request):
            return len(request["body"])

        def handle(self, data, context):
            return [len(data)] * len(data)
"""


def test_a_call_of_the_handler_costs_no_more_than_the_limit_unless_it_is_one_request(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(TOGETHER, max_batch_cost=10)
    bodies = [b"4", b"6", b"1", b"50", b"5", b"5", b"odd", b"nan", b"0"]
    answers = worker.ask(*bodies)
    assert [answer.status for answer in answers] == [200, 200, 200, 200, 200, 200, 500, 500, 200]
    together = [json.loads(answer.body)["together"] for answer in answers if answer.status == 200]
    assert together == [["4", "6"]] * 2 + [["1"], ["50"]] + [["5", "5", "0"]] * 3
    assert "KeyError" in answers[6].message
    assert "a number from 0" in answers[7].message
    assert [(metric["name"], metric["value"]) for metric in worker.metrics] == [
        ("tsx_batch_cost_total", 71.0)
    ]


def test_without_a_limit_no_cost_is_asked_for(start_worker: StartWorker) -> None:
    worker = start_worker(TOGETHER)
    assert worker.ask_statuses(b"4", b"odd") == [200, 200]
    assert worker.metrics == []


def test_a_class_has_a_method_for_it(start_worker: StartWorker) -> None:
    worker = start_worker(CLASS, max_batch_cost=4)
    assert worker.ask_bodies(b"aa", b"bb", b"c") == [b"2", b"2", b"1"]
