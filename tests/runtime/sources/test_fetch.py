"""Downloads into the model store, and files used in place; S3 is a local moto server."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.runtime.sources.conftest import CONTENT, Site, send
from tests.support.platforms.s3_server import BUCKET, s3_server
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
    """Return a fetcher that lets clients download from the test site."""
    return make_fetcher(store, allowed_urls=[f"127.0.0.1:{site.port}"], allow_private_urls=True)


def make_fetcher(store: Path | None, **settings: object) -> Fetcher:
    return Fetcher(Settings.model_validate({"model_store": store, **settings}))


def test_an_archive_is_downloaded_into_the_store(fetcher: Fetcher, site: Site, store: Path) -> None:
    assert fetcher.fetch(site.url(), Trust.CLIENT) == store / "m.mar"
    assert (store / "m.mar").read_bytes() == CONTENT
    assert [file.name for file in store.iterdir()] == ["m.mar"]


def test_a_download_does_not_overwrite_a_file_of_the_store(
    fetcher: Fetcher, site: Site, store: Path
) -> None:
    (store / "m.mar").write_bytes(b"mine")
    with pytest.raises(ModelFileExists, match=r"Model file already exists m\.mar"):
        fetcher.fetch(site.url(), Trust.CLIENT)
    assert (store / "m.mar").read_bytes() == b"mine"
    assert not site.requests


def test_a_download_whose_name_is_occupied_gets_a_numbered_name(
    fetcher: Fetcher, site: Site, store: Path
) -> None:
    first = fetcher.fetch(site.url(), Trust.CLIENT)
    (store / "m-2.mar").write_bytes(b"mine")
    assert fetcher.fetch(site.url(), Trust.CLIENT, taken_paths={first}) == store / "m-3.mar"
    first.unlink()
    assert fetcher.fetch(site.url(), Trust.CLIENT, taken_paths={store / "m-3.mar"}) == first


def test_a_client_may_name_only_allowed_urls(fetcher: Fetcher, site: Site) -> None:
    with pytest.raises(ModelNotFound, match="does not match any allowed URL"):
        fetcher.fetch(site.url(host="localhost"), Trust.CLIENT)
    assert not site.requests


def test_the_operator_may_name_any_host(site: Site, store: Path) -> None:
    assert make_fetcher(store).fetch(site.url(host="localhost"), Trust.OPERATOR).exists()


def test_the_digest_is_checked(fetcher: Fetcher, site: Site, store: Path) -> None:
    wrong_digest = "0" * 64
    with pytest.raises(DownloadFailed, match=f"its sha-256 is {DIGEST}, not {wrong_digest}"):
        fetcher.fetch(f"{site.url()}#sha256={wrong_digest}", Trust.CLIENT)
    assert not list(store.iterdir())
    assert fetcher.fetch(f"{site.url()}#sha256={DIGEST}", Trust.CLIENT).exists()


def test_a_second_download_of_the_same_file_is_refused(fetcher: Fetcher, site: Site) -> None:
    started, resume = threading.Event(), threading.Event()

    def wait(request) -> bool:
        started.set()
        resume.wait(30)
        return False

    site.answer = wait
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(fetcher.fetch, site.url(), Trust.CLIENT)
        assert started.wait(30)
        with pytest.raises(Conflict, match="is already being downloaded"):
            fetcher.fetch(site.url("/other/m.mar"), Trust.CLIENT)
        resume.set()
        first.result()


def test_a_download_fails_when_the_server_stops(fetcher: Fetcher, site: Site, store: Path) -> None:
    fetcher.close()
    with pytest.raises(DownloadFailed, match="the server is stopping"):
        fetcher.fetch(site.url(), Trust.CLIENT)
    assert not (store / "m.mar").exists()


def test_a_download_fails_when_the_event_of_its_owner_is_set(site: Site, store: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(DownloadFailed, match="the server is stopping"):
        Fetcher(Settings(), store, stop=stop).fetch(site.url(), Trust.OPERATOR)


def test_a_download_without_a_model_store_is_refused(site: Site) -> None:
    with pytest.raises(ModelNotFound, match="--model-store"):
        make_fetcher(None).fetch(site.url(), Trust.OPERATOR)


def test_a_url_without_an_archive_suffix_is_refused(fetcher: Fetcher, site: Site) -> None:
    with pytest.raises(BadRequest):
        fetcher.fetch(site.url("/m.txt"), Trust.CLIENT)


def test_only_hosts_named_in_allowed_urls_may_be_private(site: Site, store: Path) -> None:
    allowed = [f"http://localhost:{site.port}/.*", "http://127.*"]
    fetcher = make_fetcher(store, allowed_urls=allowed)
    assert fetcher.fetch(site.url(host="localhost"), Trust.CLIENT).read_bytes() == CONTENT
    with pytest.raises(ModelNotFound, match=r"not a public one.*name the host in allowed_urls"):
        fetcher.fetch(site.url("/n.mar"), Trust.CLIENT)
    site.answer = lambda request: send(request, 302, Location=site.url("/secret"))
    with pytest.raises(ModelNotFound, match="not a public one"):
        fetcher.fetch(site.url("/r.mar", host="localhost"), Trust.CLIENT)


def test_a_file_url_stays_in_the_store_unless_it_is_allowed(
    fetcher: Fetcher, store: Path, tmp_path: Path
) -> None:
    store_file, outside_file = store / "a.mar", tmp_path / "b.mar"
    store_file.write_bytes(b"a")
    outside_file.write_bytes(CONTENT)
    assert fetcher.local_file(f"file://{store_file}", Trust.CLIENT) == store_file
    for call in (fetcher.local_file, fetcher.fetch):
        with pytest.raises(ModelNotFound, match="does not match any allowed URL"):
            call(f"file://{outside_file}", Trust.CLIENT)
    permissive = make_fetcher(store, allowed_urls=[f"file://{tmp_path}.*"])
    # A directory is used in place, and an archive is copied.
    assert permissive.local_file(f"file://{tmp_path}", Trust.CLIENT) == tmp_path
    assert permissive.local_file(f"file://{outside_file}", Trust.CLIENT) is None
    copy = permissive.fetch(f"file://{outside_file}#sha256={DIGEST}", Trust.CLIENT)
    assert (copy, copy.read_bytes()) == (store / "b.mar", CONTENT)
    assert copy.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ModelFileExists):
        permissive.fetch(f"file://{outside_file}", Trust.CLIENT)
    copy.unlink()
    for path in (store / "none.mar", tmp_path / "none.mar"):
        with pytest.raises(DownloadFailed, match=f"{path} does not exist"):
            permissive.local_file(f"file://{path}", Trust.CLIENT)
    # An operator's file is used in place: it will still exist at the next start.
    assert fetcher.local_file(f"file://{outside_file}", Trust.OPERATOR) == outside_file
    os.mkfifo(tmp_path / "pipe.mar")
    for path, size, reason in (
        ("pipe.mar", 1000, "not a regular file"),
        ("b.mar", 5, "max_archive_size is 5"),
    ):
        with pytest.raises(DownloadFailed, match=reason):
            make_fetcher(store, max_archive_size=size).fetch(
                f"file://{tmp_path}/{path}", Trust.OPERATOR
            )
    assert [file.name for file in store.iterdir()] == ["a.mar"]


def test_the_refusal_of_a_file_url_explains_how_to_serve_it(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for directory, expected in (
        (Path("store"), f"store, {store}, and register it by its name"),
        (None, "start it with --model-store .* `tsx serve OLD NEW --replace`"),
    ):
        with pytest.raises(ModelNotFound, match=expected):
            make_fetcher(directory).local_file(f"file://{tmp_path}/b.mar", Trust.CLIENT)


def test_a_file_named_by_the_operator_is_used_in_place(fetcher: Fetcher, tmp_path: Path) -> None:
    served_archive, link, other_archive = (
        tmp_path / "served.mar",
        tmp_path / "link.mar",
        tmp_path / "other.mar",
    )
    served_archive.write_bytes(CONTENT)
    other_archive.write_bytes(CONTENT)
    link.symlink_to(served_archive)
    fetcher.startup_archives.add(link)
    for path in (served_archive, link):
        assert fetcher.local_file(f"{path.as_uri()}#sha256={DIGEST}", Trust.CLIENT) == path
    with pytest.raises(ModelNotFound, match="does not match any allowed URL"):
        fetcher.local_file(other_archive.as_uri(), Trust.CLIENT)


def test_the_digest_of_a_file_used_in_place_is_checked(fetcher: Fetcher, store: Path) -> None:
    (store / "a.mar").write_bytes(b"another")
    for path in (store / "a.mar", store):
        with pytest.raises(DownloadFailed, match=r"its sha-256 is|Is a directory"):
            fetcher.local_file(f"{path.as_uri()}#sha256={DIGEST}", Trust.CLIENT)


def test_a_link_in_the_store_does_not_lead_out_of_it(
    fetcher: Fetcher, store: Path, tmp_path: Path
) -> None:
    (tmp_path / "b.mar").write_bytes(b"")
    (store / "link.mar").symlink_to(tmp_path / "b.mar")
    with pytest.raises(ModelNotFound):
        fetcher.local_file(f"file://{store}/link.mar", Trust.CLIENT)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Run a server of the S3 protocol with one bucket and return its endpoint."""
    with s3_server() as client:
        client.put_object(Bucket=BUCKET, Key="models/m.mar", Body=CONTENT)
        yield client.meta.endpoint_url


