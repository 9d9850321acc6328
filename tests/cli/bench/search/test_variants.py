"""The model directory that a benchmark serves."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.support.models import make_model
from tsx_archiver import open_archive
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.search.variants import lay_out


def test_a_model_is_measured_without_its_reply_cache(tmp_path: Path) -> None:
    file = make_model(tmp_path / "m.mar", "", config="cache: {ttl: 1h}\nbatchSize: 2\n")
    with open_archive(file, cache=tmp_path / "cache") as archive:
        directory = lay_out(archive, Configuration(batch_size=4), tmp_path / "place")
    config = yaml.safe_load((directory / "model-config.yaml").read_text())
    assert "cache" not in config
    assert config["batchSize"] == 4
