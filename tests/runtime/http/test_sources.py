"""Models registered from URLs, over REST: allowed, downloaded, served, and gone with their
registration.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.models import make_model

HANDLER = """
def handle(data, context):
    return [b"from afar" for _ in data or ()]
"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...


pytestmark = pytest.mark.usefixtures("without_proxies")


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A web server with an archive, a broken model and something else; its address."""
    directory = tmp_path_factory.mktemp("remote")
    make_model(directory / "far.mar", HANDLER)
    make_model(directory / "bad.mar", "import no_such_module_anywhere")
    (directory / "junk.mar").write_bytes(b"not an archive")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(directory)))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def server(start_server, remote: str, tmp_path_factory: pytest.TempPathFactory):
    place = tmp_path_factory.mktemp("downloads")
    with start_server(
        model_store=place, cache_dir=place / "cache", allowed_urls=[remote], allow_private_urls=True
    ) as running:
        yield running


def archives(server) -> list[str]:
    return sorted(
        file.name for file in Path(server.settings.model_store).iterdir() if file.is_file()
    )


def test_a_model_is_served_from_a_url_and_its_file_goes_with_it(server, remote) -> None:
    url = f"http://{remote}/far.mar"
    answer = server.management.post("/models", params={"url": url, "initial_workers": 1})
    assert answer.json() == {"status": 'Model "far" Version: 1.0 registered with 1 initial workers'}
    assert server.inference.post("/predictions/far", content=b"x").text == "from afar"
    assert server.management.get("/models/far").json()[0]["modelUrl"] == url
    assert archives(server) == ["far.mar"]
    assert server.management.delete("/models/far").status_code == 200
    assert archives(server) == []


def test_the_same_file_name_twice_is_the_stores_first(server, remote, error_of) -> None:
    url = f"http://{remote}/far.mar"
    assert server.management.post("/models", params={"url": url}).status_code == 200
    again = server.management.post("/models", params={"url": url, "model_name": "again"})
    assert (again.status_code, error_of(again)) == (
        500,
        ("InternalServerException", "Model file already exists far.mar"),
    )
    assert server.management.delete("/models/far").status_code == 200


@pytest.mark.parametrize(
    ("path", "status", "type", "said"),
    [
        (
            "absent.mar",
            400,
            "DownloadArchiveException",
            "Failed to download archive from: http://{remote}/absent.mar: the server answers 404",
        ),
        ("junk.mar", 400, "BadRequestException", "archive"),
        ("bad.mar?x", 500, "InternalServerException", "Failed to start workers for model"),
        ("far.mar#sha256=" + "0" * 64, 400, "DownloadArchiveException", "its sha-256 is"),
        ("%2e%2e/far.mar", 404, "ModelNotFoundException", "Relative path is not allowed in url"),
        ("far.txt", 400, "BadRequestException", "does not end in an archive's name"),
    ],
)
def test_what_cannot_be_used_is_reported_and_leaves_nothing_behind(
    server, remote, error_of, path, status, type, said
) -> None:
    answer = server.management.post(
        "/models", params={"url": f"http://{remote}/{path}", "initial_workers": 1}
    )
    reported = error_of(answer)
    assert (answer.status_code, reported[0]) == (status, type)
    assert said.format(remote=remote) in reported[1]
    assert archives(server) == []


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:{port}/far.mar",
        "https://127.0.0.1.evil/far.mar",
        "http://169.254.169.254/latest/far.mar",
        "s3://bucket/far.mar",
        "ftp://{remote}/far.mar",
        "file:///etc/far.mar",
    ],
)
def test_what_is_not_allowed_is_not_found_as_in_torchserve(server, remote, error_of, url) -> None:
    answer = server.management.post(
        "/models", params={"url": url.format(remote=remote, port=remote.partition(":")[2])}
    )
    type, said = error_of(answer)
    assert (answer.status_code, type) == (404, "ModelNotFoundException")
    assert "does not match any allowed URL(s)" in said


def test_a_private_address_is_refused_unless_it_is_allowed_or_named(
    start_server, remote, tmp_path, error_of
) -> None:
    with start_server(
        model_store=tmp_path, allowed_urls=["http://127.*", "http://localhost:.*"]
    ) as careful:
        answer = careful.management.post("/models", params={"url": f"http://{remote}/far.mar"})
        assert answer.status_code == 404
        assert "allow_private_urls" in error_of(answer)[1]
        named = f"http://localhost:{remote.partition(':')[2]}/far.mar"
        assert careful.management.post("/models", params={"url": named}).status_code == 200


def test_a_model_is_registered_by_its_absolute_path_in_the_store(
    server, error_of, tmp_path
) -> None:
    store = Path(server.settings.model_store)
    for place in (store / "near.mar", store / "folder"):
        make_model(place, HANDLER)
        answer = server.management.post(
            "/models", params={"url": str(place), "initial_workers": 1, "model_name": "near"}
        )
        assert answer.json() == {
            "status": 'Model "near" Version: 1.0 registered with 1 initial workers'
        }
        assert server.inference.post("/predictions/near", content=b"x").text == "from afar"
        assert server.management.delete("/models/near").status_code == 200
        assert place.exists(), "what the store had stays"
    (store / "near.mar").unlink()
    outside = make_model(tmp_path / "outside.mar", HANDLER)
    (store / "link.mar").symlink_to(outside)
    for place in (outside, store / "link.mar", store / ".." / "outside.mar"):
        answer = server.management.post("/models", params={"url": str(place)})
        assert (answer.status_code, error_of(answer)[0]) == (404, "ModelNotFoundException")
    (store / "link.mar").unlink()


def test_a_file_outside_the_store_is_copied_into_it_where_that_is_allowed(
    start_server, tmp_path, error_of
) -> None:
    store, outside = tmp_path / "store", make_model(tmp_path / "outside.mar", HANDLER)
    store.mkdir()
    with start_server(model_store=store, allowed_urls=[f"file://{tmp_path}/.*"]) as running:
        assert (
            running.management.post("/models", params={"url": f"file://{outside}"}).status_code
            == 200
        )
        assert (store / "outside.mar").read_bytes() == outside.read_bytes()
        assert running.management.delete("/models/outside").status_code == 200
        assert not (store / "outside.mar").exists()
        assert outside.exists()
        answer = running.management.post("/models", params={"url": f"file://{tmp_path}/none.mar"})
        reported = f"Failed to download archive from: file://{tmp_path}/none.mar: {tmp_path}/none.mar does not exist."
        assert (answer.status_code, error_of(answer)) == (
            400,
            ("DownloadArchiveException", reported),
        )
