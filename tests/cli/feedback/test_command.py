"""`tsx feedback`: the items of files, and what is said about those that are not stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Answering, Run
from tsx_cli.common.client import Server
from tsx_cli.common.status_line import StatusLine
from tsx_cli.feedback import command
from tsx_cli.feedback.command import send_feedback

RESULT = {"accepted": 1, "duplicates": 0}
REFUSED = {"index": 0, "code": "future", "message": "it is in the future"}


@pytest.fixture
def sent(answering: Answering, monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, object]]]:
    """Collect the batches that are sent; each is answered with RESULT."""
    batches: list[list[dict[str, object]]] = []

    def call_json(self: Server, method: str, path: str, value: object) -> dict[str, object]:
        assert (method, path) == ("POST", "/feedback/loan")
        assert isinstance(value, tuple)
        batches.append(list(value))
        return dict(RESULT, errors=[])

    monkeypatch.setattr(Server, "call_json", call_json)
    return batches


def send(name: str, content: str) -> dict[str, object]:
    Path(name).write_text(content)
    return send_feedback(Server("http://127.0.0.1:1"), "loan", name, StatusLine(quiet=True))


@pytest.mark.usefixtures("run")
def test_the_columns_of_a_table_become_the_members_of_items(
    sent: list[list[dict[str, object]]],
) -> None:
    send("a.csv", "key,truth,groups.sex,contest,replace,comment\n7,yes,f,why?,true,x\n8,,,no,,\n")
    item = {"key": "7", "truth": "yes", "groups": {"sex": "f"}, "replace": "true"}
    assert sent == [
        [
            item | {"contest": {"reason": "why?"}},
            {"key": "8", "contest": {"reason": "no"}, "groups": {}},
        ]
    ]


@pytest.mark.usefixtures("run")
def test_items_are_sent_in_batches(
    sent: list[list[dict[str, object]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "BATCH_ITEMS", 2)
    content = json.dumps([{"key": number, "truth": 1.5} for number in range(3)])
    result = send("a.json", content)
    assert [len(batch) for batch in sent] == [2, 1]
    assert result == {"model": "loan", "accepted": 2, "duplicates": 0, "errors": []}


def test_refused_items_have_their_lines(run: Run, answering: Answering) -> None:
    Path("a.jsonl").write_text('{"key": "a", "truth": 1}\n3\n{\n')
    invalid = {"code": "invalid", "message": "no object"}
    errors = [REFUSED, {"index": 1, **invalid}, {"index": 2, **invalid}]
    body = json.dumps(RESULT | {"errors": errors}).encode()
    result = run(f"feedback a.jsonl --model loan --url {answering(200, body)}")
    assert result.code == 1
    lines = result.err.splitlines()
    assert lines[:2] == ["a.jsonl:1: it is in the future", "a.jsonl:2: no object"]
    assert lines[2].startswith("a.jsonl:3: the row cannot be read: ")


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("empty.csv", "key,truth\n", "empty.csv has no items"),
        ("a.txt", "yes\n", "a.txt is neither a table nor JSON"),
        ("a.json", "[", "a.json is neither a table nor JSON"),
    ],
)
def test_files_without_items_are_refused(run: Run, name: str, content: str, error: str) -> None:
    Path(name).write_text(content)
    result = run(f"feedback {name} --model loan --url http://127.0.0.1:1")
    assert (result.code, error in result.err) == (1, True)


def test_a_missing_file_is_named(run: Run) -> None:
    result = run("feedback absent.csv --model loan --url http://127.0.0.1:1")
    assert (result.code, "absent.csv" in result.err) == (1, True)


def test_a_refused_batch_says_that_the_command_may_be_repeated(
    run: Run, answering: Answering
) -> None:
    Path("a.jsonl").write_text('{"key": "a", "truth": 1}\n')
    url = answering(
        503, b'{"code": 503, "type": "ServiceUnavailableException", "message": "Full."}'
    )
    result = run(f"feedback a.jsonl --model loan --url {url}")
    assert result.code == 1
    assert "0 items before a.jsonl:1 are stored" in result.err
    models = run(f"feedback a.jsonl --url {answering(200, b'{}')}")
    assert models.code == 1
