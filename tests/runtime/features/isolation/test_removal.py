"""A server without the feature does not start if it should isolate models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.features import feature_names, with_features
from tests.support.servers import tsx


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("variables", "file"),
    [
        ({"TSX_ISOLATION": "on"}, ""),
        ({"TSX_CONFIG": "tsx.toml"}, 'isolation = "on"'),
        ({"TSX_CONFIG": "tsx.toml"}, '[models.m]\nisolation = "on"'),
        ({"TSX_CONFIG": "config.properties"}, "isolation=on"),
    ],
)
def test_isolation_is_never_ignored(
    variables: Mapping[str, str], file: str, tmp_path: Path, user_environment: Mapping[str, str]
) -> None:
    remaining = [name for name in feature_names() if name != "isolation"]
    environment = with_features(tmp_path / "features", remaining, user_environment)
    (tmp_path / variables.get("TSX_CONFIG", "none")).write_text(file)
    result = tsx(["config", "show"], tmp_path, {**environment, **variables})
    assert result.returncode == 1
    assert "unknown setting 'isolation' in" in result.stderr
