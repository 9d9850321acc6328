"""The digest of a base image: from its registry, from an earlier run, or as given."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.platforms.docker import Engine
from tsx_cli.deploy.image.base import pinned_base

DIGEST, OTHER = "sha256:" + "1" * 64, "sha256:" + "2" * 64
BASE = "python:3.12-slim"


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Engine(tmp_path / "bin").here(monkeypatch)


def test_the_base_is_pinned_to_its_current_digest(docker: Engine) -> None:
    for digest in (DIGEST, OTHER):
        docker.set(digests={BASE: digest})
        assert pinned_base(BASE) == (f"{BASE}@{digest}", "")


def test_the_base_keeps_its_earlier_digest_if_its_registry_does_not_answer(docker: Engine) -> None:
    docker.set(digests={BASE: DIGEST})
    pinned_base(BASE)
    docker.set(digests={})
    base, note = pinned_base(BASE)
    assert base == f"{BASE}@{DIGEST}"
    assert note == f"the base {BASE} is the one that an earlier run found (docker: not found)"


def test_a_base_with_an_unknown_digest_gets_a_note(docker: Engine, tmp_path: Path) -> None:
    base, note = pinned_base(BASE)
    assert base == BASE
    unknown = f"the base {BASE} may change, as its digest is unknown"
    remedy = "set build.base to NAME:TAG@sha256:DIGEST"
    assert note == f"{unknown} (docker: not found): {remedy}"
    docker.set(broken_buildx=True)
    assert pinned_base(BASE)[1] == f"{unknown}: {remedy}, or install skopeo"
    (tmp_path / "bin" / "docker").unlink()
    assert pinned_base(BASE)[1] == f"{unknown}: {remedy}, or install skopeo"


def test_the_registry_is_not_asked_for_a_given_digest(docker: Engine) -> None:
    assert pinned_base(f"{BASE}@{DIGEST}") == (f"{BASE}@{DIGEST}", "")
    assert docker.state["calls"] == []


def test_a_damaged_file_of_earlier_digests_is_ignored(docker: Engine, tmp_path: Path) -> None:
    (tmp_path / "cache" / "tsx").mkdir(parents=True)
    (tmp_path / "cache" / "tsx" / "base-images.json").write_text("{")
    docker.set(digests={BASE: DIGEST})
    assert pinned_base(BASE)[0].endswith(DIGEST)
