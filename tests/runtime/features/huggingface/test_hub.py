"""Hugging Face Hub models: the names that clients may use, and downloads from a fake Hub."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub import Hub, HubRepo, hub_double
from tsx_runtime.errors import BadRequest, DownloadFailed, ModelNotFound, SettingError
from tsx_runtime.features.huggingface.hub import HubModel, check_allowed, download, parse_hub
from tsx_runtime.sources.urls import AllowList, is_url, parse_url

CONFIG = b'{"architectures": ["BertForSequenceClassification"], "model_type": "bert"}'
FILES = {
    "config.json": CONFIG,
    "model.safetensors": b"w" * 2_000_000,
    "pytorch_model.bin": b"p",
    "onnx/model.onnx": b"o",
    "vocab.txt": b"v",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_proxies: None) -> Iterator[Hub]:
    with hub_double() as fake_hub:
        fake_hub.use(monkeypatch, tmp_path / "hf")
        fake_hub.repos["org/tiny"] = HubRepo()
        fake_hub.repos["org/tiny"].commit(FILES)
        yield fake_hub


def fetch(
    model: str, max_bytes: int = 1 << 30, progress: Any = lambda loaded_bytes, total_bytes: None
) -> Path:
    return download(parse_hub(model), max_bytes=max_bytes, progress=progress)


def test_a_hub_model_has_an_owner_a_name_and_an_optional_revision() -> None:
    assert parse_hub("hf:org/tiny") == HubModel("org/tiny", None)
    assert str(parse_hub("hf:org/tiny@refs/pr/1")) == "hf:org/tiny@refs/pr/1"
    assert is_url("hf:org/tiny")
    for invalid_model in (
        "hf:tiny",
        "hf:org/tiny/more",
        "hf:org/../x",
        "hf:org/tiny@",
        "hf://org/tiny",
        "hf:org/tiny@a b",
        "hf:-o/tiny",
    ):
        with pytest.raises(BadRequest, match="it must be hf:ORG/NAME or hf:ORG/NAME@REVISION"):
            parse_hub(invalid_model)
    # A workflow archive cannot come from the Hub.
    with pytest.raises(ModelNotFound):
        parse_url("hf:org/tiny")


@pytest.mark.parametrize(
    ("entry", "allowed"),
    [
        ("hf:org/tiny", True),
        ("hf:org/tiny@v1", True),
        ("hf:org/.*", True),
        ("^hf:.*", True),
        ("hf:org/tiny@v2", False),
        ("hf:org/tin", False),
        # TorchServe's default.
        ("file://.*|http(s)?://.*", False),
        (".*", False),
        ("org/tiny", False),
    ],
)
def test_clients_may_use_only_hub_models_that_an_entry_allows(entry: str, allowed: bool) -> None:
    assert AllowList([entry])
    refusal = pytest.raises(ModelNotFound, match=r"does not match any allowed.* Add hf:org/tiny,")
    with contextlib.nullcontext() if allowed else refusal:
        check_allowed(parse_hub("hf:org/tiny@v1"), ["other.example", entry])


def test_an_invalid_hub_pattern_is_an_error() -> None:
    with pytest.raises(SettingError):
        AllowList(["hf:["])


@pytest.mark.slow
def test_serving_files_are_downloaded_once_and_resumed(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    # The download writes chunks of this size.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100_000)
    commit = hub.repos["org/tiny"].refs["main"]
    hub.break_off["model.safetensors"] = 1_500_000
    progress: list[tuple[int, int]] = []
    model = fetch("hf:org/tiny", progress=lambda *sizes: progress.append(sizes))
    assert model.name == commit
    assert (model / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    weights = "model.safetensors"
    assert sorted(hub.downloads()) == ["config.json", weights, weights, "vocab.txt"]
    ranges = [
        headers["range"]
        for method, _, headers in hub.requests
        if method == "GET" and "range" in headers
    ]
    assert ranges == ["bytes=1500000-"]
    assert progress[-1] == (2_000_001 + len(CONFIG), 2_000_001 + len(CONFIG))
    del hub.requests[:]
    assert fetch(f"hf:org/tiny@{commit}") == model
    assert not hub.downloads()


def test_another_commit_of_a_branch_is_another_model(hub: Hub) -> None:
    first = fetch("hf:org/tiny")
    second = hub.repos["org/tiny"].commit({**FILES, "vocab.txt": b"new"})
    assert fetch("hf:org/tiny").name == second != first.name
    assert (first / "vocab.txt").read_bytes() == b"v"


def test_tokens_come_from_the_environment(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/private"] = HubRepo(token="secret")
    hub.repos["org/private"].commit(FILES)
    with pytest.raises(
        DownloadFailed, match=r"there is no model at .*/org/private, or it is private.*set HF_TOKEN"
    ):
        fetch("hf:org/private")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert (fetch("hf:org/private") / "vocab.txt").is_file()


def test_a_failed_hub_download_is_an_error_with_advice(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/gated"] = HubRepo(gated=True)
    hub.repos["org/gated"].commit(FILES)
    hub.repos["org/old"] = HubRepo()
    hub.repos["org/old"].commit({"config.json": CONFIG, "tf_model.h5": b"t"})
    for name, reason in {
        "org/gated": "is gated.*Accept its terms at http.*/org/gated, and set HF_TOKEN",
        "org/none": "there is no model at http.*/org/none, or it is private",
        "org/tiny@v9": "org/tiny has no revision v9. Name a branch",
        "org/old": r"has no weights that are served \(it has tf_model.h5\)",
    }.items():
        with pytest.raises(DownloadFailed, match=reason):
            fetch(f"hf:{name}")
    size = 2_000_001 + len(CONFIG)
    with pytest.raises(
        DownloadFailed, match=f"{size} bytes to fetch, and max_archive_size is 1000"
    ):
        fetch("hf:org/tiny", max_bytes=1000)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DownloadFailed, match=r"pip install 'tsx-serve\[transformers\]'"):
        fetch("hf:org/tiny")


def test_the_cache_is_used_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    model = fetch("hf:org/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("hf:org/tiny") == model
    with pytest.raises(DownloadFailed, match=r"hf:org/other is not in the cache .*HF_HUB_OFFLINE"):
        fetch("hf:org/other")


def test_a_stopping_server_aborts_its_downloads(hub: Hub) -> None:
    model = parse_hub("hf:org/tiny")
    with pytest.raises(DownloadFailed, match="the server stops"):
        download(
            model,
            max_bytes=1 << 30,
            progress=lambda loaded_bytes, total_bytes: None,
            stopped=lambda: True,
        )


# This path leads from the repository's folder in the cache to the test's folder.
ESCAPE_PATH = "../../../../escaped"
XET = {"xetHash": "0" * 64, "lfs": {"oid": ESCAPE_PATH, "size": 1, "pointerSize": 1}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("malicious_fields", "value"),
    [
        ({"sha": ESCAPE_PATH}, ESCAPE_PATH),
        ({"etag": f'"{ESCAPE_PATH}"'}, f'"{ESCAPE_PATH}"'),
        ({"missing": ESCAPE_PATH}, ESCAPE_PATH),
        ({"tree": XET}, ESCAPE_PATH),
        ({"tree": {"path": f"{ESCAPE_PATH}/x.index.json"}}, f"{ESCAPE_PATH}/x.index.json"),
        ({"link": "/org/tiny/resolve/main/tree"}, "/org/tiny/resolve/main/tree"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_values_of_a_malicious_hub_cannot_leave_the_cache(
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    malicious_fields: dict[str, Any],
    value: str,
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.repos["org/tiny"].lies = malicious_fields
    with pytest.raises(DownloadFailed, match=re.escape(f"'{value}'")):
        fetch("hf:org/tiny")
    folders = {path.relative_to(tmp_path).parts[:2] for path in tmp_path.rglob("*")}
    assert folders <= {("hf",), ("hf", "hub")}
