"""Log files and the console of real servers: lines, worker output and rotation."""

from __future__ import annotations

import errno
import json
import logging
import re
import socket
import sys
from pathlib import Path

import httpx
import pytest

from tests.support import forked
from tests.support.models import make_model
from tests.support.servers import FREE_PORTS, serving
from tsx_runtime.errors import SettingError
from tsx_runtime.server.log4j_config import LogConfig, read_log_config
from tsx_runtime.server.logging_setup import (
    FILES,
    SERVER_LOG,
    ServerJsonFormatter,
    ShortFormatter,
    TextLogFormatter,
    set_up_logging,
)
from tsx_runtime.server.worker_output import worker_output
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.nonblocking_output import send_output_to

PRINTER = """
import logging, os, sys

logger = logging.getLogger(__name__)

def handle(data, context):
    if data is None:
        print("loading aloud")
        return None
    print("a line of the handler")
    print("an error of the handler", file=sys.stderr)
    os.write(1, b"as native code writes\\n")
    logger.info("logged by the handler")
    logger.warning("a warning\\nof two lines")
    if data[0]["body"] == b"bad":
        raise ValueError("no such image")
    return ["ok"] * len(data)
"""
FAILING = """
class Model:
    def initialize(self, context):
        self.load("weights")

    def load(self, name):
        raise ValueError(f"there are no {name}")

    def handle(self, data, context):
        return ["ok"]
"""
STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3}"


@pytest.fixture(scope="module")
def logs(processes: None, tmp_path_factory, until):
    """Return the log files of a server, its stderr, its token and the id of a failed request."""
    directory = tmp_path_factory.mktemp("logs")
    make_model(directory / "printer.mar", PRINTER)
    make_model(directory / "failing.mar", FAILING)
    settings = [
        "model_store=.",
        "log_location=logs",
        "metrics_location=numbers",
        "access_log=true",
        "metrics_mode=log",
        "generate_tokens=true",
    ]
    arguments = [
        "serve",
        "printer.mar",
        *FREE_PORTS,
        *(argument for setting in settings for argument in ("--set", setting)),
    ]
    with serving(arguments, directory, {"TSX_WORKER_PRELOAD": "false"}) as server_process:
        keys = json.loads((directory / "key_file.json").read_text())
        token = keys["inference"]["key"]
        assert (directory / "key_file.json").stat().st_mode & 0o777 == 0o600
        address, bearer = (
            server_process.address("predictions"),
            {"authorization": f"Bearer {token}"},
        )
        answer, failed_answer = (
            httpx.post(f"{address}/predictions/printer", content=body, headers=bearer, timeout=60)
            for body in (b"", b"bad")
        )
        assert (answer.text, failed_answer.status_code) == ("ok", 500)
        url = f"{server_process.address('models')}/models?url=failing.mar&initial_workers=1&synchronous=false"
        registration = httpx.post(
            url, headers={"authorization": f"Bearer {keys['management']['key']}"}, timeout=60
        )
        assert registration.status_code == 202, registration.text
        until(
            lambda: (directory / "logs" / SERVER_LOG).read_text().count("there are no weights") > 1
        )
        assert server_process.stop() == 0
        console = server_process.log
    assert not (directory / "key_file.json").exists()
    files = {
        path.name: path.read_text()
        for location in ("logs", "numbers")
        for path in (directory / location).iterdir()
    }
    return {
        "console": console,
        "token": token,
        "bad": failed_answer.headers["x-request-id"],
        **files,
    }


def test_torchserves_log_files_exist(logs):
    assert {SERVER_LOG, *FILES} == set(logs) - {"console", "token", "bad"}


def test_the_access_log_contains_the_requests(logs):
    line, failed_line, _ = logs["access_log.log"].splitlines()
    assert re.fullmatch(
        STAMP + r' - /127\.0\.0\.1:\d+ "POST /predictions/printer HTTP/1\.1" 200 \d+', line
    )
    assert '"POST /predictions/printer HTTP/1.1" 500 ' in failed_line


