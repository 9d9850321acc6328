"""`tsx serve`, and the commands that talk to it, against one real server."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import DIGITS, Run
from tests.support.servers import FREE_PORTS, Running, serving, tsx
from tsx_cli.main import main

SEVEN = DIGITS / "images" / "7.png"
BROKEN = "import no_such_library\n\ndef handle(data, context):\n    return data\n"
ECHO = "def handle(data, context):\n    return [bytes(next(iter(row.values()))) for row in data or []]\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory with a model store: the example, two echoes, and a broken model."""
    directory = tmp_path_factory.mktemp("serve")
    store = directory / "store"
    digits = shlex.split(
        f"--model-file {DIGITS / 'model.py'} --handler {DIGITS / 'handler.py'} --sample "
        f"{DIGITS / 'images'}"
    )
    pack = [[DIGITS / "digits.pth", *digits, "-o", store]]
    for name, version, code in (
        ("echo", "1.0", ECHO),
        ("echo", "2.0", ECHO),
        ("broken", "1.0", BROKEN),
    ):
        handler = directory / f"{name}.py"
        handler.write_text(code)
        pack.append(
            [
                *shlex.split(f"--name {name} --version {version} --handler {handler} -o"),
                store / f"{name}{version}.mar",
                "--no-import",
            ]
        )
    for arguments in pack:
        assert main(["archive", *map(str, arguments)]) == 0
    (directory / "tsx.toml").write_text('model_store = "store"\n[models.echo]\nbatchSize = 3\n')
    return directory


@pytest.fixture(scope="module")
def server(processes: None, directory: Path, session_cache: Path) -> Iterator[Running]:
    command = ["serve", "digits.mar", "echo=echo1.0.mar", *FREE_PORTS]
    with serving(command, directory, {"TSX_CACHE_DIR": str(session_cache)}) as running:
        yield running
        assert running.stop() == 0


@pytest.fixture
def predict(run: Run, server: Running) -> Run:
    return lambda *arguments: run("predict", *arguments, "--url", server.address("predictions"))


@pytest.fixture
def models(run: Run, server: Running) -> Run:
    return lambda *arguments: run("models", *arguments, "--url", server.address("models"))


def describe(models: Run, *arguments: str) -> dict[str, Any]:
    description: dict[str, Any] = json.loads(models("describe", *arguments, "--json").out)[0]
    return description


def test_the_start_is_reported_in_plain_lines_without_a_terminal(server: Running) -> None:
    assert server.lines[0] == "serving digits 1.0: weights, cpu, 1 worker"
    assert server.lines[1] == "serving echo 1.0: code only, cpu, 1 worker"
    assert [line.partition(" at ")[0] for line in server.lines[2:5]] == [
        "predictions",
        "models",
        "metrics",
    ]


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_printed_curl_command_works(server: Running) -> None:
    line = server.lines[-1].removeprefix("try: ")
    assert tempfile.gettempdir() not in line
    answer = subprocess.run(
        ["bash", "-c", line], capture_output=True, check=True, timeout=30
    ).stdout
    assert next(iter(json.loads(answer))) == "zero"


@pytest.mark.usefixtures("processes")
def test_the_printed_sample_command_works(server: Running, run: Run, tmp_path: Path) -> None:
    command = shlex.split(server.lines[-2].removeprefix("try: "))
    assert command[:4] == ["tsx", "predict", "digits", "--sample"]
    assert next(iter(json.loads(run(*command[1:]).out))) == "zero"
    assert (
        next(iter(json.loads(run(*command[1:], "--version", "1.0", "--field", "data").out)))
        == "zero"
    )
    without_sample = run("predict", "echo", *command[3:])
    assert (without_sample.code, "Model echo has no sample" in without_sample.err) == (1, True)
    assert run("predict", "digits", SEVEN, *command[3:]).code == run("predict", "digits").code == 2


def test_predict_sends_an_image_and_prints_the_response(predict: Run) -> None:
    result = predict("digits", SEVEN)
    assert result.code == 0, result.err
    labels = json.loads(result.out)
    assert max(labels, key=labels.get) == "seven"


