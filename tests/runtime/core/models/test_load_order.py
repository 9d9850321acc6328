"""The load message of a worker whose model directory changed after the manifest was written."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tsx_archiver import ArchiveSpec, open_archive, parse_model_config, write_archive
from tsx_runtime.core.models.load_order import load_order
from tsx_runtime.core.models.plan import RegisterOrder, plan
from tsx_runtime.core.placement.placement import WorkerPlacement
from tsx_runtime.settings.schema import Settings


@pytest.mark.parametrize("unpacked", [False, True])
def test_checksums_of_a_directory_are_not_sent_to_the_worker(
    tmp_path: Path, unpacked: bool
) -> None:
    (tmp_path / "handler.py").write_text("def handle(data, context):\n    return data\n")
    path = write_archive(
        ArchiveSpec(model_name="m", version="1.0", handler=str(tmp_path / "handler.py")),
        tmp_path / "m.mar",
    )
    if unpacked:
        with zipfile.ZipFile(path) as mar:
            mar.extractall(path := tmp_path / "m")
    settings = Settings()
    version_plan = plan(RegisterOrder(url="m.mar"), parse_model_config({})[0], settings, 0)
    with open_archive(path, cache=tmp_path / "cache") as archive:
        load_message = load_order(
            archive,
            version_plan,
            WorkerPlacement((), 1, None, {}, False),
            settings,
            name="m",
            version="1.0",
            handler="handler.py",
            envelope="",
            worker="1",
            gpus=0,
        )
    assert ("sha256" in load_message["manifest"]) is not unpacked
