"""Models registered from URLs and paths, over REST."""

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


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...


pytestmark = pytest.mark.usefixtures("without_proxies")


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a web server with archives and one file that is not an archive; return its address."""
    directory = tmp_path_factory.mktemp("remote")
    make_model(directory / "far.mar", HANDLER)
    make_model(directory / "bad.mar", "import no_such_module_anywhere")
    (directory / "junk.mar").write_bytes(b"not an archive")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(directory)))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def server(start_server, remote: str, tmp_path_factory: pytest.TempPathFactory):
    store = tmp_path_factory.mktemp("downloads")
    with start_server(
        model_store=store, cache_dir=store / "cache", allowed_urls=[remote], allow_private_urls=True
    ) as server:
        yield server


def archives(server) -> list[str]:
    return sorted(
        file.name for file in Path(server.settings.model_store).iterdir() if file.is_file()
    )


def test_a_downloaded_model_is_served_and_removed_with_its_file(server, remote):
    url = f"http://{remote}/far.mar"
    answer = server.management.post("/models", params={"url": url, "initial_workers": 1})
    assert answer.json() == {"status": 'Model "far" Version: 1.0 registered with 1 initial workers'}
    assert server.inference.post("/predictions/far", content=b"x").text == "from afar"
    assert server.management.get("/models/far").json()[0]["modelUrl"] == url
    assert archives(server) == ["far.mar"]
    assert server.management.delete("/models/far").status_code == 200
    assert archives(server) == []


def test_a_download_does_not_replace_a_file_of_the_store(server, remote, error_of):
    url = f"http://{remote}/far.mar"
    assert server.management.post("/models", params={"url": url}).status_code == 200
    second_response = server.management.post("/models", params={"url": url, "model_name": "again"})
    assert (second_response.status_code, error_of(second_response)) == (
        500,
        ("InternalServerException", "Model file already exists far.mar"),
    )
    assert server.management.delete("/models/far").status_code == 200


@pytest.mark.parametrize(
    ("path", "status", "type", "message"),
    [
        (
            "absent.mar",
            400,
            "DownloadArchiveException",
            "http://{remote}/absent.mar: the server answers 404",
        ),
        ("junk.mar", 400, "BadRequestException", "archive"),
        ("bad.mar?x", 500, "InternalServerException", "Failed to start workers for model"),
        ("far.mar#sha256=" + "0" * 64, 400, "DownloadArchiveException", "its sha-256 is"),
        ("%2e%2e/far.mar", 404, "ModelNotFoundException", "Relative path is not allowed in url"),
        ("far.txt", 400, "BadRequestException", "does not end in an archive's name"),
    ],
)
def test_an_unusable_download_is_reported_and_removed(
    server, remote, error_of, path, status, type, message
):
    answer = server.management.post(
        "/models", params={"url": f"http://{remote}/{path}", "initial_workers": 1}
    )
    error = error_of(answer)
    assert (answer.status_code, error[0]) == (status, type)
    assert message.format(remote=remote) in error[1]
    assert archives(server) == []


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:{port}/far.mar",
        "s3://bucket/far.mar",
        "file:///etc/far.mar",
    ],
)
def test_a_disallowed_url_is_answered_404_as_in_torchserve(server, remote, error_of, url):
    answer = server.management.post(
        "/models", params={"url": url.format(remote=remote, port=remote.partition(":")[2])}
    )
    type, message = error_of(answer)
    assert (answer.status_code, type) == (404, "ModelNotFoundException")
    assert "does not match any allowed URL(s)" in message


def test_a_model_is_registered_by_its_absolute_path_in_the_store(server, error_of, tmp_path):
    store = Path(server.settings.model_store)
    for path in (store / "near.mar", store / "folder"):
        make_model(path, HANDLER)
        answer = server.management.post(
            "/models", params={"url": str(path), "initial_workers": 1, "model_name": "near"}
        )
        assert answer.json() == {
            "status": 'Model "near" Version: 1.0 registered with 1 initial workers'
        }
        assert server.inference.post("/predictions/near", content=b"x").text == "from afar"
        assert server.management.delete("/models/near").status_code == 200
        assert path.exists()
    (store / "near.mar").unlink()
    outside_archive = make_model(tmp_path / "outside.mar", HANDLER)
    (store / "link.mar").symlink_to(outside_archive)
    for path in (outside_archive, store / "link.mar", store / ".." / "outside.mar"):
        answer = server.management.post("/models", params={"url": str(path)})
        assert (answer.status_code, error_of(answer)[0]) == (404, "ModelNotFoundException")
    (store / "link.mar").unlink()
