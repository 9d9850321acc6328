"""`tsx check --target`: the image's entry on this machine, driven as a platform drives it, and what
is told where it does not hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.support.models import make_model
from tsx_cli.archive.check import ModelSample
from tsx_cli.check import aws_lambda, container, sagemaker, web
from tsx_cli.check.entry import PlatformResponse
from tsx_cli.check.lambda_host import Host, HostedInvocation
from tsx_cli.check.report import Report
from tsx_cli.main import main

pytestmark = pytest.mark.usefixtures("processes")

QUICK = ["--env", "TSX_WORKER_PRELOAD=false"]
ECHO = """
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    if bytes(data[0]["body"]) == b"bad":
        raise ValueError("no such input")
    if bytes(data[0]["body"]) == b"stream":
        send_intermediate_predict_response(["part "], {0: context.get_request_id(0)}, "", 200, context)
    return [{"got": len(row["body"])} for row in data]
"""


@pytest.fixture(autouse=True)
def a_short_load(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    monkeypatch.setattr(web, "LOAD", 0.3)
    monkeypatch.setattr(web, "CLIENTS", 2)
    for module, limits in (
        (sagemaker, ("PING", "CONNECT")),
        (container, ("HEALTH",)),
        (aws_lambda, ("SHORT", "STOP", "INIT")),
    ):
        for limit in limits:
            monkeypatch.setattr(module, limit, 30.0)  # a tester's machine has other things to do
    monkeypatch.setattr("tempfile.tempdir", str(short_path))


def checked(capsys: pytest.CaptureFixture[str], *words: object, code: int) -> dict[str, Any]:
    assert main(["check", *map(str, words), *QUICK, "--json"]) == code, capsys.readouterr()
    reported: dict[str, Any] = json.loads(capsys.readouterr().out)
    return reported


def by_name(reported: dict[str, Any]) -> dict[str, tuple[bool | None, str]]:
    return {each["what"]: (each["ok"], each["way"]) for each in reported["checks"]}


def test_sagemakers_host_is_played_and_each_promise_is_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    archive = make_model(tmp_path / "echo.mar", ECHO)
    for name, body in (("good.bin", b"good"), ("stream.bin", b"stream")):
        (tmp_path / name).write_bytes(body)
    reported = checked(
        capsys,
        archive,
        "--contract",
        "sagemaker",
        "--sample",
        tmp_path / "good.bin",
        "--sample",
        tmp_path / "stream.bin",
        code=0,
    )
    found = by_name(reported)
    assert reported["holds"] is True
    assert {
        "ready",
        "2 samples, the slowest",
        "streams, part by part",
        "a body of 6291456 bytes",
        "/metrics at the same port",
    } <= found.keys()
    assert {
        "ends on SIGTERM",
        "its exit code",
        "the request in flight at that time",
        "connections accepted, the slowest",
    } <= found.keys()
    assert all(each["measured"] for each in reported["checks"] if each["limit"])


def test_lambda_is_played_with_its_runtime_api(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    archive = make_model(tmp_path / "echo.mar", ECHO)
    for name, body in (("good.bin", b"good"), ("bad.bin", b"bad"), ("large.bin", bytes(5 << 20))):
        (tmp_path / name).write_bytes(body)
    samples = [
        word for name in ("good", "bad", "large") for word in ("--sample", tmp_path / f"{name}.bin")
    ]
    reported = checked(
        capsys, archive, "--contract", "lambda", "--timeout", "30s", *samples, code=1
    )
    found = by_name(reported)
    failed = {what for what, (ok, _) in found.items() if ok is False}
    assert failed == {"sample bad.bin", "sample large.bin"}, reported
    assert "no such input" in found["sample bad.bin"][1]
    assert "smaller than 6291456 bytes" in found["sample large.bin"][1]
    assert {
        "start until it asks for invocations",
        "two messages of a queue",
        "files written beside the model",
    } <= found.keys()
    assert {
        "an answer within a timeout of 30 s",
        "ends on SIGTERM",
        "1 sample, the slowest",
    } <= found.keys()


@pytest.mark.usefixtures("processes")
def test_what_does_not_hold_is_reported_with_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    archive, samples = make_model(tmp_path / "echo.mar", ECHO), tmp_path / "samples"
    samples.mkdir()
    (samples / "bad.bin").write_text("bad")
    (samples / "large.bin").write_bytes(bytes(7 << 20))
    assert (
        main(["check", str(archive), "--target", "container", "--sample", str(samples), *QUICK])
        == 1
    )
    said = capsys.readouterr()
    assert "FAILED: sample bad.bin" in said.out
    assert "FAILED: sample large.bin" in said.out
    assert "ok  the image's health check" in " ".join(said.out.split("   "))
    assert "2 requirements of container's contract" in said.err


def test_a_start_that_fails_shows_the_log_and_a_diagnosis(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    archive = make_model(tmp_path / "broken.mar", "import nothing_like_this\n")
    reported = checked(capsys, archive, "--contract", "sagemaker", code=1)
    (ready,) = reported["checks"]
    assert (ready["what"], ready["ok"]) == ("ready", False)
    assert "no module 'nothing_like_this'" in ready["way"]
    assert any("ModuleNotFoundError" in line for line in reported["log"])


def test_what_makes_no_sense_is_reported_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    archive = make_model(tmp_path / "echo.mar", ECHO)
    cases: list[tuple[list[object], int, str]] = [
        ([archive, "--contract", "sagmaker"], 2, "'sagmaker' is not one of"),
        ([archive, "--contract", "sagemaker", "--env", "A"], 2, "--env takes NAME=VALUE, not 'A'"),
        (
            [archive, "--contract", "sagemaker", "--timeout", "soon"],
            2,
            "--timeout: write a time such as 90s",
        ),
        (
            [archive, "--contract", "sagemaker", "--sample", "absent"],
            2,
            "there is no sample 'absent'",
        ),
        ([tmp_path / "none.mar", "--contract", "sagemaker"], 1, "none.mar"),
        ([tmp_path, "--contract", "sagemaker"], 1, "is a directory; only a file can be deployed"),
        ([archive, "--target", "sagmaker"], 2, "'sagmaker' is not one of"),
        ([archive], 2, "Missing option '--target' / '--contract'"),
    ]
    for words, code, said in cases:
        assert main(["check", *map(str, words)]) == code
        assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


class Fails(torch.nn.Module):
    def forward(self, row: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(row)  # complex numbers, which JSON has not


def test_a_request_is_made_up_for_a_model_without_samples(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 3), Fails())).save(
        tmp_path / "fails.pt"
    )
    assert (
        main(
            ["archive", str(tmp_path / "fails.pt"), "--no-check", "-o", str(tmp_path / "fails.mar")]
        )
        == 0
    )
    capsys.readouterr()
    found = by_name(checked(capsys, tmp_path / "fails.mar", "--target", "container", code=1))
    ok, way = found["sample generated"]
    assert (ok, "it was answered" in way) == (False, True)
    assert found["requests"] == (None, "no sample was answered with 200")


def test_without_a_known_request_nothing_that_needs_one_is_said_to_hold(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = by_name(
        checked(capsys, make_model(tmp_path / "echo.mar", ECHO), "--target", "container", code=0)
    )
    assert found["requests"] == (
        None,
        "no sample; add --sample FILE, or pack one with tsx archive --sample FILE",
    )
    assert not {"the request in flight at that time"} & found.keys()


class LambdaHost:
    """A Runtime API whose function answers every event with this document."""

    timeout = 60.0

    def __init__(self, answer: object) -> None:
        self.answer = json.dumps(answer).encode()

    def invoke(self, event: object) -> HostedInvocation:
        return HostedInvocation(b"", answer=self.answer)


LAMBDA_LINES: dict[str, tuple[Callable[[Host, ModelSample, Report], None], object, object]] = {
    "other events": (aws_lambda._comes_by_each_way, {"statusCode": 500}, {"statusCode": 200}),
    "a queue": (
        aws_lambda._takes_messages,
        {"batchItemFailures": [{}, {}]},
        {"batchItemFailures": []},
    ),
}


@pytest.mark.parametrize("kind", LAMBDA_LINES)
def test_events_of_lambda_that_all_fail_are_not_ok(kind: str) -> None:
    line, failing, good = LAMBDA_LINES[kind]
    for answer, ok in ((failing, False), (good, True)):
        report = Report("lambda", "m.mar")
        line(
            cast(Host, LambdaHost(answer)),
            ModelSample("one.json", "application/json", b"[1]"),
            report,
        )
        assert [check.ok for check in report.checks] == [ok]


def test_lambda_and_web_name_the_first_sample_that_was_answered_with_200(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = [ModelSample("one.json", "application/json", b"[1]")]
    platform = web.Web(1, "/ping", "/predictions/m", 1.0, 1.0, 1.0, 1.0, "")
    for status, good in ((200, samples[0]), (500, None)):
        report = Report("lambda", "m.mar")
        assert (
            aws_lambda._answers(cast(Host, LambdaHost({"statusCode": status})), samples, report)
            is good
        )
        monkeypatch.setattr(
            web,
            "_send",
            lambda *words, status=status: PlatformResponse(status, {}, b"{}", 0.0, 0.0, 0.0),
        )
        assert web.answers_samples(platform, samples, 1000, report) is good
        assert (not report.failed) is (good is not None)