def test_worker_output_is_in_the_model_log_under_worker_names(logs):
    lines = {
        line.partition(" MODEL_LOG - ")[2]: line for line in logs["model_log.log"].splitlines()
    }
    assert {
        "loading aloud",
        "a line of the handler",
        "an error of the handler",
        "as native code writes",
    } <= set(lines)
    assert re.match(
        STAMP + r" \[INFO \] W-9000-printer_1\.0-stdout MODEL_LOG - loading aloud",
        lines["loading aloud"],
    )
    assert " W-9000-printer_1.0-stdout MODEL_LOG - " in lines["as native code writes"]


@pytest.mark.parametrize(
    ("level", "stream", "text"),
    [
        ("INFO ", "stdout", "a line of the handler"),
        ("WARN ", "stderr", "an error of the handler"),
        ("INFO ", "stdout", "logged by the handler"),
        ("WARN ", "stdout", "a warning"),
        ("WARN ", "stdout", "of two lines"),
    ],
)
def test_handler_lines_have_torchserves_format_and_their_level(logs, level, stream, text):
    """Check the format that scripts search for: the logger follows the stream directly."""
    line = next(line for line in logs["model_log.log"].splitlines() if line.endswith(f" - {text}"))
    assert re.fullmatch(
        STAMP + rf" \[{level}\] W-9000-printer_1\.0-{stream} MODEL_LOG - {text}", line
    )


def test_a_failed_request_is_logged_with_one_id_and_traceback(logs):
    failure_record = [
        line for line in logs["model_log.log"].splitlines() if "[ERROR] W-9000-printer" in line
    ]
    first, start, *frames, location, quoted, message = [
        line.partition("-stdout MODEL_LOG - ")[2] for line in failure_record
    ]
    assert first == f"the handler failed for the request {logs['bad']}"
    assert start == "Traceback (most recent call last):"
    assert all(frame.startswith('  File "') for frame in frames), "of tsx, no line is quoted"
    assert re.fullmatch(r'  File "/.*/handler\.py", line 16, in handle', location)
    assert (quoted, message) == (
        '    raise ValueError("no such image")',
        "ValueError: no such image",
    )
    assert logs["model_log.log"].count(logs["bad"]) == 1


def test_a_background_load_failure_is_in_both_logs(logs):
    lines = [
        line.partition("-stdout MODEL_LOG - ")[2]
        for line in logs["model_log.log"].splitlines()
        if "-failing_1.0-" in line
    ]
    first, *trace = lines[: lines.index("ValueError: there are no weights") + 1]
    assert first == "Handler handler.py could not load the model: ValueError: there are no weights"
    assert trace[0] == "Traceback (most recent call last):"
    assert [re.sub('".*/', '"', line) for line in trace if line.startswith("  File")] == [
        '  File "handler.py", line 4, in initialize',
        '  File "handler.py", line 7, in load',
    ]
    assert '    raise ValueError(f"there are no {name}")' in trace
    _, _, later_log = logs[SERVER_LOG].partition(first + "\n")
    assert later_log.splitlines()[: len(trace)] == trace
    assert logs[SERVER_LOG].count("line 7, in load") == 1, (
        "of the next attempts, which fail alike, the reason is enough"
    )


def test_the_console_has_handler_lines_but_no_metrics(logs):
    assert "a line of the handler" in logs["console"]  # `docker logs` shows the console
    assert "QueueTime" not in logs["console"]


def test_the_metrics_logs_contain_the_batch(logs):
    assert " - QueueTime.Milliseconds:" in logs["ts_metrics.log"]
    assert re.search(
        r" - Requests2XX\.Count:[12]\.0\|#Level:Host\|#hostname:", logs["ts_metrics.log"]
    )
    assert " - PredictionTime.ms:" in logs["model_metrics.log"]
    for line in [*logs["ts_metrics.log"].splitlines(), *logs["model_metrics.log"].splitlines()]:
        float(line.split("|")[0].split(":")[3])


def test_the_server_log_names_the_key_file_but_no_token(logs):
    line = next(line for line in logs[SERVER_LOG].splitlines() if "key_file.json" in line)
    assert re.match(STAMP + r" \[INFO \] \S+ tsx\.server - requests need tokens", line)
    assert "key_file.json" in logs["console"]
    for name, text in logs.items():
        assert name == "token" or logs["token"] not in text


