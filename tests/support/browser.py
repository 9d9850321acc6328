"""The browser of tests/ui and of scripts/make_images.py."""

from __future__ import annotations

import os
import shutil

BROWSERS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
)


def installed_browser() -> str | None:
    """Return the browser that TSX_BROWSER names, or the first on the PATH."""
    return os.environ.get("TSX_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
