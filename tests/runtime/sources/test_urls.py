"""Allowed URLs: hosts are compared, patterns match whole URLs, and parent segments are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.errors import BadRequest, ModelNotFound, SettingError
from tsx_runtime.sources.urls import (
    AllowList,
    file_name,
    in_store,
    is_url,
    may_leave_directory,
    parse_url,
)

DIGEST = "ab" * 32


def test_urls_and_file_paths_are_distinguished() -> None:
    for text in (
        "http://a/m.mar",
        "HTTPS://a/m.mar",
        "s3://bucket/m.mar",
        "file:///m.mar",
        "gopher://a/m",
        "file:/m.mar",
    ):
        assert is_url(text)
    for text in ("m.mar", "dir/m.mar", "C:\\m.mar", "name=m.mar", "../m.mar", "a:b"):
        assert not is_url(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://a/x/../m.mar",
        "https://a/%2e%2e/m.mar",
        "https://a/%2E./m.mar",
        "https://a/x\\m.mar",
        "https://a/x%5cm.mar",
        "https://a/x%00/m.mar",
        "https://a/m.mar?next=../x",
    ],
)
def test_a_url_with_parent_segments_is_refused_in_every_spelling(text: str) -> None:
    with pytest.raises(ModelNotFound, match="Relative path is not allowed in url"):
        parse_url(text)


@given(st.integers(0, 8))
def test_parent_segments_are_found_under_repeated_quoting(repetitions: int) -> None:
    text = ".."
    for _ in range(repetitions):
        text = text.replace("%", "%25").replace(".", "%2e", 1)
    assert may_leave_directory(f"https://a/{text}/m.mar")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("https://user:pass@good.com/m.mar", "user name"),
        ("https://good.com@evil.com/m.mar", "user name"),
        ("https:///m.mar", "no host"),
        ("file://host/m.mar", "names a host"),
        ("https://a:99999/m.mar", "cannot be read"),
        ("https://a/m .mar", "spaces"),
        ("https://a/m.mar\r\nX: y", "spaces"),
        ("https://a/m.mar#sha256=short", "64 hexadecimal"),
        ("https://a/m.mar#md5=abc", "64 hexadecimal"),
    ],
)
def test_an_invalid_url_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        parse_url(text)


def test_the_digest_is_read_from_the_fragment() -> None:
    url = parse_url(f"https://a/m.mar#sha256={DIGEST.upper()}")
    assert (url.text, url.sha256) == ("https://a/m.mar", DIGEST)


@pytest.mark.parametrize("scheme", ["gopher", "ftp", "jar", "data", "javascript"])
def test_other_schemes_match_no_allowed_url(scheme: str) -> None:
    with pytest.raises(ModelNotFound, match="does not match any allowed URL"):
        parse_url(f"{scheme}://a/m.mar")


@pytest.mark.parametrize(
    ("entry", "url", "allowed"),
    [
        ("good.com", "https://good.com/m.mar", True),
        ("good.com", "HTTP://GOOD.COM/m.mar", True),
        ("good.com", "https://good.com.evil/m.mar", False),
        ("good.com", "https://evilgood.com/m.mar", False),
        ("good.com", "https://sub.good.com/m.mar", False),
        ("good.com", "https://evil.com/good.com/m.mar", False),
        ("good.com", "https://good.com:8443/m.mar", False),
        ("good.com:8443", "https://good.com:8443/m.mar", True),
        ("good.com", "https://good.com:443/m.mar", True),
        ("[::1]:8000", "http://[::1]:8000/m.mar", True),
        ("good.com", "s3://good.com/m.mar", False),
        ("https://good.com/.*", "https://good.com/m.mar", True),
        ("https://good.com/.*", "https://GOOD.com/m.mar", True),
        ("https://good.com/.*", "https://good.com.evil/m.mar", False),
        ("https://good.com/.*", "http://good.com/m.mar", False),
        ("https://good.com/m", "https://good.com/m.mar", False),
        ("s3://bucket/.*", "s3://bucket/m.mar", True),
        ("s3://bucket/.*", "s3://bucket-2/m.mar", False),
        ("file:///models/.*", "file:///models/m.mar", True),
    ],
)
def test_an_entry_allows_a_host_or_whole_urls(entry: str, url: str, allowed: bool) -> None:
    assert AllowList([entry]).allows(parse_url(url)) is allowed


def test_a_name_is_a_file_of_the_store_or_refused(tmp_path: Path) -> None:
    assert in_store("team/m.mar", tmp_path) == tmp_path / "team/m.mar"
    for name in ("../m.mar", "%2e%2e/m.mar", "a\\..\\m.mar", f"{tmp_path}/../m.mar", "m\0.mar"):
        with pytest.raises(ModelNotFound, match="Relative path is not allowed in url"):
            in_store(name, tmp_path)
    with pytest.raises(ModelNotFound, match=r"absent: m\.mar\. This server has no model store"):
        in_store("m.mar", None, "absent")


def test_an_absolute_path_is_a_file_of_the_store_once_its_links_are_resolved(
    tmp_path: Path,
) -> None:
    store, link = tmp_path / "store", tmp_path / "link"
    store.mkdir()
    link.symlink_to(store)
    (store / "out.mar").symlink_to(tmp_path / "elsewhere.mar")
    for directory in (store, link):
        for path in (store / "team" / "m.mar", link / "folder", store):
            assert in_store(str(path), directory) == path
        for path in (
            tmp_path / "elsewhere.mar",
            store / "out.mar",
            tmp_path / "store-2" / "m.mar",
            Path("/etc/passwd"),
        ):
            with pytest.raises(ModelNotFound, match=f"{path} is not in the store"):
                in_store(str(path), directory)


@pytest.mark.parametrize(
    ("entry", "url", "is_named"),
    [
        ("http://in-house:.*", "http://in-house:8000/m.mar", True),
        ("http://In-House:.*", "http://in-house:8000/m.mar", True),
        ("^https?://models\\.corp/.*", "https://models.corp/m.mar", True),
        ("http(s)?://models.corp(:\\d+)?/.*", "http://models.corp:81/m.mar", True),
        ("http://10\\.0\\.0\\.5/.*", "http://10.0.0.5/m.mar", True),
        ("http://\\[fd00::1\\]:.*", "http://[fd00::1]:80/m.mar", True),
        ("10.0.0.5:9000", "http://10.0.0.5:9000/m.mar", True),
        ("http://in-house:.*", "http://in-house/m.mar", False),
        ("http://.*", "http://in-house:8000/m.mar", False),
        ("http://in-.*", "http://in-house:8000/m.mar", False),
        ("http://in-house.*", "http://in-house:8000/m.mar", False),
        ("http://in.house/.*", "http://in-house/m.mar", False),
        ("http://(a|in-house)/.*", "http://in-house/m.mar", False),
        ("http://a/.*|http://in-house/.*", "http://in-house/m.mar", False),
        ("s3://bucket/.*", "s3://bucket/m.mar", False),
    ],
)
def test_an_entry_names_a_host_only_if_it_contains_it_literally(
    entry: str, url: str, is_named: bool
) -> None:
    assert bool(AllowList([entry]).names_host(parse_url(url))) is is_named


def test_an_empty_list_allows_nothing() -> None:
    with pytest.raises(ModelNotFound, match="allowed_urls is empty"):
        AllowList([]).check(parse_url("https://a/m.mar"))


def test_an_invalid_entry_is_reported() -> None:
    with pytest.raises(SettingError, match="neither a host nor a regular expression"):
        AllowList(["https://(.*"])


@pytest.mark.parametrize("path", ["/m.txt", "/", "/.mar", "/-x.mar", "/a%2Fb.mar", "/m.mar/"])
def test_an_invalid_archive_name_is_refused(path: str) -> None:
    with pytest.raises(BadRequest, match="does not end in an archive's name"):
        file_name(parse_url(f"https://a{path}"))


def test_overlong_urls_are_refused(tmp_path: Path) -> None:
    start, end = "https://h.example/", ".mar"
    assert parse_url(start + "a" * (4096 - len(start + end)) + end).host == "h.example"
    for text in (start + "a" * (4097 - len(start + end)) + end, "%25" * 300_000):
        with pytest.raises(BadRequest, match="at most 4096 are read"):
            parse_url(text)
        with pytest.raises(BadRequest, match="at most 4096 are read"):
            in_store(text, tmp_path)