LOG4J2 = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration>
  <Appenders>
    <Console name="STDOUT"><PatternLayout pattern="%d %m%n"/></Console>
    <RollingFile name="access_log" fileName="logs/access_log.log">
      <JsonLayout compact="true"/>
      <Policies><SizeBasedTriggeringPolicy size="2 MB"/><TimeBasedTriggeringPolicy/></Policies>
      <DefaultRolloverStrategy max="3"/>
    </RollingFile>
  </Appenders>
  <Loggers>
    <Logger name="ACCESS_LOG" level="off"/>
    <Logger name="org.pytorch.serve" level="debug"/>
    <Logger name="io.netty" level="error"/>
    <Root level="warn"/>
  </Loggers>
</Configuration>
"""


def test_a_log4j2_file_sets_levels_and_sizes(tmp_path):
    file = tmp_path / "log4j2.xml"
    file.write_text(LOG4J2)
    assert read_log_config(file) == LogConfig(
        {"ACCESS_LOG": logging.CRITICAL + 10, "tsx": logging.DEBUG, "": logging.WARNING},
        2 << 20,
        3,
        ["PatternLayout", "JsonLayout", "TimeBasedTriggeringPolicy"],
    )


@pytest.mark.usefixtures("logging_as_it_was")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.xml", "<a"),
        ("a.properties", "a=b"),
        ("a.yaml", "handlers: {x: {class: no.such}}"),
        ("a.json", "[]"),
    ],
)
def test_an_unusable_log_configuration_prevents_the_start(tmp_path, name, text):
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(SettingError, match="log_config"):
        set_up_logging(Settings(log_config=file))
    with pytest.raises(SettingError, match="log_config"):
        set_up_logging(Settings(log_config=tmp_path / "nothing.xml"))


@pytest.mark.usefixtures("logging_as_it_was")
def test_an_unwritable_log_directory_prevents_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="log_location"):
        set_up_logging(Settings(log_location=tmp_path / "file" / "logs"))


LOGS = """
import logging, sys
from pathlib import Path
from tsx_runtime.settings.schema import Settings
from tsx_runtime.server.logging_setup import set_up_logging
set_up_logging(Settings(**eval(sys.argv[1])))
logging.getLogger("tsx.server").warning("of the server %d", 1)
logging.getLogger("tsx.server").debug("a detail")
for number in range(300):
    logging.getLogger("ACCESS_LOG").info("%s", f"line {number} " + "x" * 100, extra={"whole": True})
if "metrics_location" in sys.argv[1]:
    logging.getLogger("TS_METRICS").info("%s", "of metrics", extra={"whole": True})