def test_predict_sends_form_version_and_content_type(predict: Run, tmp_path: Path) -> None:
    output = json.loads(
        predict(
            *shlex.split(
                f"digits {SEVEN} --field data --version 1.0 --content-type image/png --json"
            )
        ).out
    )
    assert output["status"] == 200
    assert next(iter(output["answer"])) == "seven"


def test_predict_writes_a_response_unchanged(predict: Run, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"\x00\xff\n")
    assert predict("echo", "in", "-o", "out").out == ""
    assert (tmp_path / "out").read_bytes() == b"\x00\xff\n"
    assert json.loads(predict("echo", "in", "--json").out)["base64"] == "AP8K"


@pytest.mark.usefixtures("processes")
def test_predict_reads_standard_input(server: Running, directory: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tsx_cli",
        "predict",
        "echo",
        "-",
        "--url",
        server.address("predictions"),
    ]
    assert (
        subprocess.run(
            command, input=b"\xffhello", capture_output=True, check=True, cwd=directory, timeout=60
        ).stdout
        == b"\xffhello"
    )


def test_the_error_of_an_unknown_model_names_the_list_command(predict: Run) -> None:
    result = predict("digit", SEVEN)
    assert (result.code, "did you mean 'digits'? `tsx models list`" in result.err) == (1, True)
    assert "`tsx models list`" in predict("digits", SEVEN, "--version", "7").err


def test_models_are_listed_and_described(models: Run) -> None:
    lines = [" ".join(line.split()) for line in models("list").out.splitlines()]
    assert lines[0] == "model version default workers device batch size waiting archive"
    assert lines[1] == "digits 1.0 yes 1 cpu 1 0 digits.mar"
    assert {model["modelName"] for model in json.loads(models("list", "--json").out)} >= {
        "digits",
        "echo",
    }
    description = models("describe", "digits").out
    assert "READY" in description
    assert describe(models, "digits", "--version", "1.0")["modelVersion"] == "1.0"
    for arguments in (
        ["describe", "digit"],
        ["scale", "digit", 2],
        ["unregister", "digit"],
        ["set-default", "digit", "--version", "1.0"],
    ):
        unknown = models(*arguments)
        assert (unknown.code, "did you mean 'digits'? `tsx models list`" in unknown.err) == (
            1,
            True,
        )


def test_the_error_of_a_wrong_address_names_the_right_option(run: Run, server: Running) -> None:
    for arguments in (["list"], ["describe", "digits"], ["register", "x.mar"]):
        url = server.address("predictions")
        result = run("models", *arguments, "--url", url)
        assert result.code == 1
        assert f"{url} answers, but it is not the management address" in result.err
        assert "--url, or with the setting management_address" in result.err
    assert (
        "is not the inference address"
        in run("predict", "digits", SEVEN, "--url", server.address("models")).err
    )


