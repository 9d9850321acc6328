"""The digest of a base image, by which a Dockerfile always refers to the same bytes."""

from __future__ import annotations

import json

from tsx_archiver.storage.atomic_file import write_atomically
from tsx_archiver.storage.cache import default_cache
from tsx_archiver.storage.private_directory import private_directory
from tsx_cli.deploy.image.programs import digest_of


def pinned_base(base: str) -> tuple[str, str]:
    """Return a base with its digest, and a note if the digest is a cached one or unknown.

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
    reason_text, install_hint = (f" ({reason})", "") if reason else ("", ", or install skopeo")
    if base in digests:
        return (
            f"{base}@{digests[base]}",
            f"the base {base} is the one that an earlier run found{reason_text}",
        )
    advice = f"set build.base to NAME:TAG@sha256:DIGEST{install_hint}"
    return base, f"the base {base} may change, as its digest is unknown{reason_text}: {advice}"


def _read_digests() -> dict[str, str]:
    try:
        digests = json.loads((default_cache() / "base-images.json").read_bytes())
    except (OSError, ValueError):
        return {}  # A damaged cache is ignored.
    return digests if isinstance(digests, dict) else {}


def _write_digests(digests: dict[str, str]) -> None:
    path = default_cache() / "base-images.json"
    try:
        private_directory(path.parent)
        with write_atomically(path, mode=0o600) as file:
            file.write(json.dumps(digests, indent=1).encode())
    except OSError:
        pass  # The cache is only needed while a registry is unreachable.