"""


def log_in_process(directory: Path, **settings: object) -> str:
    command = [sys.executable, "-c", LOGS, repr(settings)]
    result = forked.run(command, cwd=directory, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return str(result.stderr)


@pytest.mark.usefixtures("processes")
def test_large_files_are_rotated_and_the_oldest_removed(tmp_path):
    (tmp_path / "log4j2.xml").write_text(LOG4J2.replace("2 MB", "4 KB").replace('"off"', '"info"'))
    log_in_process(tmp_path, log_config="log4j2.xml", log_location="logs")
    files = sorted(path.name for path in (tmp_path / "logs").glob("access_log*"))
    assert files == ["access_log.log", "access_log.log.1", "access_log.log.2", "access_log.log.3"]
    assert all(path.stat().st_size <= 4096 for path in (tmp_path / "logs").glob("access_log*"))
    assert "a detail" in (tmp_path / "logs" / SERVER_LOG).read_text()
    assert re.search(
        STAMP + r" \[WARN \] MainThread tsx\.server - of the server 1\n",
        (tmp_path / "logs" / SERVER_LOG).read_text(),
    )


@pytest.mark.usefixtures("processes")
def test_metrics_have_files_while_other_logs_go_to_stderr(tmp_path):
    settings = {"metrics_location": "numbers", "metrics_mode": "log", "log_format": "text"}
    errors = log_in_process(tmp_path, **settings)
    assert "WARN    of the server 1" in errors
    assert "line 299" in errors
    assert "of metrics" not in errors
    files = {path.name: path.read_text() for path in tmp_path.rglob("*.log")}
    assert files == {"ts_metrics.log": "of metrics\n", "model_metrics.log": ""}


@pytest.mark.usefixtures("processes")
def test_an_ineffective_metrics_directory_is_reported(tmp_path):
    assert "metrics_location: has no effect" in log_in_process(tmp_path, metrics_location="numbers")


@pytest.mark.usefixtures("processes")
def test_lines_are_json_if_stderr_is_not_a_terminal(tmp_path):
    lines = [json.loads(line) for line in log_in_process(tmp_path).splitlines()]
    assert (
        lines[0].items()
        >= {"level": "warning", "logger": "tsx.server", "message": "of the server 1"}.items()
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", lines[0]["time"])
    assert (len(lines), lines[-1]["logger"]) == (301, "ACCESS_LOG")


@pytest.mark.usefixtures("processes")
def test_log_files_are_json_if_configured(tmp_path):
    log_in_process(tmp_path, log_location="json", log_format="json")
    assert json.loads((tmp_path / "json" / SERVER_LOG).read_text())["message"] == "of the server 1"


def test_lines_on_a_terminal_are_short():
    record = logging.LogRecord(
        "tsx.http", logging.WARNING, "", 0, "request %s: broken", ("id-1",), None
    )
    record.request_id, record.model = "id-1", "digits"
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d warning request id-1: broken \[model=digits\]",
        ShortFormatter(colour=False).format(record),
    )
    assert "\x1b[33mwarning \x1b[0m" in ShortFormatter(colour=True).format(record)


def test_a_json_line_has_request_model_and_traceback():
    try:
        raise ValueError("why")
    except ValueError:
        record = logging.LogRecord(
            "x", logging.ERROR, "", 0, 'Model "m" [Version 2.0]: it\nfailed', None, sys.exc_info()
        )
    record.request_id = "id-1"
    line = ServerJsonFormatter().format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert (fields["model"], fields["version"], fields["request_id"]) == ("m", "2.0", "id-1")
    assert fields["message"] == record.getMessage()
    assert fields["exception"].endswith("ValueError: why\n")


@pytest.mark.usefixtures("processes")
def test_a_python_logging_configuration_replaces_all_settings(tmp_path):
    (tmp_path / "log.yaml").write_text(
        "formatters: {plain: {format: '%(name)s|%(message)s'}}\n"
        "handlers: {out: {class: logging.FileHandler, filename: own.log, formatter: plain}}\n"
        "root: {level: WARNING, handlers: [out]}\n"
    )
    assert log_in_process(tmp_path, log_config="log.yaml", log_location="logs") == ""
    assert (tmp_path / "own.log").read_text() == "tsx.server|of the server 1\n"
    assert not (tmp_path / "logs").exists()


def test_a_preformatted_record_is_not_formatted_again():
    shape = TextLogFormatter("%(levelname)s %(message)s")
    record = logging.LogRecord("x", logging.INFO, "", 0, "%s", ("a line",), None)
    assert shape.format(record) == "INFO a line"
    record.whole = True
    assert shape.format(record) == "a line"


def lines_of_output(caplog, *pieces: bytes, is_json: bool = False) -> list[str]:
    """Send a worker's output and return the lines that are logged for it."""
    with (
        caplog.at_level(logging.INFO, "MODEL_LOG"),
        worker_output(is_json=is_json) as path,
        socket.socket(socket.AF_UNIX) as sock,
    ):
        sock.connect(path)
        for piece in pieces:
            sock.sendall(piece)
    return [line for record in caplog.records for line in record.getMessage().split("\n")]


def test_worker_output_in_arbitrary_pieces_is_logged_by_line(caplog):
    pieces = (b"W-1-m_1.0-std", b"out\nfir", b"st\nsecond\r\n\nwithout an e", b"nd \xff")
    lines = lines_of_output(caplog, *pieces)
    assert [line.partition(" MODEL_LOG - ")[2] for line in lines[:3]] == ["first", "second", ""]
    assert {line.split()[3] for line in lines} == {"W-1-m_1.0-stdout"}


