"""What went wrong at a start, told from what the platform said and the lines of the log."""

from __future__ import annotations

import pytest

from tsx_cli.deploy.preflight.diagnosis import diagnose, rules

PING = "The primary container for production variant AllTraffic did not pass the ping health check."


@pytest.mark.parametrize(
    ("reason", "line", "cause", "way"),
    [
        (PING, "ModuleNotFoundError: No module named 'transformers'", "The image has no module 'transformers'", "tsx archive -r"),
        (PING, "exec /usr/bin/python: exec format error", "built for a different CPU architecture", "--platform linux/amd64"),
        (PING, "torch.OutOfMemoryError: CUDA out of memory. Tried", "The GPU's memory is too small", "Lower batchSize"),
        (PING, "a worker of digits/1.0 ended with -9", "ran out of memory", "Choose a machine with more memory"),
        (PING, "RuntimeError: No CUDA GPUs are available", "torch finds none", "ml.g5.xlarge"),
        (PING, "User: x is not authorized to perform: s3:GetObject on resource: y", "The role may not do s3:GetObject", "infra/iam"),
        (PING, "Error: /opt/ml/model holds nothing; it must hold one .mar", "the directory holds nothing", "It must contain one .mar"),
        (PING, "Error: digits.mar does not load: RuntimeError: no weights", "Digits.mar does not load: RuntimeError", "--check"),
        (PING, "OSError: [Errno 28] No space left on device", "the disk of the container is full", "lambda.storage"),
        (PING, "/bin/sh: exec: \"serve\": executable file not found in $PATH", "does not start tsx", "ENTRYPOINT"),
        (PING, "Error: TSX_TARGET is 'sagmaker'; did you mean 'sagemaker'?", "A variable of the environment is wrong", "[deploy] env"),
        (PING, "tsx.server loading digits", "Nothing answered /ping", "sagemaker.startup_timeout"),
        ("Failed to pull image: CannotPullContainerError: manifest unknown", "", "The image cannot be pulled", "ecr:BatchGetImage"),
        ("Unable to write to /opt/ml/model: S3 403", "", "The model cannot be read from S3", "s3:GetObject"),
        ("There is not enough hardware resources on the instances", "", "no instance of the endpoint has room", "component.memory"),
        ("InsufficientInstanceCapacity", "", "no free capacity", "another region"),
        ("Could not assume role arn:aws:iam::1:role/x", "", "the platform may not assume the role", "sagemaker.amazonaws.com"),
        (PING, "ModuleNotFoundError: No module named 'tsx_runtime'", "does not start tsx", "ENTRYPOINT"),
        ("Back-off restarting failed container: CrashLoopBackOff", "", "starts and ends again and again", "tsx check --target container"),
        ("Runtime exited with error: signal: killed Runtime.OutOfMemory", "", "ran out of memory", "lambda.memory"),
        ("2026-11-21 Task timed out after 3.00 seconds", "", "it did not answer within its timeout", "lambda.timeout"),
        ("The image manifest, config or layer media type is not supported", "", "the image has a format that", "--provenance=false"),
    ],
)  # fmt: skip
def test_each_cause_is_reported_with_what_to_do(
    reason: str, line: str, cause: str, way: str
) -> None:
    found = diagnose(reason, ["INFO starting", line, "INFO ending"])
    assert cause.lower() in str(found[0]).lower()
    assert way in str(found[0])


def test_what_the_log_shows_goes_before_what_the_platform_says() -> None:
    found = diagnose(
        PING, ["Error: m.mar does not load: x", "ModuleNotFoundError: No module named 'cv2'"]
    )
    assert len(found) == 1  # the rest follows from it
    assert "'cv2'" in found[0].cause
    assert found[0].line == "ModuleNotFoundError: No module named 'cv2'"


def test_of_many_causes_the_first_three_are_reported_and_none_twice() -> None:
    lines = [
        "No module named 'a'",
        "ModuleNotFoundError: No module named 'a'",
        "ModuleNotFoundError: No module named 'a.b'",
    ]
    assert len(diagnose("", lines)) == 1
    assert (
        len(
            diagnose(
                PING,
                [
                    "MemoryError",
                    "exec format error",
                    "Address already in use",
                    "No space left on device",
                ],
            )
        )
        == 3
    )


def test_what_nobody_knows_is_not_guessed() -> None:
    assert (
        diagnose(
            "InternalServerError", ["all is well", "serving digits/1.0 at http://0.0.0.0:8080"]
        )
        == []
    )


def test_each_rule_tells_what_to_do() -> None:
    assert all(
        rule.cause and rule.way and not rule.way.endswith(".")
        for group in ("lines", "said", "not loaded", "no ping")
        for rule in rules(group)
    )
