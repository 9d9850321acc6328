"""The cause of a failed start, from the platform's reason and the lines of the log."""

from __future__ import annotations

import pytest

from tsx_cli.deploy.preflight.diagnosis import diagnose, rules

PING_FAILURE = (
    "The primary container for production variant AllTraffic did not pass the ping health check."
)


@pytest.mark.parametrize(
    ("reason", "line", "cause", "remedy"),
    [
        (PING_FAILURE, "ModuleNotFoundError: No module named 'transformers'", "The image has no module 'transformers'", "tsx archive -r"),
        (PING_FAILURE, "exec /usr/bin/python: exec format error", "built for a different CPU architecture", "--platform linux/amd64"),
        (PING_FAILURE, "torch.OutOfMemoryError: CUDA out of memory. Tried", "The GPU's memory is too small", "Lower batchSize"),
        (PING_FAILURE, "a worker of digits/1.0 ended with -9", "ran out of memory", "Choose a machine with more memory"),
        (PING_FAILURE, "RuntimeError: No CUDA GPUs are available", "torch finds none", "ml.g5.xlarge"),
        (PING_FAILURE, "User: x is not authorized to perform: s3:GetObject on resource: y", "The role may not do s3:GetObject", "infra/iam"),
        (PING_FAILURE, "Error: /opt/ml/model holds nothing; it must hold one .mar", "the directory holds nothing", "It must contain one .mar"),
        (PING_FAILURE, "Error: digits.mar does not load: RuntimeError: no weights", "Digits.mar does not load: RuntimeError", "--check"),
        (PING_FAILURE, "OSError: [Errno 28] No space left on device", "the disk of the container is full", "lambda.storage"),
        (PING_FAILURE, "/bin/sh: exec: \"serve\": executable file not found in $PATH", "does not start tsx", "ENTRYPOINT"),
        (PING_FAILURE, "Error: TSX_TARGET is 'sagmaker'; did you mean 'sagemaker'?", "A variable of the environment is wrong", "[deploy] env"),
        (PING_FAILURE, "tsx.server loading digits", "Nothing answered /ping", "sagemaker.startup_timeout"),
        ("Failed to pull image: CannotPullContainerError: manifest unknown", "", "The image cannot be pulled", "ecr:BatchGetImage"),
        ("Unable to write to /opt/ml/model: S3 403", "", "The model cannot be read from S3", "s3:GetObject"),
        ("There is not enough hardware resources on the instances", "", "no instance of the endpoint has room", "component.memory"),
        ("InsufficientInstanceCapacity", "", "no free capacity", "another region"),
        ("Could not assume role arn:aws:iam::1:role/x", "", "the platform may not assume the role", "sagemaker.amazonaws.com"),
        (PING_FAILURE, "ModuleNotFoundError: No module named 'tsx_runtime'", "does not start tsx", "ENTRYPOINT"),
        ("Back-off restarting failed container: CrashLoopBackOff", "", "starts and ends again and again", "tsx check --target container"),
        ("Runtime exited with error: signal: killed Runtime.OutOfMemory", "", "ran out of memory", "lambda.memory"),
        ("2026-11-21 Task timed out after 3.00 seconds", "", "it did not answer within its timeout", "lambda.timeout"),
        ("The image manifest, config or layer media type is not supported", "", "the image has a format that", "--provenance=false"),
    ],
)  # fmt: skip
def test_each_cause_is_reported_with_a_remedy(
    reason: str, line: str, cause: str, remedy: str
) -> None:
    diagnosis = str(diagnose(reason, ["INFO starting", line, "INFO ending"])[0])
    assert cause.lower() in diagnosis.lower()
    assert remedy in diagnosis


def test_the_log_takes_precedence_over_the_platforms_reason() -> None:
    error = "ModuleNotFoundError: No module named 'cv2'"
    # Only the error is reported, since the other line is its consequence.
    (diagnosis,) = diagnose(PING_FAILURE, ["Error: m.mar does not load: x", error])
    assert "'cv2'" in diagnosis.cause
    assert diagnosis.line == error


def test_three_different_causes_are_reported_at_most() -> None:
    lines = [
        "No module named 'a'",
        "ModuleNotFoundError: No module named 'a'",
        "ModuleNotFoundError: No module named 'a.b'",
    ]
    assert len(diagnose("", lines)) == 1
    lines = [
        "MemoryError",
        "exec format error",
        "Address already in use",
        "No space left on device",
    ]
    assert len(diagnose(PING_FAILURE, lines)) == 3


def test_an_unknown_cause_gets_no_diagnosis() -> None:
    assert diagnose("InternalServerError", ["serving digits/1.0 at http://0.0.0.0:8080"]) == []


def test_each_rule_has_a_cause_and_a_remedy() -> None:
    for group in ("lines", "said", "not loaded", "no ping"):
        for rule in rules(group):
            assert rule.cause
            assert rule.way
            assert not rule.way.endswith(".")