def test_settings_of_one_model_do_not_affect_others(models: Run) -> None:
    assert describe(models, "echo")["batchSize"] == 3
    assert describe(models, "digits")["batchSize"] == 1


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("command", ["models describe", "predict"])
def test_completion_lists_the_models_of_the_server(
    server: Running, directory: Path, command: str
) -> None:
    line = f"tsx {command} di"
    environment = {
        "_TSX_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }
    for role, setting in (
        ("models", "TSX_MANAGEMENT_ADDRESS"),
        ("predictions", "TSX_INFERENCE_ADDRESS"),
    ):
        environment[setting] = server.address(role)
    completed = tsx([], directory, environment)
    assert (completed.stdout.split(), completed.stderr) == (["digits"], "")


@pytest.mark.usefixtures("processes")
def test_completion_without_a_server_offers_nothing(directory: Path) -> None:
    command = "tsx models describe di"
    environment = {
        "_TSX_COMPLETE": "complete_bash",
        "COMP_WORDS": command,
        "COMP_CWORD": "3",
        "TSX_MANAGEMENT_ADDRESS": "http://127.0.0.1:1",
    }
    completed = tsx([], directory, environment)
    assert (completed.stdout.strip(), completed.stderr) == ("", "")


def test_a_version_is_registered_made_default_and_removed(models: Run) -> None:
    assert models("register", "echo2.0.mar", "--workers", 1, "--batch-size", 5).code == 0
    assert (
        models("set-default", "echo", "--version", "2.0").out
        == 'Default version successfully updated for model "echo" to "2.0"\n'
    )
    rows = [line.split() for line in models("list").out.splitlines() if line.startswith("echo")]
    assert [(row[1], "yes" in row) for row in rows] == [("1.0", False), ("2.0", True)]
    assert describe(models, "echo", "--version", "2.0")["batchSize"] == 5
    refusal = models("unregister", "echo", "--version", "2.0")
    assert refusal.code == 1
    assert "Cannot remove default version for model echo" in refusal.err
    assert models("set-default", "echo", "1.0").code == 0
    for arguments in ([], ["1.0", "--version", "2.0"]):
        refusal = models("set-default", "echo", *arguments)
        assert (refusal.code, "`tsx models set-default echo 2.0`" in refusal.err) == (2, True)
    assert (
        models("unregister", "echo", "--version", "2.0").out
        == 'Model "echo" unregistered: version 2.0\n'
    )


def test_a_version_without_workers_cannot_be_the_default(models: Run) -> None:
    assert models("register", "echo2.0.mar", "--workers", 0).code == 0
    refusal = models("set-default", "echo", "2.0")
    assert refusal.code == 1
    assert "`tsx models scale echo 1 --version 2.0`" in refusal.err
    assert models("unregister", "echo", "--version", "2.0").code == 0


def test_a_local_archive_takes_precedence_over_one_in_the_store(
    models: Run, predict: Run, directory: Path, tmp_path: Path
) -> None:
    assert (
        models(
            "register", directory / "store" / "echo2.0.mar", "--name", "here", "--workers", 1
        ).code
        == 0
    )
    (tmp_path / "other.py").write_text(
        "def handle(data, context):\n    return [b'other'] * len(data or ())\n"
    )
    assert main(["archive", "--name", "here", "--handler", "other.py", "-o", "echo2.0.mar"]) == 0
    for arguments in (["register", "echo2.0.mar"], ["replace", "./echo2.0.mar", "--name", "here"]):
        refusal = models(*arguments)
        assert (
            refusal.code,
            f"does not take {tmp_path / 'echo2.0.mar'}: an archive must be in" in refusal.err,
        ) == (1, True)
    (tmp_path / "input.bin").write_text("echoed")
    assert predict("here", "input.bin").out == "echoed"
    assert models("unregister", "here").code == 0
    assert (
        models("register", "other.py").err
        == "Error: 'other.py' is not an archive; `tsx archive other.py` makes one\n"
    )


def test_a_file_given_at_the_start_can_be_replaced_without_a_model_store(
    processes: None, run: Run, tmp_path: Path, session_cache: Path
) -> None:
    def pack(answer: str) -> None:
        (tmp_path / "code.py").write_text(
            f"def handle(data, context):\n    return ['{answer}'] * len(data or ())\n"
        )
        assert (
            main(["archive", "--name", "hello", "--handler", "code.py", "--no-import", "--force"])
            == 0
        )

    pack("old")
    with serving(
        ["serve", "hello.mar", *FREE_PORTS], tmp_path, {"TSX_CACHE_DIR": str(session_cache)}
    ) as running:
        pack("new")
        result = run("models", "replace", "./hello.mar", "--url", running.address("models"))
        assert result.code == 0, result.err
        assert (
            run("predict", "hello", "hello.mar", "--url", running.address("predictions")).out
            == "new"
        )
        assert running.stop() == 0


def test_workers_are_scaled(models: Run) -> None:
    assert models("scale", "echo", 2).out == "Workers scaled to 2 for model: echo\n"
    assert len(describe(models, "echo")["workers"]) == 2
    assert models("scale", "echo", "--min", 1, "--max", 1).code == 0
    assert models("scale", "echo", "--workers", 1).out == "Workers scaled to 1 for model: echo\n"
    assert models("scale", "echo", 2, "--workers", 1).code == 2
    assert models("scale", "echo").code == 2
    assert models("scale", "echo", 2, "--min", 1).code == 2
    assert (
        "max_worker cannot be less than min_worker"
        in models("scale", "echo", "--min", 2, "--max", 1).err
    )


def test_limits_can_be_changed_while_a_model_is_served(models: Run) -> None:
    result = models("set", "echo", "batch_size=8", "overload_status=429")
    assert (result.code, result.out) == (
        0,
        'Changed for model "echo" Version: 1.0: batch_size = 8, overload_status = 429\n',
    )
    description = describe(models, "echo")
    assert (
        description["batchSize"],
        description["overloadStatus"],
        len(description["workers"]),
    ) == (
        8,
        429,
        1,
    )
    assert "Parameter batch_size is '-1'" in models("set", "echo", "batch_size=-1").err
    unknown = models("set", "echo", "batchsize=8")
    assert (unknown.code, unknown.err.splitlines()[0].rpartition("'batchsize' ")[2]) == (
        2,
        "cannot be changed while a model is served; did you mean 'batch_size'?",
    )
    assert models("set", "echo", "batch_size").code == 2
    assert "did you mean `tsx models scale NAME 2`?" in models("set", "echo", "workers=2").err
    assert models("set", "echo", "batchSize=3", "overload_status=503").code == 0


def test_a_loading_error_is_reported_with_its_line_or_traceback(models: Run) -> None:
    result = models("register", "broken1.0.mar", "--workers", 1)
    assert result.code == 1
    assert result.err.startswith("Error: ")
    assert "No module named 'no_such_library'" in result.err
    assert result.err.rstrip().endswith(
        "line 1: import no_such_library\n--debug shows the whole traceback."
    )
    debugged = models("register", "broken1.0.mar", "--workers", 1, "--debug")
    assert "ModuleNotFoundError: No module named 'no_such_library'\n" in debugged.err
    assert "Model not found: broken" in models("describe", "broken").err


@pytest.mark.parametrize(
    ("archive", "reason"),
    [("none.mar", "none.mar"), ("../x.mar", "Relative path is not allowed in url: ../x.mar")],
)
def test_an_archive_outside_the_store_is_refused(models: Run, archive: str, reason: str) -> None:
    result = models("register", archive)
    assert result.code == 1
    assert reason in result.err
    assert "models list" not in result.err


def test_requests_are_not_logged(server: Running, predict: Run) -> None:
    log_before = server.log
    assert predict("digits", SEVEN).code == 0
    assert urllib.request.urlopen(server.address("metrics") + "/metrics").status == 200
    assert server.log == log_before


def test_explain_reports_the_parts_of_a_requests_time(run: Run, server: Running) -> None:
    inference, management = server.address("predictions"), server.address("models")
    request = urllib.request.Request(
        f"{inference}/predictions/digits", SEVEN.read_bytes(), {"Content-Type": "image/png"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        request_id = answer.headers["x-request-id"]
    explanation = run("explain", request_id, "--url", management)
    assert explanation.code == 0
    assert explanation.out.startswith(f"{request_id} was answered with 200 after ")
    assert {line.split()[0] for line in explanation.out.splitlines()[3:]} == {
        "queue",
        "batch",
        "preprocess",
        "inference",
        "postprocess",
        "other",
    }
    parsed = json.loads(run("explain", request_id, "--json", "--url", management).out)
    assert (parsed["modelName"], parsed["batchSize"]) == ("digits", 1)
    # An id that is copied from a response header may have surrounding white space.
    assert run("explain", f" {request_id}\r\n", "--url", management).out == explanation.out
    assert (
        "give the id of a request: it is"
        in run("explain", f"{request_id}\nand more", "--url", management).err
    )
    unknown = run("explain", "no-such-id", "--url", management)
    assert unknown.code == 1
    assert "x-request-id" in unknown.err
    empty_result = run("explain", "", "--url", management)
    assert (empty_result.code, "give the id of a request: it is" in empty_result.err) == (2, True)
    slow = run("slowest", "digits", "--count", "3", "--url", management)
    assert slow.code == 0
    assert slow.out.splitlines()[0].split() == [
        "took",
        "where",
        "answer",
        "model",
        "version",
        "batch",
        "arrived",
        "request",
    ]
    assert "digits" in slow.out.splitlines()[1]
    assert json.loads(run("slowest", "--json", "--url", management).out)["requests"]