@pytest.mark.slow
def test_an_archive_is_downloaded_from_s3(
    s3: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The object is downloaded in several ranges.
    monkeypatch.setattr("tsx_runtime.sources.s3.RANGE_BYTES", 300_000)
    fetcher = make_fetcher(store, s3_endpoint_url=s3, allowed_urls=["s3://bucket/.*"])
    archive = fetcher.fetch(f"s3://bucket/models/m.mar#sha256={DIGEST}", Trust.CLIENT)
    assert archive.read_bytes() == CONTENT
    with pytest.raises(ModelNotFound, match="does not match any allowed URL"):
        fetcher.fetch("s3://other/m.mar", Trust.CLIENT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "size", "is_stopping", "reason"),
    [
        ("bucket/absent.mar", 1 << 30, False, "404"),
        ("no-such-bucket/m.mar", 1 << 30, False, "404"),
        ("bucket/models/m.mar", 1000, False, "max_archive_size is 1000"),
        ("bucket/models/m.mar", 1 << 30, True, "the server is stopping"),
    ],
)
def test_a_failed_s3_download_leaves_no_file(
    s3: str, store: Path, path: str, size: int, is_stopping: bool, reason: str
) -> None:
    fetcher = make_fetcher(store, s3_endpoint_url=s3, max_archive_size=size)
    if is_stopping:
        fetcher.close()
    with pytest.raises(DownloadFailed, match=reason):
        fetcher.fetch(f"s3://{path}", Trust.OPERATOR)
    assert not list(store.iterdir())
