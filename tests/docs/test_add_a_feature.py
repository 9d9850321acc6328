"""The feature that docs/guides/add-a-feature.md builds works in a server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import httpx

from tests.support.features import feature_names, with_features
from tests.support.models import make_model
from tests.support.servers import serving, tsx

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "add-a-feature.md"
ECHO = "def handle(data, context):\n    return data and [str(len(data))] * len(data)\n"
MAX_LINES = 60


def test_the_tutorials_feature_counts_requests_in_one_folder(
    tmp_path: Path, user_environment: Mapping[str, str]
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    files = dict(zip(("__init__.py", "settings.py", "feature.py"), blocks, strict=True))
    assert sum(text.count("\n") for text in files.values()) <= MAX_LINES
    directory = tmp_path / "features"
    environment = with_features(directory, feature_names(), user_environment)
    (directory / "header_counts").mkdir()
    for name, text in files.items():
        (directory / "header_counts" / name).write_text(text)
    make_model(tmp_path / "m.mar", ECHO)
    arguments = ["serve", "m.mar", "--set", "count_header=x-tenant"]
    with serving(arguments, tmp_path, environment):
        inference, management, metrics_address = (
            user_environment[f"TSX_{role}_ADDRESS"]
            for role in ("INFERENCE", "MANAGEMENT", "METRICS")
        )
        for tenant in ("blue", "blue", "red"):
            answer = httpx.post(
                f"{inference}/predictions/m", content=b"1", headers={"x-tenant": tenant}
            )
            assert answer.status_code == 200
        httpx.post(f"{inference}/predictions/m", content=b"1")
        counts = {"blue": 2, "red": 1, "": 1}
        assert httpx.get(f"{management}/header-counts").json() == counts
        metrics = httpx.get(f"{metrics_address}/metrics").text
        assert re.search(r'tsx_header_total\{.*value="blue".*\} 2', metrics)
        shown = tsx(["config", "show", "--json"], tmp_path, environment)
        assert "count_header" in shown.stdout
