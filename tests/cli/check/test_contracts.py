"""`tsx check --target`: the image's entry point on this machine, called as the platform does it."""

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
def short_checks(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    monkeypatch.setattr(web, "LOAD_S", 0.3)
    monkeypatch.setattr(web, "LOAD_CLIENTS", 2)
    for module, limits in (
        (sagemaker, ("PING_TIMEOUT_S", "CONNECT_TIMEOUT_S")),
        (container, ("HEALTH_TIMEOUT_S",)),
        (aws_lambda, ("SHORT_TIMEOUT_S", "STOP_TIMEOUT_S", "MAX_INIT_S")),
    ):
        for limit in limits:
            # A busy machine needs more time than the platform allows.
            monkeypatch.setattr(module, limit, 30.0)
    monkeypatch.setattr("tempfile.tempdir", str(short_path))


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return make_model(tmp_path / "echo.mar", ECHO)


def run_check(capsys: pytest.CaptureFixture[str], *arguments: object, code: int) -> dict[str, Any]:
    """Run `tsx check`, and return its report."""
    assert main(["check", *map(str, arguments), *QUICK, "--json"]) == code, capsys.readouterr()
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def by_name(report: dict[str, Any]) -> dict[str, tuple[bool | None, str]]:
    """Return the result and the advice of each check."""
    return {check["what"]: (check["ok"], check["way"]) for check in report["checks"]}


def write_samples(directory: Path, **contents: bytes) -> list[object]:
    """Write files, and return the options that name them as samples."""
    arguments: list[object] = []
    for name, content in contents.items():
        path = directory / f"{name}.bin"
        path.write_bytes(content)
        arguments += ["--sample", path]
    return arguments


def test_each_requirement_of_sagemaker_is_checked(
    capsys: pytest.CaptureFixture[str], archive: Path, tmp_path: Path
) -> None:
    samples = write_samples(tmp_path, good=b"good", stream=b"stream")
    report = run_check(capsys, archive, "--contract", "sagemaker", *samples, code=0)
    assert report["holds"] is True
    assert {
        "ready",
        "2 samples, the slowest",
        "streams, part by part",
        "a body of 6291456 bytes",
        "/metrics at the same port",
        "ends on SIGTERM",
        "its exit code",
        "the request in flight at that time",
        "connections accepted, the slowest",
    } <= by_name(report).keys()
    assert all(check["measured"] for check in report["checks"] if check["limit"])


def test_the_lambda_check_uses_the_runtime_api(
    capsys: pytest.CaptureFixture[str], archive: Path, tmp_path: Path
) -> None:
    samples = write_samples(tmp_path, good=b"good", bad=b"bad", large=bytes(5 << 20))
    arguments = (archive, "--contract", "lambda", "--timeout", "30s", *samples)
    checks = by_name(run_check(capsys, *arguments, code=1))
    failed = {name for name, (ok, _) in checks.items() if ok is False}
    assert failed == {"sample bad.bin", "sample large.bin"}, checks
    assert "no such input" in checks["sample bad.bin"][1]
    assert "smaller than 6291456 bytes" in checks["sample large.bin"][1]
    assert {
        "start until it asks for invocations",
        "two messages of a queue",
        "files written beside the model",
        "an answer within a timeout of 30 s",
        "ends on SIGTERM",
        "1 sample, the slowest",
    } <= checks.keys()


def test_a_failed_check_is_reported_with_a_remedy(
    capsys: pytest.CaptureFixture[str], archive: Path, tmp_path: Path
) -> None:
    samples = write_samples(tmp_path, bad=b"bad", large=bytes(7 << 20))
    arguments = ["check", archive, "--target", "container", *samples, *QUICK]
    assert main([str(argument) for argument in arguments]) == 1
    output = capsys.readouterr()
    assert "FAILED: sample bad.bin" in output.out
    assert "FAILED: sample large.bin" in output.out
    assert "ok  the image's health check" in " ".join(output.out.split("   "))
    assert "2 requirements of container's contract" in output.err


def test_a_failed_start_is_reported_with_the_log_and_a_diagnosis(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    archive = make_model(tmp_path / "broken.mar", "import nothing_like_this\n")
    report = run_check(capsys, archive, "--contract", "sagemaker", code=1)
    (ready,) = report["checks"]
    assert (ready["what"], ready["ok"]) == ("ready", False)
    assert "no module 'nothing_like_this'" in ready["way"]
    assert any("ModuleNotFoundError" in line for line in report["log"])


def test_invalid_options_are_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], archive: Path, tmp_path: Path
) -> None:
    contract = "--contract sagemaker"
    for arguments, code, error in (
        (f"{archive} --contract sagmaker", 2, "'sagmaker' is not one of"),
        (f"{archive} {contract} --env A", 2, "--env takes NAME=VALUE, not 'A'"),
        (f"{archive} {contract} --timeout soon", 2, "--timeout: write a time such as 90s"),
        (f"{archive} {contract} --sample absent", 2, "there is no sample 'absent'"),
        (f"{tmp_path}/none.mar {contract}", 1, "none.mar"),
        (f"{tmp_path} {contract}", 1, "is a directory; only a file can be deployed"),
        (f"{archive} --target sagmaker", 2, "'sagmaker' is not one of"),
        (str(archive), 2, "Missing option '--target' / '--contract'"),
    ):
        assert main(["check", *arguments.split()]) == code
        assert error in " ".join(capsys.readouterr().err.replace("│", " ").split())


