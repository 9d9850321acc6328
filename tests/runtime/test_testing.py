"""`tsx_runtime.testing`, as a user's own tests use it."""

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
from tsx_runtime.targets.server.server import serve_async
from tsx_runtime.testing import serve

pytestmark = pytest.mark.usefixtures("processes")
ECHO = """
import os


def handle(data, context):
    return None if data is None else [{"body": str(row["body"]), "pid": os.getpid()} for row in data]
"""


def test_archives_directories_and_specs_answer_with_the_settings_that_are_given(
    tmp_path: Path,
) -> None:
    (tmp_path / "spec.py").write_text(ECHO)
    models = [
        make_model(tmp_path / "packed.mar", ECHO),
        make_model(tmp_path / "open", ECHO),
        ArchiveSpec("spec", str(tmp_path / "spec.py")),
    ]
    before = threading.active_count()
    with serve(
        *models, worker_preload=False, inference_token="secret", max_request_size=10
    ) as server:
        for name in ("packed", "open", "spec"):
            assert (
                server.client.post(
                    f"/predictions/{name}", content="hi", headers={"Content-Type": "text/plain"}
                ).json()["body"]
                == "hi"
            )
        assert server.client.post("/predictions/spec", content="x" * 11).status_code == 413
        assert httpx.post(f"{server.url}/predictions/spec").status_code == 400  # without the token
        assert httpx.get(f"{server.addresses['management']}/models").json()["models"]

        async def ask() -> int:
            async with httpx.AsyncClient(base_url=server.url, headers=server.headers) as client:
                return (await client.get("/ping")).status_code

        assert asyncio.run(ask()) == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/ping")
    assert server.client.is_closed
    assert threading.active_count() <= before + 1  # multiprocessing's own


def test_what_cannot_be_served_is_raised_in_the_test(tmp_path: Path) -> None:
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


def test_a_server_that_fails_later_fails_the_test_unless_that_has_failed_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(*args: Any) -> None:
        await serve_async(*args)
        raise OSError("the disk is full")

    monkeypatch.setattr("tsx_runtime.testing.serve_async", fail)
    with pytest.raises(OSError, match="the disk is full"), serve():
        pass
    with pytest.raises(ZeroDivisionError), serve():
        raise ZeroDivisionError


def test_a_start_that_is_interrupted_leaves_no_thread_and_no_process(tmp_path: Path) -> None:
    began = tmp_path / "pid"
    (tmp_path / "slow.py").write_text(
        f"import os, pathlib, time\npathlib.Path({str(began)!r}).write_text(str(os.getpid()))\ntime.sleep(600)"
    )
    before, main = threading.active_count(), threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        late = time.monotonic() + DEADLINE
        while not (began.exists() and began.read_text()) and time.monotonic() < late:
            time.sleep(0.01)
        signal.pthread_kill(main, signal.SIGINT)

    usual = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # which the runner of tests may have replaced
    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            serve(ArchiveSpec("slow", str(tmp_path / "slow.py")), worker_preload=False),
        ):
            pass
        interrupting.join()
    finally:
        signal.signal(signal.SIGINT, usual)
    assert threading.active_count() <= before + 1  # multiprocessing's own
    with pytest.raises(ProcessLookupError):
        os.kill(int(began.read_text()), 0)
