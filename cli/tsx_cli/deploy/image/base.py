"""Finds the digest of an image's base, so that a Dockerfile means the same bytes whenever it is
built.
"""

from __future__ import annotations

import json

from tsx_archiver.storage.atomic_file import write_atomically
from tsx_archiver.storage.cache import default_cache
from tsx_archiver.storage.private_directory import private_directory
from tsx_cli.deploy.image.programs import digest_of


def pinned_base(base: str) -> tuple[str, str]:
    """`base` with its digest, and a note where that is an earlier one or none.

    What was found is kept, so that a registry that does not answer does not give the image another
    name.
    """
    if "@" in base or base == "scratch":
        return base, ""
    found, why = digest_of(base)
    kept = _kept()
    if found:
        if kept.get(base) != found:
            _keep({**kept, base: found})
        return f"{base}@{found}", ""
    because, way = (f" ({why})", "") if why else ("", ", or install skopeo")
    if base in kept:
        return (
            f"{base}@{kept[base]}",
            f"the base {base} is the one that an earlier run found{because}",
        )
    advice = f"set build.base to NAME:TAG@sha256:DIGEST{way}"
    return base, f"the base {base} may change, as its digest is unknown{because}: {advice}"


def _kept() -> dict[str, str]:
    try:
        found = json.loads((default_cache() / "base-images.json").read_bytes())
    except (OSError, ValueError):
        return {}  # what is damaged is asked for again
    return found if isinstance(found, dict) else {}


def _keep(digests: dict[str, str]) -> None:
    path = default_cache() / "base-images.json"
    try:
        private_directory(path.parent)
        with write_atomically(path, mode=0o600) as file:
            file.write(json.dumps(digests, indent=1).encode())
    except OSError:
        pass  # it only helps where a registry is out of reach
