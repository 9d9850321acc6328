"""Models that need packages which are not installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.support.clients.talker import a_registry, order
from tests.support.models import make_model
from tsx_archiver.metadata.huggingface import HANDLER
from tsx_archiver.metadata.mlmodel import PYFUNC
from tsx_runtime.core.models import packages
from tsx_runtime.errors import InvalidModel

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("handler", "file", "extra"),
    [
        (HANDLER, None, "transformers"),
        (PYFUNC, None, "mlflow"),
        ("base_handler", "net.onnx", "onnx"),
        ("tabular", "model.skops", "tabular"),
    ],
)
async def test_a_missing_extra_is_named_before_a_worker_starts(
    tmp_path, monkeypatch, handler, file, extra
):
    missing_packages = {"transformers", "mlflow", "onnxruntime", "pandas"}
    monkeypatch.setattr(
        packages, "find_spec", lambda name: None if name in missing_packages else find_spec(name)
    )
    extra_fields = {"serializedFile": file} if file else {}

    async with a_registry() as registry:
        path = make_model(tmp_path / "m", "", **extra_fields)
        (path / (file or "unused")).touch()
        with pytest.raises(InvalidModel, match=rf"pip install 'tsx-serve\[{extra}\]'"):
            await registry.register_path(path, order(handler=handler))
        assert not registry.models
