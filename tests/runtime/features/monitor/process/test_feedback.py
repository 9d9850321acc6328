"""Feedback: its join with answers, its errors, and that its order does not matter."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.features.monitor.process.local_monitor import CAT, LocalMonitor
from tsx_runtime.errors import BadRequest, Conflict, PayloadTooLarge, ResourceNotFound, TsxError


@pytest.fixture
def server(tmp_path: Path) -> LocalMonitor:
    server = LocalMonitor(
        str(tmp_path / "monitor.sqlite"), {"groups": ["sex"], "key": "id", "minGroup": 1}
    )
    server.announce("2.0", registered=2.0)
    server.sample("class", {"id": "k1"}, CAT)
    server.sample("number", {"id": 42}, 1.5)
    server.sample("digit", {}, {"3": 0.9, "5": 0.1})
    server.sample("truth", {}, True)
    server.sample("nothing", {}, {"a": {}})
    server.sample("rows", [{"id": "x"}, {"id": "y"}], ["cat", "dog"])
    return server


@pytest.mark.parametrize(
    ("item", "code"),
    [
        ({"request_id": "lost", "truth": "cat"}, "unknown_request"),
        ({"key": "lost", "truth": "cat"}, "unknown_request"),
        ({"request_id": "rows", "row": 2, "truth": "cat"}, "unknown_request"),
        ({"request_id": "lost", "truth": "cat", "version": "2.0"}, "unknown_request"),
        ({"request_id": "lost", "truth": "cat", "version": "0.1"}, "version_gone"),
        ({"request_id": "class", "truth": "cat", "version": "2.0"}, "version_gone"),
        ({"request_id": "class", "truth": 1}, "wrong_type"),
        ({"request_id": "class", "truth": True}, "wrong_type"),
        ({"request_id": "class", "truth": {"a": 1}}, "wrong_type"),
        ({"request_id": "class", "truth": ""}, "wrong_type"),
        ({"request_id": "number", "truth": "warm"}, "wrong_type"),
        ({"request_id": "number", "truth": True}, "wrong_type"),
        ({"request_id": "number", "truth": 1e200}, "wrong_type"),
        ({"request_id": "nothing", "truth": "cat"}, "wrong_type"),
        ({"request_id": "rows", "truth": "cat"}, "invalid"),
        ({"request_id": "rows", "truth": ["cat"] * 3}, "invalid"),
        ({"request_id": "class", "truth": "cat", "at": time.time() + 3600}, "future"),
        ({"request_id": "class", "truth": "cat", "at": "2999-01-01"}, "future"),
        ({"request_id": "class", "truth": "cat", "at": "never"}, "invalid"),
        ({"request_id": "class", "truth": "cat", "groups": {"race": "x"}}, "invalid"),
        ({"request_id": "class"}, "invalid"),
        ({"truth": "cat"}, "invalid"),
        ({"request_id": "class", "key": "k1", "truth": "cat"}, "invalid"),
        ({"request_id": "class", "truth": "cat", "other": 1}, "invalid"),
        ({"request_id": "class", "contest": {}}, "invalid"),
        ("cat", "invalid"),
    ],
)
def test_an_item_that_does_not_fit_is_an_error(server: LocalMonitor, item: Any, code: str) -> None:
    assert server.code(item) == code


@pytest.mark.parametrize(
    "item",
    [
        {"request_id": "class", "truth": "bird"},
        {"key": "k1", "truth": "cat", "at": "2026-01-01T00:00:00Z"},
        {"key": 42, "truth": 2},
        {"request_id": "digit", "truth": 7},
        {"request_id": "digit", "truth": 7.0},
        {"request_id": "truth", "truth": False},
        {"request_id": "rows", "truth": ["cat", "cat"]},
        {"request_id": "rows", "row": 1, "truth": "cat"},
        {"key": "y", "truth": "cat"},
    ],
)
def test_an_item_that_fits_is_stored_once(server: LocalMonitor, item: Any) -> None:
    assert server.feed(item, item) == {"accepted": 1, "duplicates": 1, "errors": []}
    assert server.feed(item) == {"accepted": 0, "duplicates": 1, "errors": []}


def test_good_items_beside_bad_ones_are_stored(server: LocalMonitor) -> None:
    result = server.feed(
        {"request_id": "lost", "truth": 1}, {"request_id": "class", "truth": "cat"}, 5
    )
    assert result["accepted"] == 1
    assert [error["index"] for error in result["errors"]] == [0, 2]


def test_the_message_of_an_invalid_item_says_what_to_give(server: LocalMonitor) -> None:
    empty, misspelt = server.feed({}, {"request_id": "class", "truht": "cat"})["errors"]
    assert empty["message"] == "give request_id or key, and truth, contest or both"
    assert misspelt["message"].startswith("truht: ")


def test_another_truth_needs_replace_and_moves_the_counts(server: LocalMonitor) -> None:
    groups = {"groups": {"sex": "f"}}
    server.feed({"request_id": "class", "truth": "dog"} | groups)
    assert server.code({"request_id": "class", "truth": "cat"}) == "conflict"
    assert server.code({"request_id": "class", "truth": "cat", "replace": True}) == "invalid"
    correction = {"request_id": "class", "truth": "cat", "replace": True} | groups
    assert server.feed(correction)["accepted"] == 1
    version = server.version()
    assert version["quality"]["accuracy"]["value"] == 1.0
    assert version["groups"][0]["groups"][0]["error"] == {
        "value": 0.0,
        "low": 0.0,
        "high": pytest.approx(0.79, abs=0.01),
        "count": 1,
    }


def test_a_key_names_the_newest_request(server: LocalMonitor) -> None:
    now = time.time()
    server.sample("newer", {"id": "k1"}, {"cat": 0.1, "dog": 0.9}, at=now + 1)
    server.feed({"key": "k1", "truth": "cat"})
    assert server.version()["quality"]["accuracy"]["value"] == 0.0
    assert server.code({"request_id": "newer", "truth": "dog"}) == "conflict"


def test_a_key_that_feedback_cannot_name_is_not_stored(location: str) -> None:
    server = LocalMonitor(location, {"key": "order"})
    long = "".join(map(chr, range(0x4E00, 0x4E00 + 3000)))  # It cannot be compressed.
    server.sample("a", {"order": long}, CAT)
    server.sample("b", {"order": "x"}, CAT)
    assert server.feed({"key": "x", "truth": "cat"}, {"request_id": "a", "truth": "cat"}) == {
        "accepted": 2,
        "duplicates": 0,
        "errors": [],
    }


def test_a_mirrored_request_gives_each_version_its_truth(server: LocalMonitor) -> None:
    server.sample("class", {"id": "k1"}, {"cat": 0.1, "dog": 0.9}, version="2.0")
    assert server.feed({"key": "k1", "truth": "cat"})["accepted"] == 1
    accuracies = [
        server.version(number)["quality"]["accuracy"]["value"] for number in ("1.0", "2.0")
    ]
    assert accuracies == [1.0, 0.0]


def test_an_answer_can_be_contested_once_and_the_contest_be_answered_once(location: str) -> None:
    server = LocalMonitor(location)
    server.sample("r1", {"age": 1}, CAT)
    item = {"request_id": "r1", "contest": {"reason": "It was a dog\0."}}
    assert server.feed(item, item) == {"accepted": 1, "duplicates": 1, "errors": []}
    contest = server.call("contests")[0]
    assert (contest["state"], contest["prediction"]) == ("open", "cat")
    assert server.call("report")["contests"] == 1
    answer = {"state": "corrected", "response": "You are right.", "truth": "dog"}
    assert server.call("answer_contest", answer, id=contest["id"])["state"] == "corrected"
    for id, body, error in (
        (contest["id"], answer, Conflict),
        ("other", answer, ResourceNotFound),
        (contest["id"], {"state": "open"}, BadRequest),
    ):
        with pytest.raises(error):
            server.call("answer_contest", body, id=id)
    assert server.call("contests", state="open") == []
    assert server.call("contests", state="corrected")[0]["response"] == "You are right."
    assert server.call("report")["contests"] == 0
    assert server.version()["quality"]["accuracy"]["value"] == 0.0
    server.monitor.close()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"{", BadRequest),
        (b"", BadRequest),
        (b"7", BadRequest),
        (b"[" + b"{}," * 10_000 + b"{}]", PayloadTooLarge),
    ],
)
def test_a_body_that_is_no_feedback_is_refused(
    server: LocalMonitor, body: bytes, error: type[TsxError]
) -> None:
    with pytest.raises(error):
        server.call("feedback", body)


ITEMS = [
    {"request_id": f"r{n}", "truth": "cat" if n % 3 else "dog"} | groups
    for n in range(6)
    for groups in ({}, {"groups": {"sex": "fm"[n % 2]}})
] + [
    {"request_id": "r1", "contest": {"reason": "why"}},
    {"key": "k2", "truth": "cat"},
    {"request_id": "none", "truth": 1},
]


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_the_report_is_the_same_for_any_order_and_repetition_of_feedback(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(ITEMS))))
    again = data.draw(st.lists(st.sampled_from(range(len(ITEMS))), max_size=10))
    cut = data.draw(st.integers(0, len(ITEMS)))
    store = tmp_path_factory.mktemp("store") / "monitor.sqlite"
    server = LocalMonitor(str(store), {"groups": ["sex"], "key": "id", "minGroup": 1}, 1e12)
    for number in range(6):
        server.sample(f"r{number}", {"id": f"k{number}"}, CAT, at=1_700_000_000.0)
    for part in (order[:cut], [*order[cut:], *again]):
        server.feed(*(ITEMS[index] for index in part))
    version = server.version()
    quality = version["quality"]
    assert (quality["answers"], quality["accuracy"]["value"]) == (6, pytest.approx(4 / 6))
    groups = {
        group["group"]: (group["count"], group["error"]["count"], group["error"]["value"])
        for group in version["groups"][0]["groups"]
    }
    assert groups == {"f": (3, 3, pytest.approx(1 / 3)), "m": (3, 3, pytest.approx(1 / 3))}
    server.monitor.close()
