"""`tsx serve --reload`: the last save is what is served, and no request fails meanwhile."""

from __future__ import annotations

import logging
import queue
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.cli.conftest import Run
from tests.kit.load import load
from tests.runtime.conftest import DEADLINE, RunningServer, make_settings, running_server
from tests.support.models import make_model
from tests.support.servers import FREE_PORTS, serving
from tsx_cli.archive.model_file import HandlerFiles
from tsx_cli.archive.source import classify
from tsx_cli.serve.arguments import LocatedSource, find_model
from tsx_cli.serve.reload import ReloadedModel, reloading, survey

pytestmark = pytest.mark.usefixtures("processes")
BROKEN = "def handle(data, context):\n    return [\n"
FAILS = "raise RuntimeError('a fault at import')\n"


def handler(text: str) -> str:
    return f"def handle(data, context):\n    return [{text!r}] * len(data or [])\n"


class Edited(NamedTuple):
    """A model on disk, as a user edits it."""

    path: Path
    parts: HandlerFiles
    save: Callable[[str], None]  # gets the text of the handler
    code: str  # the name of the file that is saved


def bare(directory: Path) -> Edited:
    (directory / "echo.bin").write_bytes(b"weights")
    code = directory / "handler.py"
    parts = HandlerFiles(str(code))
    return Edited(directory / "echo.bin", parts, partial(replace_file, code), code.name)


def with_extra_file(directory: Path) -> Edited:
    (directory / "parts").mkdir()
    (directory / "echo.bin").write_bytes(b"weights")
    (directory / "main.py").write_text("from helper import handle\n")
    code = directory / "parts" / "helper.py"
    parts = HandlerFiles(str(directory / "main.py"), extra_files=[str(code.parent)])
    return Edited(directory / "echo.bin", parts, code.write_text, code.name)


def unpacked(directory: Path) -> Edited:
    path = make_model(directory / "echo", handler("zero"))
    return Edited(path, HandlerFiles(), (path / "handler.py").write_text, "handler.py")


def archived(directory: Path) -> Edited:
    path = directory / "echo.mar"

    def save(text: str) -> None:
        make_model(directory / "new.mar", text, name="echo").replace(path)

    return Edited(path, HandlerFiles(), save, path.name)


def python_file(directory: Path) -> Edited:
    path = directory / "echo.py"

    def save(text: str) -> None:
        text = text.replace("handle(data, context)", "predict(batch)").replace(
            "data or []", "batch"
        )
        replace_file(path, text)

    return Edited(path, HandlerFiles(), save, path.name)


def replace_file(path: Path, text: str) -> None:
    """Save as most editors do: write another file, and rename it."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)


@pytest.fixture(scope="module")
def reload_server(
    processes: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    with running_server(make_settings(tmp_path_factory.mktemp("store"))) as server:
        yield server


class Lines(logging.Handler):
    """The lines of a logger, which a test waits for."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: queue.Queue[str] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.put(record.getMessage())

    def wait_for(self, text: str) -> str:
        """Return the next line with this text."""
        while text not in (line := self._lines.get(timeout=DEADLINE)):
            pass
        return line


@contextmanager
def reloaded(
    server: RunningServer, edited: Edited, directory: Path, *, workers: int = 1
) -> Iterator[Lines]:
    """Serve a model as `tsx serve --reload` does."""
    lines = Lines()
    logger = logging.getLogger("tsx.reload")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    source = LocatedSource("echo", edited.path, classify(edited.path))
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(directory))
        stack.callback(logger.removeHandler, lines)
        model = ReloadedModel(partial(find_model, source, edited.parts), stack)
        assert model.start.path is not None
        order = replace(model.start.order, initial_workers=workers)
        server.call(partial(server.registry.register_path, model.start.path, order))
        context = reloading([model], server.registry)
        server.call(context.__aenter__)
        try:
            yield lines
        finally:
            server.call(lambda: context.__aexit__(None, None, None))
            server.call(lambda: server.registry.unregister("echo"))
            wait_for_old_versions(server)


def answer(server: RunningServer) -> str:
    return server.ask(path="/predictions/echo").text


def wait_for_old_versions(server: RunningServer) -> None:
    server.call(server.registry.resources.background.wait_all)


