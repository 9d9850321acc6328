"""The `torchserve` command as TorchServe's users and platforms call it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
from pathlib import Path

import psutil
import pytest

from tests.support.models import make_model
from tests.support.servers import DEADLINE
from tests.support.torchserve import START, TorchServe
from tsx_cli.serve import background
from tsx_cli.serve.background import (
    MARK,
    AlreadyRunning,
    claim_pid_file,
    end_server,
    find_server,
    start_in_background,
    start_notifier,
)
from tsx_cli.serve.torchserve import READY, RUNNING, argument_parser, configure, main

ECHO = "def handle(data, context):\n    return [bytes(next(iter(row.values()))) for row in data or []]\n"
BROKEN = "import no_such_library\n\ndef handle(data, context):\n    return data\n"


@pytest.mark.nightly
def test_a_background_server_is_found_changed_restarted_and_stopped(
    torchserve: TorchServe,
) -> None:
    make_model(torchserve.directory / "store" / "echo.mar", ECHO)
    make_model(torchserve.directory / "store" / "echo2.mar", ECHO, name="echo", version="2.0")
    make_model(torchserve.directory / "store" / "broken.mar", BROKEN)
    (torchserve.directory / "store" / "junk.mar").write_text("junk")
    torchserve.configure(
        "load_models=all",
        "vmargs=-Xmx1g",
        'models={"echo": {"1.0": {"minWorkers": 1, "maxWorkers": 1, "batchSize": 4}}}',
    )

    code, lines = torchserve.start(*START)
    assert (code, lines[-1]) == (0, READY), torchserve.stderr
    server = torchserve.server
    assert (
        torchserve.request("POST", f"{torchserve.inference}/predictions/echo", b"hello") == b"hello"
    )
    description = torchserve.describe("echo")
    assert (
        description["batchSize"],
        description["minWorkers"],
        description["maxWorkers"],
        description["loadedAtStartup"],
    ) == (4, 1, 1, True)
    assert "without effect here" in torchserve.stderr
    assert "junk.mar is not served" in torchserve.stderr
    marked = [
        process
        for process in [server, *server.children(recursive=True)]
        if MARK in (process.as_dict(["cmdline"], ad_value=[])["cmdline"])
    ]
    # SageMaker's toolkit expects exactly one process and waits for its end.
    assert marked == [server]

    assert torchserve.call(*START)[:2] == (1, f"{RUNNING}\n")
    torchserve.request("PUT", f"{torchserve.management}/models/echo/2.0/set-default")
    torchserve.request(
        "PUT", f"{torchserve.management}/models/echo/1.0?min_worker=2&max_worker=3&synchronous=true"
    )
    torchserve.request("DELETE", f"{torchserve.management}/models/broken")
    assert torchserve.snapshots() == ["startup", "snapshot", "snapshot", "snapshot"]

    assert torchserve.call("--stop") == (0, "TorchServe has stopped.\n", "")
    assert not is_alive(server)
    assert not torchserve.pid_file.exists()
    assert torchserve.snapshots()[-1] == "shutdown"
    assert torchserve.call("--stop") == (0, "TorchServe is not currently running.\n", "")

    # The last snapshot overrides the configuration file.
    torchserve.configure("load_models=all")
    code, lines = torchserve.start(*START, "--models", "broken.mar")
    assert (code, lines[-1]) == (0, READY), torchserve.stderr
    assert "starting from the last snapshot, logs/config/" in torchserve.stderr
    assert "; --models is ignored (--ncs starts without the snapshot)" in torchserve.stderr
    models = json.loads(torchserve.request("GET", f"{torchserve.management}/models"))["models"]
    assert models == [{"modelName": "echo", "modelUrl": "echo2.mar"}]
    assert torchserve.describe("echo")["modelVersion"] == "2.0"
    description = torchserve.describe("echo/1.0")
    assert (
        description["minWorkers"],
        description["maxWorkers"],
        description["batchSize"],
        description["loadedAtStartup"],
    ) == (2, 3, 4, False)

    # After SIGKILL, the pid file still exists.
    torchserve.end()
    code, lines = torchserve.start(*START, "--ncs", "--models", "other=echo.mar")
    assert (code, lines[0], lines[-1]) == (0, "Removing orphan pid file.", READY), torchserve.stderr
    assert torchserve.describe("other")["modelUrl"] == "echo.mar"
    # The previous server wrote the last snapshot.
    assert torchserve.snapshots()[-1] == "startup"
    assert torchserve.call("--stop", "--foreground")[:2] == (0, "TorchServe has stopped.\n")


@pytest.mark.nightly
def test_a_temporarily_missing_archive_keeps_its_model(torchserve: TorchServe) -> None:
    """The snapshot keeps a model whose volume is mounted late or whose file is damaged."""
    store = torchserve.directory / "store"
    for name in ("echo", "late"):
        make_model(store / f"{name}.mar", ECHO, name=name)
    torchserve.configure("load_models=all")
    assert torchserve.start(*START)[0] == 0, torchserve.stderr
    torchserve.request(
        "PUT", f"{torchserve.management}/models/late?min_worker=0&max_worker=2&synchronous=true"
    )
    assert torchserve.call("--stop")[0] == 0
    snapshots_before = torchserve.snapshots()

    (store / "late.mar").rename(torchserve.directory / "late.mar")
    code, _, err = torchserve.call(*START)
    problem = "InvalidSnapshotException: Model archive file for model :late, version :1.0 not found in model store"
    assert (code, err.startswith(problem)) == (1, True), err
    assert "--ncs" in err
    assert torchserve.snapshots() == snapshots_before

    (store / "late.mar").write_text("junk")
    assert torchserve.start(*START)[0] == 0, torchserve.stderr
    assert "late.mar is not served" in torchserve.stderr
    with pytest.raises(urllib.error.HTTPError) as refused:
        torchserve.describe("late")
    assert refused.value.code == 404
    assert b"version 1.0 could not be loaded at the start" in refused.value.read()
    with pytest.raises(urllib.error.HTTPError) as unready:
        torchserve.request("GET", f"{torchserve.inference}/readyz")
    assert unready.value.code == 503
    assert {"late"} == {
        model["modelName"] for model in json.loads(unready.value.read())["notReady"]
    } - {"echo"}
    torchserve.request(
        "PUT", f"{torchserve.management}/models/echo?min_worker=0&max_worker=1&synchronous=true"
    )
    assert torchserve.call("--stop")[0] == 0

    (torchserve.directory / "late.mar").rename(store / "late.mar")
    assert torchserve.start(*START)[0] == 0, torchserve.stderr
    description = torchserve.describe("late")
    assert (description["minWorkers"], description["maxWorkers"]) == (0, 2)


def test_the_foreground_command_is_the_server_process(torchserve: TorchServe) -> None:
    torchserve.configure()
    command = [sys.executable, "-m", "tsx_cli.serve.torchserve", "--foreground", "--ncs"]
    with subprocess.Popen(
        command,
        cwd=torchserve.directory,
        env=torchserve.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert READY in (line.rstrip("\n") for line in process.stdout)
        assert torchserve.server.pid == process.pid
        assert set(json.loads((torchserve.directory / "key_file.json").read_text())) == {
            "management",
            "inference",
            "API",
        }
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 0
    assert not torchserve.pid_file.exists()
    assert not (torchserve.directory / "logs" / "config").exists()


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--log-config", "--log-config file not found: {place}/nowhere"),
        ("--ts-config", "--ts-config file not found: nowhere"),
        ("--workflow-store", "--workflow-store directory not found: nowhere"),
    ],
)
def test_a_missing_file_is_reported_in_torchserves_words(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    option: str,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["--start", "--model-store", ".", option, "nowhere"]) == 1
    assert capsys.readouterr().out == text.format(place=tmp_path) + "\n"


@pytest.mark.parametrize(
    ("action", "code", "text"),
    [
        (
            "--start",
            1,
            "Invalid temp directory: {place}/nowhere, please check TEMP environment variable.",
        ),
        ("--stop", 0, "TorchServe is not currently running."),
    ],
)
def test_a_missing_temporary_directory_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    action: str,
    code: int,
    text: str,
) -> None:
    monkeypatch.setenv("TEMP", str(tmp_path / "nowhere"))
    assert main([action, "--model-store", str(tmp_path)]) == code
    assert capsys.readouterr().out == text.format(place=tmp_path) + "\n"


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("is_running", [False, True], ids=["ended", "another program"])
def test_an_orphan_pid_file_is_removed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_running: bool,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    if not is_running:
        process.communicate()
    (tmp_path / ".model_server.pid").write_text(str(process.pid))
    assert main(["--stop"]) == 0
    assert (
        capsys.readouterr().out
        == "Removing orphan pid file.\nTorchServe is not currently running.\n"
    )
    assert not list(tmp_path.iterdir())
    process.communicate()


STARTING = """
import os, subprocess, sys, threading

