"""Models that are a handler and nothing else, written as any archiver would write them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path


def make_model(place: Path, handler: str, *, name: str | None = None, version: str = "1.0", config: str = "", **more: str) -> Path:
    """An archive where `place` ends in .mar, else a directory; its model is called as `place` is, unless it has a `name`.

    `more` goes into the manifest.
    """
    model = {"modelName": name or place.stem, "modelVersion": version, "handler": "handler.py", **more}
    files = {"handler.py": handler}
    if config:
        files["model-config.yaml"] = config
        model["configFile"] = "model-config.yaml"
    files["MAR-INF/MANIFEST.json"] = json.dumps({"runtime": "python", "model": model})
    if place.suffix == ".mar":
        with zipfile.ZipFile(place, "w") as archive:
            for member, text in files.items():
                archive.writestr(member, text)
        return place
    for member, text in files.items():
        (place / member).parent.mkdir(parents=True, exist_ok=True)
        (place / member).write_text(text)
    return place
