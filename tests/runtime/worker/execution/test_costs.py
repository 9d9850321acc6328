"""Batches that a worker cuts by the cost of requests, which the handler computes."""

from __future__ import annotations

import json

from tests.runtime.worker.conftest import StartWorker

HANDLER = """
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


def test_a_batch_is_cut_at_the_cost_limit_but_has_at_least_one_request(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(HANDLER, max_batch_cost=10)
    bodies = [b"4", b"6", b"1", b"50", b"5", b"5", b"odd", b"nan", b"0"]
    answers = worker.ask(*bodies)
    assert [answer.status for answer in answers] == [200, 200, 200, 200, 200, 200, 500, 500, 200]
    batch_sizes = [
        json.loads(answer.body)["together"] for answer in answers if answer.status == 200
    ]
    assert batch_sizes == [["4", "6"]] * 2 + [["1"], ["50"]] + [["5", "5", "0"]] * 3
    assert "KeyError" in answers[6].message
    assert "a number from 0" in answers[7].message
    assert [(metric["name"], metric["value"]) for metric in worker.metrics] == [
        ("tsx_batch_cost_total", 71.0)
    ]


def test_without_a_limit_the_cost_function_is_not_called(start_worker: StartWorker) -> None:
    worker = start_worker(HANDLER)
    assert worker.ask_statuses(b"4", b"odd") == [200, 200]
    assert worker.metrics == []


def test_a_handler_class_has_a_cost_method(start_worker: StartWorker) -> None:
    worker = start_worker(CLASS, max_batch_cost=4)
    assert worker.ask_bodies(b"aa", b"bb", b"c") == [b"2", b"2", b"1"]
