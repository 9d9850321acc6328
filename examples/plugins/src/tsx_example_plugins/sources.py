"""Archives on a network share, by URLs such as `share://TEAM/FILE.mar`.

The share is mounted at the directory that EXAMPLE_SHARE names.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit


def copy_from_share(url: str, target: Path, most: int) -> None:
    parts = urlsplit(url)
    root = Path(os.environ["EXAMPLE_SHARE"]).resolve()
    file = (root / (parts.hostname or "") / unquote(parts.path).lstrip("/")).resolve()
    if not file.is_relative_to(root):
        raise ValueError("the URL leads out of the share")
    if file.stat().st_size > most:
        raise ValueError(f"it has {file.stat().st_size} bytes, and {most} are allowed")
    target.write_bytes(file.read_bytes())
