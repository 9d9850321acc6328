"""Features decide how a worker is started."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from tests.support.clients.talker import a_registry, a_talker
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.workers.launch import Launch
from tsx_runtime.core.workers.worker import Worker
from tsx_runtime.errors import LoadFailed
from tsx_runtime.feature import Feature

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("error", [RuntimeError("broken"), OSError("broken"), LoadFailed("broken")])
@pytest.mark.parametrize("position", [0, 99])
async def test_an_error_of_a_feature_starts_no_worker(
    error: Exception, position: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenFeature(Feature):
        def launch(
            self, version: ModelVersion, worker: Worker, launch: Launch | None
        ) -> Launch | None:
            raise error

    async with a_registry() as registry:
        registry.features.insert(position, BrokenFeature(registry))
        monkeypatch.setattr(registry.resources.starter, "start", start := AsyncMock())
        with pytest.raises(LoadFailed, match="broken"):
            await a_talker(registry, tmp_path)
        start.assert_not_called()
        assert not registry.models


async def test_no_feature_takes_away_what_another_one_set(tmp_path: Path) -> None:
    class FirstFeature(Feature):
        def launch(
            self, version: ModelVersion, worker: Worker, launch: Launch | None
        ) -> Launch | None:
            return Launch(variables={"FIRST": "1"})

    async with a_registry() as registry:
        registry.features[:] = [FirstFeature(registry), Feature(registry)]
        version = await a_talker(registry, tmp_path, initial_workers=0)
        launch = version._launch(Worker("1", (), 0.0))
        assert launch is not None
        assert launch.variables == {"FIRST": "1"}