class ComplexOutput(torch.nn.Module):
    """A network whose results are complex numbers, which JSON cannot express."""

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        return torch.fft.fft(row)


def test_a_request_is_generated_for_a_model_without_samples(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, archive_path = tmp_path / "fails.pt", tmp_path / "fails.mar"
    torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 3), ComplexOutput())).save(model)
    assert main(["archive", str(model), "--no-check", "-o", str(archive_path)]) == 0
    capsys.readouterr()
    checks = by_name(run_check(capsys, archive_path, "--target", "container", code=1))
    ok, advice = checks["sample generated"]
    assert (ok, "it was answered" in advice) == (False, True)
    assert checks["requests"] == (None, "no sample was answered with 200")


def test_requirements_about_requests_are_unknown_without_a_sample(
    capsys: pytest.CaptureFixture[str], archive: Path
) -> None:
    checks = by_name(run_check(capsys, archive, "--target", "container", code=0))
    ok, advice = checks["requests"]
    assert (ok, "add --sample FILE" in advice) == (None, True)
    assert "the request in flight at that time" not in checks


class LambdaHost:
    """A Runtime API whose function gives the same response to every event."""

    timeout = 60.0

    def __init__(self, answer: object) -> None:
        self.answer = json.dumps(answer).encode()

    def invoke(self, event: object) -> HostedInvocation:
        return HostedInvocation(b"", answer=self.answer)


LAMBDA_LINES: dict[str, tuple[Callable[[Host, ModelSample, Report], None], object, object]] = {
    "other events": (aws_lambda._check_http_events, {"statusCode": 500}, {"statusCode": 200}),
    "a queue": (
        aws_lambda._check_messages,
        {"batchItemFailures": [{}, {}]},
        {"batchItemFailures": []},
    ),
}


@pytest.mark.parametrize("kind", LAMBDA_LINES)
def test_failed_lambda_events_fail_the_check(kind: str) -> None:
    check, failing, good = LAMBDA_LINES[kind]
    sample = ModelSample("one.json", "application/json", b"[1]")
    for answer, ok in ((failing, False), (good, True)):
        report = Report("lambda", "m.mar")
        check(cast(Host, LambdaHost(answer)), sample, report)
        assert [line.ok for line in report.checks] == [ok]


def test_the_sample_checks_return_the_first_sample_answered_with_200(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = [ModelSample("one.json", "application/json", b"[1]")]
    platform = web.HttpPlatform(1, "/ping", "/predictions/m", 1.0, 1.0, 1.0, 1.0, "")
    for status, good in ((200, samples[0]), (500, None)):
        report = Report("lambda", "m.mar")
        host = cast(Host, LambdaHost({"statusCode": status}))
        assert aws_lambda._check_samples(host, samples, report) is good
        response = PlatformResponse(status, {}, b"{}", 0.0, 0.0, 0.0)
        monkeypatch.setattr(web, "_send", lambda *_, response=response: response)
        assert web.check_samples(platform, samples, 1000, report) is good
        assert bool(report.failed) == (good is None)