@pytest.mark.parametrize(
    ("make", "fault", "reason"),
    [
        (bare, BROKEN, "SyntaxError"),
        (with_extra_file, FAILS, "RuntimeError"),
        (unpacked, FAILS, "RuntimeError"),
        (archived, BROKEN, "SyntaxError"),
        (python_file, FAILS + handler("fault"), "RuntimeError"),
    ],
)
def test_a_save_is_served_and_a_fault_leaves_the_version_before(
    reload_server: RunningServer,
    tmp_path: Path,
    short_path: Path,
    make: Callable[[Path], Edited],
    fault: str,
    reason: str,
) -> None:
    server, edited = reload_server, make(tmp_path)
    edited.save(handler("zero"))
    with reloaded(server, edited, short_path) as lines:
        assert answer(server) == "zero"
        edited.save(handler("one"))
        assert lines.wait_for("changed").startswith(f"{edited.code} changed: loading echo")
        lines.wait_for("serves the new version")
        assert answer(server) == "one"
        edited.save(fault)
        assert reason in lines.wait_for("does not load")
        assert answer(server) == "one"
        [description] = server.management.get("/models/echo").json()
        [page] = page_of(server)
        [error, *_] = server.management.get("/ui/api/errors/echo").json()
        for text in (description["lastError"], page["failedReplacement"], error["traceback"]):
            assert "Traceback" in text
            assert reason in text
        edited.save(handler("two"))
        lines.wait_for("serves the new version")
        assert answer(server) == "two"
        [description] = server.management.get("/models/echo").json()
        [page] = page_of(server)
        assert ("lastError" in description, page["failedReplacement"]) == (False, "")
        wait_for_old_versions(server)
        # A Python file has a second directory, with its settings.
        directories = {archived: 0, python_file: 2}.get(make, 1)
        assert len(list(short_path.iterdir())) == directories


def page_of(server: RunningServer) -> list[dict[str, str]]:
    state = server.management.get("/ui/api/state").json()
    [versions] = [model["versions"] for model in state["models"] if model["name"] == "echo"]
    return list(versions)


def test_saves_while_a_version_loads_are_loaded_afterwards(
    reload_server: RunningServer, tmp_path: Path, short_path: Path
) -> None:
    server, edited, gate = reload_server, unpacked(tmp_path), tmp_path / "gate"
    with reloaded(server, edited, short_path) as lines:
        wait = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
        edited.save(wait + handler("slow"))
        lines.wait_for("changed")
        for number in range(20):
            edited.save(handler(str(number)))
        gate.touch()
        lines.wait_for("changed")
        lines.wait_for("serves the new version")
        assert answer(server) == "19"


def test_a_file_that_is_deleted_leaves_the_version_until_it_is_back(
    reload_server: RunningServer, tmp_path: Path, short_path: Path
) -> None:
    server, edited = reload_server, bare(tmp_path)
    edited.save(handler("zero"))
    with reloaded(server, edited, short_path, workers=2) as lines:
        (tmp_path / "handler.py").unlink()
        assert "handler.py" in lines.wait_for("does not load")
        [page] = page_of(server)
        assert "handler.py" in page["failedReplacement"]
        assert answer(server) == "zero"
        edited.save(handler("one"))
        lines.wait_for("serves the new version")
        assert answer(server) == "one"
        assert len(page_of(server)[0]["workers"]) == 2


def test_a_directory_that_is_replaced_is_loaded(
    reload_server: RunningServer, tmp_path: Path, short_path: Path
) -> None:
    server, edited = reload_server, unpacked(tmp_path)
    successor = make_model(tmp_path / "successor", handler("successor"), name="echo")
    with reloaded(server, edited, short_path) as lines:
        edited.path.rename(tmp_path / "old")
        lines.wait_for("does not load")
        successor.rename(edited.path)
        lines.wait_for("serves the new version")
        assert answer(server) == "successor"
        (edited.path / "handler.py").write_text(handler("saved"))
        lines.wait_for("serves the new version")
        assert answer(server) == "saved"


