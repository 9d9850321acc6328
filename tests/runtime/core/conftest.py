"""A registry that runs in the test's own process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.clients.talker import a_registry
from tsx_runtime.core.registry.registry import Registry


@pytest.fixture
async def registry(processes: None) -> AsyncIterator[Registry]:
    async with a_registry() as registry:
        yield registry
