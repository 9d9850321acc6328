"""Features may require that a worker starts in a sandbox."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from tests.support.clients.talker import a_talker
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.core.workers.launch import Launch, Sandbox
from tsx_runtime.core.workers.worker import Worker
from tsx_runtime.errors import LoadFailed
from tsx_runtime.feature import Feature

pytestmark = pytest.mark.anyio


@pytest.fixture
async def start(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> AsyncMock:
    start = AsyncMock()
    monkeypatch.setattr(registry.resources.starter, "start", start)
    return start


@pytest.mark.parametrize("error", [RuntimeError("broken"), OSError("broken"), LoadFailed("broken")])
@pytest.mark.parametrize("position", [0, 99])
async def test_without_the_sandbox_of_a_feature_no_worker_is_started(
    error: Exception, position: int, registry: Registry, start: AsyncMock, tmp_path: Path
) -> None:
    class BrokenFeature(Feature):
        def sandbox(self, version: ModelVersion, worker: Worker, program: Launch) -> Sandbox | None:
            raise error

    registry.features.insert(position, BrokenFeature(registry))
    with pytest.raises(LoadFailed, match="broken"):
        await a_talker(registry, tmp_path)
    start.assert_not_called()
    assert not registry.models


@pytest.mark.parametrize("count", [1, 2])
async def test_a_worker_has_at_most_one_sandbox(
    count: int, registry: Registry, start: AsyncMock, tmp_path: Path
) -> None:
    box = Mock(spec=Sandbox)

    class BoxFeature(Feature):
        def sandbox(self, version: ModelVersion, worker: Worker, program: Launch) -> Sandbox | None:
            return box

    start.side_effect = OSError("not started")
    registry.features[:0] = [BoxFeature(registry) for _ in range(count)]
    with pytest.raises(LoadFailed, match="not started" if count == 1 else "too many values"):
        await a_talker(registry, tmp_path)
    sandboxes = [call.args[1].sandbox for call in start.call_args_list]
    assert {*sandboxes} == ({box} if count == 1 else set())
