"""Each feature can be removed, and their order around a request is the declared one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest

from tests.support.features import feature_names, with_features
from tests.support.models import make_model, make_war
from tests.support.servers import serving, tsx
from tsx_runtime import features
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.feature import Feature, load_features

ECHO = "def handle(data, context):\n    return data and [row['body'] for row in data]\n"
# TorchServe's API is what users come for, so this folder need not be removable.
KEPT = {"torchserve"}


# Everyday one server lacks all of them; at night, one server lacks each.
LACKING = [
    pytest.param({*feature_names()} - KEPT, marks=pytest.mark.slow, id="all"),
    *(
        pytest.param({name}, marks=pytest.mark.nightly, id=name)
        for name in feature_names()
        if name not in KEPT
    ),
]


@pytest.mark.parametrize("removed", LACKING)
def test_a_server_without_a_feature_starts_and_answers(
    removed: set[str], tmp_path: Path, user_environment: Mapping[str, str]
) -> None:
    remaining = {*feature_names()} - removed
    environment = with_features(tmp_path / "features", remaining, user_environment)
    make_model(tmp_path / "m.mar", ECHO)
    inference, management, metrics = (
        user_environment[f"TSX_{role}_ADDRESS"] for role in ("INFERENCE", "MANAGEMENT", "METRICS")
    )
    with serving(["serve", "m.mar"], tmp_path, environment):
        answer = httpx.post(f"{inference}/predictions/m", content=b"word")
        assert (answer.status_code, answer.content) == (200, b"word")
        assert httpx.get(f"{metrics}/metrics").status_code == 200
        assert httpx.get(f"{management}/models/m").status_code == 200


@pytest.mark.slow
def test_a_command_that_needs_a_removed_feature_says_so(
    tmp_path: Path, user_environment: Mapping[str, str]
) -> None:
    remaining = {*feature_names()} - {"workflows"}
    environment = with_features(tmp_path / "features", remaining, user_environment)
    make_war(tmp_path / "w.war", "dag:\n", None)
    result = tsx(["serve", "w.war"], tmp_path, environment)
    assert result.returncode == 1
    assert result.stderr == "Error: No module named 'tsx_runtime.features.workflows'\n"


def test_features_are_light_where_no_server_listens() -> None:
    """A function on Lambda and `tsx bench` make a registry, and so load the features."""
    code = (
        "import sys\n"
        "from tsx_runtime import features\n"
        "import tsx_runtime.core.registry.registry\n"
        "features.modules('feature')\n"
        "heavy = {'fastapi', 'grpc', 'prometheus_client', 'sqlite3', 'torch', 'tsx_runtime.http'}\n"
        "print(sorted(heavy & {*sys.modules}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


@pytest.mark.anyio
async def test_features_stand_in_the_declared_order(registry: Registry) -> None:
    names = [type(feature).__module__.split(".")[-2] for feature in load_features(registry)]
    assert tuple(names[: len(features.ORDER)]) == features.ORDER
    assert features.ORDER.index("cache") < features.ORDER.index("recording")
    assert features.ORDER.index("recording") < features.ORDER.index("shadows")
    # Text generation has parts of workers only.
    assert set(names) == {*feature_names()} - {"generation"}


@pytest.mark.anyio
async def test_a_feature_that_overrides_nothing_is_on_no_path(registry: Registry) -> None:
    feature = Feature(registry)
    version: object = None
    assert feature.around(version, None) is None  # type: ignore[arg-type]
    assert feature.dispatcher(version) is None  # type: ignore[arg-type]
    assert feature.loading(version, None) is None  # type: ignore[arg-type]
    assert feature.describe(version) == {}  # type: ignore[arg-type]
