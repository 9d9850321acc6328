"""`tsx_runtime.testing`, used as in a user's tests."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models import make_model
from tests.support.servers import DEADLINE
from tsx_archiver import ArchiveSpec
from tsx_archiver.errors import ArchiveNotFound
from tsx_runtime.errors import LoadFailed, SettingError
from tsx_runtime.server.server import serve_async
from tsx_runtime.testing import serve

pytestmark = pytest.mark.usefixtures("processes")
ECHO = """
import os


def handle(data, context):
    return None if data is None else [{"body": str(row["body"]), "pid": os.getpid()} for row in data]
"""


def test_archives_directories_and_specs_are_served_with_the_given_settings(tmp_path: Path) -> None:
    (tmp_path / "spec.py").write_text(ECHO)
    models = [
        make_model(tmp_path / "packed.mar", ECHO),
        make_model(tmp_path / "open", ECHO),
        ArchiveSpec("spec", str(tmp_path / "spec.py")),
    ]
    thread_count = threading.active_count()
    with serve(
        *models, worker_preload=False, inference_token="secret", max_request_size=10
    ) as server:
        for name in ("packed", "open", "spec"):
            headers = {"Content-Type": "text/plain"}
            answer = server.client.post(f"/predictions/{name}", content="hi", headers=headers)
            assert answer.json()["body"] == "hi"
        assert server.client.post("/predictions/spec", content="x" * 11).status_code == 413
        # This request has no token.
        assert httpx.post(f"{server.url}/predictions/spec").status_code == 400
        assert httpx.get(f"{server.addresses['management']}/models").json()["models"]

        async def ask() -> int:
            async with httpx.AsyncClient(base_url=server.url, headers=server.headers) as client:
                return (await client.get("/ping")).status_code

        assert asyncio.run(ask()) == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/ping")
    assert server.client.is_closed
    # multiprocessing has one thread of its own.
    assert threading.active_count() <= thread_count + 1


def test_an_unservable_model_raises_in_the_test(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere")
    with (
        pytest.raises(LoadFailed, match="no_such_module_anywhere"),
        serve(ArchiveSpec("broken", str(tmp_path / "broken.py")), worker_preload=False),
    ):
        pass
    with pytest.raises(ArchiveNotFound), serve(tmp_path / "absent.mar"):
        pass
    with (
        pytest.raises(SettingError, match="did you mean 'inference_token'"),
        serve(inference_tokn="x"),
    ):
        pass


def test_a_failing_server_stop_fails_an_otherwise_passing_test(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*args: Any) -> None:
        await serve_async(*args)
        raise OSError("the disk is full")

    monkeypatch.setattr("tsx_runtime.testing.serve_async", fail)
    with pytest.raises(OSError, match="the disk is full"), serve(worker_preload=False):
        pass
    with pytest.raises(ZeroDivisionError), serve(worker_preload=False):
        raise ZeroDivisionError


def test_an_interrupted_start_leaves_no_thread_or_process(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    (tmp_path / "slow.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(600)"
    )
    thread_count, main = threading.active_count(), threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        deadline = time.monotonic() + DEADLINE
        while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    # The runner of tests may have replaced this handler.
    old_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            serve(ArchiveSpec("slow", str(tmp_path / "slow.py")), worker_preload=False),
        ):
            pass
        interrupter.join()
    finally:
        signal.signal(signal.SIGINT, old_handler)
    # multiprocessing has one thread of its own.
    assert threading.active_count() <= thread_count + 1
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
