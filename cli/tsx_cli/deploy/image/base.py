"""The digest of an image's base, with which a Dockerfile always means the same bytes."""

from __future__ import annotations

import json

from tsx_archiver.storage.atomic_file import write_atomically
from tsx_archiver.storage.cache import default_cache
from tsx_archiver.storage.private_directory import private_directory
from tsx_cli.deploy.image.programs import digest_of


def pinned_base(base: str) -> tuple[str, str]:
    """Return a base with its digest, and a note if that is an earlier digest or none.

    Digests are cached, so that the image keeps its name while a registry does not answer.
    """
    if "@" in base or base == "scratch":
        return base, ""
    digest, reason = digest_of(base)
    digests = _read_digests()
    if digest:
        if digests.get(base) != digest:
            _write_digests({**digests, base: digest})
        return f"{base}@{digest}", ""
    because, way = (f" ({reason})", "") if reason else ("", ", or install skopeo")
    if base in digests:
        return (
            f"{base}@{digests[base]}",
            f"the base {base} is the one that an earlier run found{because}",
        )
    advice = f"set build.base to NAME:TAG@sha256:DIGEST{way}"
    return base, f"the base {base} may change, as its digest is unknown{because}: {advice}"


def _read_digests() -> dict[str, str]:
    try:
        digests = json.loads((default_cache() / "base-images.json").read_bytes())
    except (OSError, ValueError):
        return {}  # a damaged cache is ignored
    return digests if isinstance(digests, dict) else {}


def _write_digests(digests: dict[str, str]) -> None:
    path = default_cache() / "base-images.json"
    try:
        private_directory(path.parent)
        with write_atomically(path, mode=0o600) as file:
            file.write(json.dumps(digests, indent=1).encode())
    except OSError:
        pass  # The cache only helps when a registry is out of reach.
