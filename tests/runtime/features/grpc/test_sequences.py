"""Stateful models over gRPC: each sequence of requests has its own state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tests.runtime.features.grpc.conftest import TIMEOUT, Client


@pytest.fixture(scope="module", autouse=True)
def stateful(client: Client) -> Iterator[None]:
    client.manage("RegisterModel", url="stateful.mar", initial_workers=1, synchronous=True)
    yield
    client.manage("UnregisterModel", model_name="stateful")


def add(client: Client, *numbers: tuple[str | None, int], **marks: bytes) -> list[Any]:
    """Return the model's answers over one stream; `marks` are extra inputs of the last request."""
    requests = [
        client.request("stateful", sequence=id, data=b"%d" % number) for id, number in numbers
    ]
    for name, value in marks.items():
        requests[-1].input[name] = value
    return list(client.converse(*requests))


def totals(answers: list[Any]) -> list[int]:
    return [json.loads(answer.prediction)["total"] for answer in answers]


def test_sequences_of_one_stream_have_separate_states(client: Client) -> None:
    answers = add(client, ("a", 1), ("b", 10), ("a", 2), ("b", 20), ("a", 3))
    assert totals(answers) == [1, 10, 3, 30, 6]
    assert [answer.sequence_id for answer in answers] == ["a", "b", "a", "b", "a"]


def test_sequence_ids_that_differ_in_non_latin_letters_are_distinct(client: Client) -> None:
    answers = add(client, ("用", 1), ("户", 10), ("用", 2), ("户", 20))
    assert totals(answers) == [1, 10, 3, 30]
    assert [answer.sequence_id for answer in answers] == ["用", "户", "用", "户"]


def test_an_invalid_sequence_id_is_refused_and_the_stream_continues(client: Client) -> None:
    first, second = add(client, ("e\r\nx-other: 1", 1), ("e", 2))
    assert first.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "contains a line break" in first.status.message
    assert totals([second]) == [2]


def test_a_new_stream_restarts_its_sequences(client: Client) -> None:
    assert totals(add(client, ("c", 1), ("c", 2))) == [1, 3]
    assert totals(add(client, ("c", 5))) == [5]


def test_a_stream_without_sequence_ids_is_one_sequence(client: Client) -> None:
    answers = add(client, (None, 1), (None, 2), (None, 3), ts_request_sequence_end=b"true")
    assert totals(answers) == [1, 3, 6]
    (id,) = {answer.sequence_id for answer in answers}
    assert id.startswith("ts-seq-")


def test_single_requests_start_and_end_a_sequence_by_metadata(client: Client) -> None:
    def add_alone(number: int, *metadata: tuple[str, str]) -> Any:
        request = client.request("stateful", sequence="d", data=b"%d" % number)
        return client.predictions.Predictions(request, metadata=metadata, timeout=TIMEOUT)

    answers = [
        add_alone(1, ("ts_request_sequence_start", "true")),
        add_alone(2),
        add_alone(3, ("ts_request_sequence_end", "true")),
    ]
    assert totals(answers) == [1, 3, 6]
    assert {answer.sequence_id for answer in answers} == {"d"}