def test_a_stop_ends_a_version_that_loads(
    reload_server: RunningServer, tmp_path: Path, short_path: Path
) -> None:
    server, edited = reload_server, unpacked(tmp_path)
    before = len(list(server.registry.all_versions()))
    with reloaded(server, edited, short_path) as lines:
        edited.save("import time\nwhile True: time.sleep(1)\n")
        lines.wait_for("changed")
    wait_for_old_versions(server)
    assert len(list(server.registry.all_versions())) == before
    assert list(short_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.parametrize("make", [bare, unpacked, archived, python_file])
def test_a_hundred_saves_under_load_fail_no_request_and_leave_no_process(
    reload_server: RunningServer, tmp_path: Path, short_path: Path, make: Callable[[Path], Edited]
) -> None:
    server, edited = reload_server, make(tmp_path)
    edited.save(handler("zero"))
    with reloaded(server, edited, short_path, workers=2) as lines:
        assert answer(server) == "zero"
        before = set(psutil.Process().children(recursive=True))
        with load(
            server, lambda number: ("/predictions/echo", b"x", {}), clients=4, least=20
        ) as answers:
            for number in range(100):
                edited.save((BROKEN, FAILS, handler(str(number)))[min(number % 6, 2)])
                # Some saves come while the one before is loaded.
                if number % 4:
                    lines.wait_for("serves" if number % 6 > 1 else "does not load")
            while answer(server) != "99":
                lines.wait_for("serves the new version")
        assert [reply for reply in answers if reply.status != 200] == []
        wait_for_old_versions(server)
        # A Python file has a second directory, with its settings.
        directories = {archived: 0, python_file: 2}.get(make, 1)
        assert len(list(short_path.iterdir())) == directories
    wait_for_old_versions(server)
    new_processes = set(psutil.Process().children(recursive=True)) - before
    assert [process for process in new_processes if process.status() != psutil.STATUS_ZOMBIE] == []


def test_the_command_reloads_until_ctrl_c(
    tmp_path: Path, short_path: Path, session_cache: Path
) -> None:
    edited = bare(tmp_path)
    edited.save(handler("zero"))
    arguments = ["serve", edited.path, "--handler", "handler.py", "--reload", *FREE_PORTS]
    environment = {"TSX_CACHE_DIR": str(session_cache), "TMPDIR": str(short_path)}
    with serving(arguments, tmp_path, environment) as running:
        edited.save(handler("one"))
        deadline = time.monotonic() + DEADLINE
        while "serves the new version" not in running.log:
            assert time.monotonic() < deadline, running.log
            time.sleep(0.01)
        assert running.stop(2) == 0
    assert [path for path in short_path.iterdir() if path.name.startswith("tsx-model-")] == []


@pytest.mark.parametrize("arguments", [[], ["digits.war"]])
def test_only_models_that_are_named_are_reloaded(
    run: Run, tmp_path: Path, arguments: list[str]
) -> None:
    (tmp_path / "digits.war").touch()
    result = run("serve --reload", *arguments)
    assert result.code == 2
    assert "--reload" in result.err


def test_a_directory_stands_for_its_code_without_environments_and_caches(tmp_path: Path) -> None:
    for name in ("app.py", "sub/part.py", "model-config.yaml", "data.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    watched, _ = survey([tmp_path])
    for name in (".git/hook.py", "__pycache__/app.py", "env/pyvenv.cfg", "env/part.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    stamps, directories = survey([tmp_path])
    assert stamps == watched
    assert {path.name for path in stamps} == {"app.py", "part.py", "model-config.yaml"}
    assert directories == {tmp_path.parent, tmp_path, tmp_path / "sub"}


def test_a_link_is_watched_where_its_file_is(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "app.py").touch()
    (tmp_path / "app.py").symlink_to("real/app.py")
    _, directories = survey([tmp_path / "app.py", tmp_path / "missing" / "file"])
    assert directories == {tmp_path, tmp_path / "real"}


def test_a_directory_is_served_from_a_copy_with_its_name_and_linked_weights(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "echo", handler("zero"))
    (directory / "weights.pt").write_bytes(bytes(2 << 20))
    source = LocatedSource(None, directory, classify(directory))
    with ExitStack() as stack:
        start = ReloadedModel(partial(find_model, source, HandlerFiles()), stack).start
        assert start.path is not None
        assert (start.path.name, start.order.url) == ("echo", "echo")
        assert (start.path / "weights.pt").readlink() == directory / "weights.pt"
        assert not (start.path / "handler.py").is_symlink()
        assert {directory, directory / "handler.py", directory / "weights.pt"} <= {*start.files}
    assert not start.path.exists()