def test_worker_output_of_native_code_becomes_json_lines(caplog):
    json_line = json.dumps({"time": "now", "message": "x" * (100 << 10)}).encode()
    printed_lines = [
        json_line,
        b'{"time": cut off',
        b'{"time": NaN}',
        b'{"time": "a"} and more',
        b"native " + json_line,
        b"\xff",
        b"y" * (2 << 20),
        b"[" * 9999,
    ]
    output = b"W-1-m_1.0-stdout\n" + b"\n".join(printed_lines)
    json_records = [json.loads(line) for line in lines_of_output(caplog, output, is_json=True)]
    assert json_records[0] == json.loads(json_line)
    assert [line["message"] for line in json_records[1:6]] == [
        line.decode(errors="replace") for line in printed_lines[1:6]
    ]
    assert "".join(line["message"] for line in json_records[6:-1]) == "y" * (2 << 20)
    assert {(line["model"], line["version"], line["stream"]) for line in json_records[1:]} == {
        ("m", "1.0", "stdout")
    }


def test_worker_output_is_read_once_descriptors_are_available(caplog, monkeypatch):
    real_accept, refused_sockets = socket.socket.accept, []

    def accept(listening):
        if len(refused_sockets) < 2:
            refused_sockets.append(listening)
            raise OSError(errno.EMFILE, "Too many open files")
        return real_accept(listening)

    monkeypatch.setattr(socket.socket, "accept", accept)
    (line,) = lines_of_output(caplog, b"W-1-m_1.0-stdout\nsaid meanwhile\n")
    assert len(refused_sockets) == 2
    assert line.endswith(" MODEL_LOG - said meanwhile")


def test_output_to_a_missing_socket_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        send_output_to(str(tmp_path / "nothing"), "x")


TALKER = """
import asyncio, logging, os

async def handle(data, context):
    if data is None:
        return None
    print("printed", data[0]["body"].decode())
    os.write(1, b"native code prints\\n")
    await asyncio.sleep(0)
    logging.getLogger("own").warning("logged %s", data[0]["body"].decode())
    if data[0]["body"] == b"bad":
        raise ValueError("no such image")
    return ["ok"] * len(data)
"""


@pytest.mark.usefixtures("processes")
def test_handler_output_on_a_non_terminal_is_json_with_request_ids(tmp_path):
    make_model(tmp_path / "talker.mar", TALKER, config="asyncCommunication: true\n")
    with serving(
        ["serve", "talker.mar", *FREE_PORTS, "--set", "access_log=true"], tmp_path, {}
    ) as server_process:
        url = f"{server_process.address('predictions')}/predictions/talker"
        answers = {body: httpx.post(url, content=body, timeout=60) for body in ("a", "b", "bad")}
        assert server_process.stop() == 0
        assert all(
            not line.startswith("{") for line in server_process.process.stdout.read().splitlines()
        )
        json_records = [json.loads(line) for line in server_process.log.splitlines()]
    ids = {body: answer.headers["x-request-id"] for body, answer in answers.items()}
    for body, request_id in ids.items():
        logged_record = next(line for line in json_records if line["message"] == f"logged {body}")
        assert logged_record["request_ids"] == [request_id]
        assert (
            logged_record["logger"],
            logged_record["level"],
            logged_record["model"],
            logged_record["version"],
        ) == (
            "own",
            "warning",
            "talker",
            "1.0",
        )
        printed_record = next(line for line in json_records if line["message"] == f"printed {body}")
        assert (
            printed_record["request_ids"],
            printed_record["logger"],
            printed_record["stream"],
        ) == (
            [request_id],
            "handler",
            "stdout",
        )
    native_records = [line for line in json_records if line["message"] == "native code prints"]
    origins = [
        (line["model"], line["version"], line["worker"], line["stream"]) for line in native_records
    ]
    assert origins == [("talker", "1.0", "9000", "stdout")] * 3
    failure_record = next(line for line in json_records if "the handler failed" in line["message"])
    assert failure_record["exception"].splitlines() == [
        "ValueError: no such image",
        '  handler.py:12 in handle: raise ValueError("no such image")',
    ]
    assert ids["bad"] in failure_record["message"]
    access_records = [line for line in json_records if line["logger"] == "ACCESS_LOG"]
    assert {line["request_id"]: line["status"] for line in access_records} == {
        ids["a"]: 200,
        ids["b"]: 200,
        ids["bad"]: 500,
    }
