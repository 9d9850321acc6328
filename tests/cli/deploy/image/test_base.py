"""The digest of an image's base: asked of registries, kept for when none answers, and left alone
where it is given.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.platforms.docker import Engine
from tsx_cli.deploy.image.base import pinned_base

DIGEST, OTHER = "sha256:" + "1" * 64, "sha256:" + "2" * 64


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Engine(tmp_path / "bin").here(monkeypatch)


def test_a_base_is_named_by_the_digest_that_its_registry_has_now(docker: Engine) -> None:
    docker.set(digests={"python:3.12-slim": DIGEST})
    assert pinned_base("python:3.12-slim") == (f"python:3.12-slim@{DIGEST}", "")
    docker.set(digests={"python:3.12-slim": OTHER})
    assert pinned_base("python:3.12-slim") == (f"python:3.12-slim@{OTHER}", "")


def test_a_registry_that_does_not_answer_gives_the_image_no_other_name(docker: Engine) -> None:
    docker.set(digests={"python:3.12-slim": DIGEST})
    pinned_base("python:3.12-slim")
    docker.set(digests={})
    base, note = pinned_base("python:3.12-slim")
    assert base == f"python:3.12-slim@{DIGEST}"
    assert (
        note == "the base python:3.12-slim is the one that an earlier run found (docker: not found)"
    )


def test_a_base_of_which_nothing_is_known_stays_and_the_plan_says_so(
    docker: Engine, tmp_path: Path
) -> None:
    base, note = pinned_base("python:3.12-slim")
    assert base == "python:3.12-slim"
    unknown = "the base python:3.12-slim may change, as its digest is unknown"
    way = "set build.base to NAME:TAG@sha256:DIGEST"
    assert note == f"{unknown} (docker: not found): {way}"
    docker.set(broken_buildx=True)
    assert pinned_base("python:3.12-slim")[1] == f"{unknown}: {way}, or install skopeo"
    (tmp_path / "bin" / "docker").unlink()
    assert pinned_base("python:3.12-slim")[1] == f"{unknown}: {way}, or install skopeo"


def test_a_given_digest_is_kept_and_nothing_is_asked(docker: Engine) -> None:
    assert pinned_base(f"python:3.12-slim@{DIGEST}") == (f"python:3.12-slim@{DIGEST}", "")
    assert docker.state["calls"] == []


def test_what_was_kept_and_is_damaged_is_found_anew(docker: Engine, tmp_path: Path) -> None:
    (tmp_path / "cache" / "tsx").mkdir(parents=True)
    (tmp_path / "cache" / "tsx" / "base-images.json").write_text("{")
    docker.set(digests={"python:3.12-slim": DIGEST})
    assert pinned_base("python:3.12-slim")[0].endswith(DIGEST)
