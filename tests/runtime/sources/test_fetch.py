"""From a URL into the model store, and out again; s3 by a server that speaks its protocol."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.runtime.sources.conftest import CONTENT, Site
from tsx_runtime.errors import BadRequest, Conflict, DownloadFailed, ModelFileExists, ModelNotFound
from tsx_runtime.settings.schema import Settings
from tsx_runtime.sources import Fetcher, Trust

DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


@pytest.fixture
def fetcher(site: Site, store: Path) -> Fetcher:
    return Fetcher(
        Settings(
            model_store=store, allowed_urls=[f"127.0.0.1:{site.port}"], allow_private_urls=True
        )
    )


def test_an_archive_comes_into_the_store(fetcher: Fetcher, site: Site, store: Path) -> None:
    assert fetcher.fetch(site.url(), Trust.CLIENT) == store / "m.mar"
    assert (store / "m.mar").read_bytes() == CONTENT
    assert [file.name for file in store.iterdir()] == ["m.mar"]


def test_the_store_keeps_what_it_has(fetcher: Fetcher, site: Site, store: Path) -> None:
    (store / "m.mar").write_bytes(b"mine")
    with pytest.raises(ModelFileExists, match=r"Model file already exists m\.mar"):
        fetcher.fetch(site.url(), Trust.CLIENT)
    assert (store / "m.mar").read_bytes() == b"mine"
    assert not site.requests


def test_what_replaces_a_download_is_laid_beside_it(
    fetcher: Fetcher, site: Site, store: Path
) -> None:
    first = fetcher.fetch(site.url(), Trust.CLIENT)
    (store / "m-2.mar").write_bytes(b"mine")
    assert fetcher.fetch(site.url(), Trust.CLIENT, beside={first}) == store / "m-3.mar"
    first.unlink()
    assert fetcher.fetch(site.url(), Trust.CLIENT, beside={store / "m-3.mar"}) == first


def test_a_client_gets_only_what_is_allowed(fetcher: Fetcher, site: Site) -> None:
    with pytest.raises(ModelNotFound, match="does not match any allowed URL"):
        fetcher.fetch(site.url(host="localhost"), Trust.CLIENT)
    assert not site.requests


def test_the_operator_names_what_he_likes(site: Site, store: Path) -> None:
    assert (
        Fetcher(Settings(model_store=store))
        .fetch(site.url(host="localhost"), Trust.OPERATOR)
        .exists()
    )


def test_the_digest_is_checked(fetcher: Fetcher, site: Site, store: Path) -> None:
    wrong = "0" * 64
    with pytest.raises(
        DownloadFailed,
        match=f"Failed to download archive from: .*its sha-256 is {DIGEST}, not {wrong}",
    ):
        fetcher.fetch(f"{site.url()}#sha256={wrong}", Trust.CLIENT)
    assert not list(store.iterdir())
    assert fetcher.fetch(f"{site.url()}#sha256={DIGEST}", Trust.CLIENT).exists()


def test_one_transfer_of_a_file_at_a_time(fetcher: Fetcher, site: Site) -> None:
    asked, go_on = threading.Event(), threading.Event()

    def wait(request) -> bool:
        asked.set()
        go_on.wait(30)
        return False

    site.answer = wait
    first = threading.Thread(target=lambda: fetcher.fetch(site.url(), Trust.CLIENT))
    first.start()
    assert asked.wait(30)
    with pytest.raises(Conflict, match="is already being downloaded"):
        fetcher.fetch(site.url("/other/m.mar"), Trust.CLIENT)
    go_on.set()
    first.join()


def test_a_server_that_stops_ends_its_transfers(fetcher: Fetcher, site: Site, store: Path) -> None:
    fetcher.close()
    with pytest.raises(DownloadFailed, match="the server is stopping"):
        fetcher.fetch(site.url(), Trust.CLIENT)
    assert not (store / "m.mar").exists()


def test_without_a_store_there_is_nowhere_to_put_it(site: Site) -> None:
    with pytest.raises(ModelNotFound, match="--model-store"):
        Fetcher(Settings()).fetch(site.url(), Trust.OPERATOR)


@pytest.mark.parametrize("url", ["/m.txt", "/.mar", "/"])
def test_what_is_no_archives_name_does_not_come_into_the_store(
    fetcher: Fetcher, site: Site, url: str
) -> None:
    with pytest.raises(BadRequest):
        fetcher.fetch(site.url(url), Trust.CLIENT)


def test_a_host_that_is_named_may_be_private_and_where_it_redirects_may_not(
    site: Site, store: Path
) -> None:
    fetcher = Fetcher(
        Settings(
            model_store=store, allowed_urls=[f"http://localhost:{site.port}/.*", "http://127.*"]
        )
    )
    assert fetcher.fetch(site.url(host="localhost"), Trust.CLIENT).read_bytes() == CONTENT
    with pytest.raises(
        ModelNotFound,
        match=r"which is not a public one\. To load models from it, name the host in allowed_urls",
    ):
        fetcher.fetch(site.url("/n.mar"), Trust.CLIENT)

    def redirect(request) -> bool:
        request.send_response(302)
        request.send_header("Location", site.url("/secret"))
        request.end_headers()
        return True

    site.answer = redirect
    with pytest.raises(ModelNotFound, match="not a public one"):
        fetcher.fetch(site.url("/r.mar", host="localhost"), Trust.CLIENT)


def test_a_file_url_stays_in_the_store_unless_it_is_allowed(
    fetcher: Fetcher, store: Path, tmp_path: Path
) -> None:
    inside, outside = store / "a.mar", tmp_path / "b.mar"
    inside.write_bytes(b"a")
    outside.write_bytes(CONTENT)
    assert fetcher.local_file(f"file://{inside}", Trust.CLIENT) == inside
    for call in (fetcher.local_file, fetcher.fetch):
        with pytest.raises(ModelNotFound, match="does not match any allowed URL"):
            call(f"file://{outside}", Trust.CLIENT)
    allowing = Fetcher(Settings(model_store=store, allowed_urls=[f"file://{tmp_path}.*"]))
    assert allowing.local_file(f"file://{tmp_path}", Trust.CLIENT) == tmp_path, (
        "a directory is used in place"
    )
    assert allowing.local_file(f"file://{outside}", Trust.CLIENT) is None
    copy = allowing.fetch(f"file://{outside}#sha256={DIGEST}", Trust.CLIENT)
    assert (copy, copy.read_bytes(), copy.stat().st_mode & 0o777) == (
        store / "b.mar",
        CONTENT,
        0o600,
    )
    with pytest.raises(ModelFileExists):
        allowing.fetch(f"file://{outside}", Trust.CLIENT)
    copy.unlink()
    for path in (store / "none.mar", tmp_path / "none.mar"):
        with pytest.raises(
            DownloadFailed,
            match=f"Failed to download archive from: file://{path}: {path} does not exist",
        ):
            allowing.local_file(f"file://{path}", Trust.CLIENT)
    assert fetcher.local_file(f"file://{outside}", Trust.OPERATOR) == outside, (
        "it is there at the next start as well"
    )
    os.mkfifo(tmp_path / "pipe.mar")
    for path, settings in (("pipe.mar", {}), ("b.mar", {"max_archive_size": 5})):
        small = Fetcher(Settings(model_store=store, **settings))
        with pytest.raises(DownloadFailed, match=r"not a regular file|max_archive_size is 5"):
            small.fetch(f"file://{tmp_path}/{path}", Trust.OPERATOR)
    assert [file.name for file in store.iterdir()] == ["a.mar"]


def test_a_file_that_the_server_may_not_read_is_refused_with_the_way_into_its_store(
    fetcher: Fetcher, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stores = {
        Path("store"): f"store, {store}, and register it by its name",
        None: "no model store; start it with --model-store .* `tsx serve OLD NEW --replace`",
    }
    for directory, words in stores.items():
        with pytest.raises(ModelNotFound, match=words):
            Fetcher(Settings(model_store=directory)).local_file(
                f"file://{tmp_path}/b.mar", Trust.CLIENT
            )


def test_what_the_operator_named_at_the_start_is_used_in_place(
    fetcher: Fetcher, tmp_path: Path
) -> None:
    named, link, other = tmp_path / "named.mar", tmp_path / "link.mar", tmp_path / "other.mar"
    named.write_bytes(CONTENT)
    other.write_bytes(CONTENT)
    link.symlink_to(named)
    fetcher.served.add(link)
    for path in (named, link):
        assert fetcher.local_file(f"{path.as_uri()}#sha256={DIGEST}", Trust.CLIENT) == path
    with pytest.raises(ModelNotFound, match="does not match any allowed URL"):
        fetcher.local_file(other.as_uri(), Trust.CLIENT)


def test_a_file_that_is_used_in_place_has_the_digest_of_its_url(
    fetcher: Fetcher, store: Path
) -> None:
    (store / "a.mar").write_bytes(b"another")
    for url in (
        f"{(store / 'a.mar').as_uri()}#sha256={DIGEST}",
        f"{store.as_uri()}#sha256={DIGEST}",
    ):
        with pytest.raises(DownloadFailed, match=r"its sha-256 is|Is a directory"):
            fetcher.local_file(url, Trust.CLIENT)


def test_a_link_in_the_store_does_not_lead_out_of_it(
    fetcher: Fetcher, store: Path, tmp_path: Path
) -> None:
    (tmp_path / "b.mar").write_bytes(b"")
    (store / "link.mar").symlink_to(tmp_path / "b.mar")
    with pytest.raises(ModelNotFound):
        fetcher.local_file(f"file://{store}/link.mar", Trust.CLIENT)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A server of the S3 protocol with one bucket."""
    import boto3
    from moto.server import ThreadedMotoServer

    for name, value in (
        ("ACCESS_KEY_ID", "a"),
        ("SECRET_ACCESS_KEY", "b"),
        ("DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket="bucket")
    client.put_object(Bucket="bucket", Key="models/m.mar", Body=CONTENT)
    yield SimpleNamespace(endpoint=endpoint, client=client)
    server.stop()


def test_an_archive_comes_from_s3(
    s3: SimpleNamespace, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsx_runtime.sources.s3.RANGE", 300_000)  # several ranges
    fetcher = Fetcher(
        Settings(model_store=store, s3_endpoint_url=s3.endpoint, allowed_urls=["s3://bucket/.*"])
    )
    assert (
        fetcher.fetch(f"s3://bucket/models/m.mar#sha256={DIGEST}", Trust.CLIENT).read_bytes()
        == CONTENT
    )
    with pytest.raises(ModelNotFound, match="does not match any allowed URL"):
        fetcher.fetch("s3://other/m.mar", Trust.CLIENT)


@pytest.mark.parametrize(
    ("url", "said"), [("s3://bucket/absent.mar", "404"), ("s3://no-such-bucket/m.mar", "404")]
)
def test_what_s3_does_not_have_is_reported(
    s3: SimpleNamespace, store: Path, url: str, said: str
) -> None:
    fetcher = Fetcher(Settings(model_store=store, s3_endpoint_url=s3.endpoint))
    with pytest.raises(DownloadFailed, match=said):
        fetcher.fetch(url, Trust.OPERATOR)


def test_an_object_of_s3_that_is_too_large_is_not_begun(s3: SimpleNamespace, store: Path) -> None:
    fetcher = Fetcher(
        Settings(model_store=store, s3_endpoint_url=s3.endpoint, max_archive_size=1000)
    )
    with pytest.raises(DownloadFailed, match="max_archive_size is 1000"):
        fetcher.fetch("s3://bucket/models/m.mar", Trust.OPERATOR)
    assert not list(store.glob("*.mar"))


def test_of_an_object_of_s3_that_did_not_come_whole_nothing_is_left(
    s3: SimpleNamespace, store: Path
) -> None:
    fetcher = Fetcher(Settings(model_store=store, s3_endpoint_url=s3.endpoint))
    fetcher.close()
    with pytest.raises(DownloadFailed, match="the server is stopping"):
        fetcher.fetch("s3://bucket/models/m.mar", Trust.OPERATOR)
    assert not list(store.iterdir())
