"""Predictions over HTTP: descriptions, cancelled requests, and `/ping`."""

from __future__ import annotations

import asyncio
import threading

from tsx_runtime.http.build import build_apps

PATH = "/predictions/talker"
FRAGILE = """
import os

def handle(data, context):
    if data is None:
        if os.path.exists({flag!r}):
            raise RuntimeError("gone")
    else:
        os._exit(1)
"""


def test_options_describes_the_predictions_of_a_model(server, error_of):
    document = server.inference.options(PATH).json()
    assert list(document["paths"])[:2] == ["/predictions/talker", "/explanations/talker"]
    assert error_of(server.inference.options("/predictions/nobody")) == (
        "ModelNotFoundException",
        "Model not found: nobody",
    )


def test_ping_is_healthy_until_a_worker_is_given_up(empty, store, until):
    flag = store / "flag"
    flag.unlink(missing_ok=True)
    empty.write_mar("fragile.mar", handler=FRAGILE.format(flag=str(flag)))
    empty.register("fragile.mar", initial_workers=1)
    for verb in ("GET", "POST", "PUT"):
        answer = empty.inference.request(verb, "/ping")
        assert (answer.status_code, answer.text) == (200, '{\n  "status": "Healthy"\n}\n')
    flag.touch()
    assert empty.inference.post("/predictions/fragile").status_code == 500
    until(lambda: empty.inference.get("/ping").status_code != 200)
    answer = empty.inference.get("/ping")
    assert (answer.status_code, answer.json()) == (500, {"status": "Unhealthy"})


def test_a_request_cancelled_in_the_queue_does_not_run(empty, tmp_path, until):
    gate = tmp_path / "open"
    empty.register("talker.mar", initial_workers=1, batch_size=1)
    stats = empty.registry.find("talker").stats
    (app,) = build_apps(empty.registry, empty.settings, [("inference",)])
    busy_thread = threading.Thread(target=empty.ask, kwargs={"x_do": "wait", "x_file": str(gate)})
    busy_thread.start()
    until(lambda: stats.requests == 1)
    first, second = (empty.call(lambda: asyncio.ensure_future(send_to_app(app))) for _ in range(2))
    until(lambda: stats.requests == 3)
    empty.call(second.cancel)
    gate.touch()
    until(lambda: first.done() and stats.refusals["ClientLeft"] + stats.answers.total() == 3)
    busy_thread.join(60)
    assert stats.refusals["ClientLeft"] == 1


async def send_to_app(app):
    """Send a request directly to the app and drop the answer."""

    async def receive():
        return {"type": "http.request"}

    async def send(message):
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "query_string": b"",
        "http_version": "1.1",
        "headers": [(b"host", b"localhost")],
    }
    await app(scope, receive, send)