descriptor, outcome = int(sys.argv[2]), sys.argv[3]
os.write(descriptor, b"1")  # It has its addresses.
subprocess.run([sys.executable, "-c", ""], check=True)
if outcome == "fails":
    sys.exit(3)
if outcome == "reads":
    threading.Event().wait(5)
    sys.exit(4)
open("answers", "w").close()
os.write(descriptor, b"1")
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("outcome", "timeout_s", "code", "answers"),
    [("answers", 60, 0, True), ("fails", 60, 3, False), ("reads", 0, 0, False)],
)
def test_a_start_returns_after_a_response_an_exit_or_a_timeout(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcome: str,
    timeout_s: float,
    code: int,
    answers: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(background, "START_TIMEOUT_S", timeout_s)
    monkeypatch.setattr(
        background, "command", lambda arguments: [sys.executable, "-c", STARTING, *arguments]
    )
    others = set(psutil.Process().children())
    assert start_in_background([outcome]) == code
    assert (tmp_path / "answers").exists() is answers
    for server in set(psutil.Process().children()) - others:
        server.kill()
        server.wait()  # The function does not wait for it, so it would stay a zombie.


def test_a_server_starts_even_if_its_starter_has_exited() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    tell = start_notifier(write_end)
    tell()
    tell()
    with pytest.raises(BrokenPipeError):
        os.write(write_end, b"1")
    os.close(write_end)


def test_a_failed_start_has_an_exit_code(torchserve: TorchServe) -> None:
    code, out, err = torchserve.call(*START)
    assert (code, out) == (1, "Missing mandatory parameter --model-store\n"), err
    assert torchserve.call(*START[1:], "--model-store", "none")[:2] == (
        1,
        "--model-store directory not found: none\n",
    )
    torchserve.configure("job_queue_size=many")
    code, _, err = torchserve.call(*START)
    assert code == 1
    assert "job_queue_size cannot be 'many' (from config.properties)" in err
    torchserve.configure()
    with socket.create_server(("127.0.0.1", int(torchserve.inference.rpartition(":")[2]))):
        code, _, err = torchserve.call(*START)
    assert code == 1
    assert "is in use (inference_address)" in err
    assert not torchserve.pid_file.exists()


def test_allowed_variables_are_applied_before_the_options(tmp_path: Path) -> None:
    file = tmp_path / "config.properties"
    file.write_text("enable_envvars_config=true\n")
    arguments = argument_parser().parse_args(
        shlex.split(
            f"--ts-config {file} --disable-token-auth --enable-model-api --model-store a --models "
            "x.mar"
        )
    )
    settings = configure(
        arguments, {"TS_DISABLE_TOKEN_AUTHORIZATION": "false", "TS_MODEL_STORE": "b"}, warn=print
    ).settings
    assert (settings.disable_token_authorization, settings.model_store, settings.load_models) == (
        False,
        Path("b"),
        ["x.mar"],
    )
    second = tmp_path / "other.properties"
    second.write_text("job_queue_size=3\n")
    assert (
        configure(arguments, {"TS_CONFIG_FILE": str(second)}, warn=print).settings.job_queue_size
        == 3
    )


def test_handler_errors_have_torchserves_status_by_default(tmp_path: Path) -> None:
    (tmp_path / "config.properties").write_text("handler_error_status=500\n")
    arguments = argument_parser().parse_args(
        ["--ncs", "--ts-config", str(tmp_path / "config.properties")]
    )
    assert configure(arguments, {}, warn=print).settings.handler_error_status == 500
    assert (
        configure(
            argument_parser().parse_args(["--ncs"]), {}, warn=print
        ).settings.handler_error_status
        == 503
    )


def test_a_snapshot_has_absolute_store_paths(
    tmp_path: Path,
) -> None:
    file = tmp_path / "config.properties"
    file.write_text("workflow_store=flows\nmodel_store=$$STORE$$\n")
    arguments = argument_parser().parse_args(["--ts-config", str(file)])
    assert configure(arguments, {"STORE": "s"}, warn=print).base == {
        "workflow_store": str(Path.cwd() / "flows"),
        "model_store": "$$STORE$$",
    }
    arguments = argument_parser().parse_args(["--ts-config", str(file), "--model-store", "given"])
    assert configure(arguments, {"STORE": "s"}, warn=print).base["model_store"] == str(
        Path.cwd() / "given"
    )


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_pid_file_that_is_a_link_or_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert find_server(tmp_path / "pipe") is None
    file = tmp_path / ".model_server.pid"
    file.symlink_to(tmp_path / "victim")
    assert find_server(file) is None
    previous_umask = os.umask(0)
    try:
        with claim_pid_file(file):
            assert not file.is_symlink()
            assert file.stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(previous_umask)
    assert not (tmp_path / "victim").exists()


@pytest.mark.usefixtures("processes")
def test_a_pid_file_of_another_process_stops_nothing(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    assert find_server(file) is None
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    for text in (str(bystander.pid), "", "x", "-1", "9" * 30):
        file.write_text(text)
        assert find_server(file) is None
    (tmp_path / "link").symlink_to(file)
    file.write_text(str(bystander.pid))
    assert find_server(tmp_path / "link") is None
    with claim_pid_file(file):
        assert file.read_text() == str(os.getpid())
    assert not file.exists()
    bystander.communicate()


@pytest.mark.usefixtures("processes")
def test_of_two_servers_only_one_owns_the_pid_file(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    process = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()", MARK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    # The process has its own command line once it has printed a line.
    process.stdout.readline()
    file.write_text(str(process.pid))
    with pytest.raises(AlreadyRunning), claim_pid_file(file):
        pytest.fail("two have it")
    assert file.read_text() == str(process.pid)
    process.communicate()


@pytest.mark.usefixtures("processes")
def test_a_zombie_server_counts_as_ended(tmp_path: Path) -> None:
    # The process becomes a zombie when it ends, since this test does not wait for it.
    orphan = subprocess.Popen([sys.executable, "-c", "input()", MARK], stdin=subprocess.PIPE)
    assert end_server(psutil.Process(orphan.pid))
    assert not is_alive(psutil.Process(orphan.pid))
    orphan.communicate()


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("flag", ["--version", "-v"])
def test_the_version_is_reported_as_by_torchserve(
    capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert main([flag]) == 0
    assert capsys.readouterr().out.startswith("TorchServe Version is 0.12.0 (tsx ")


def test_an_unknown_option_is_a_usage_error() -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--frobnicate"])
