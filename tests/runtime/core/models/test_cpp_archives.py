"""Archives for TorchServe's C++ backend; the server runs their TorchScript."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pytest
import torch

from tests.kit.jobs import a_waiting_job, answer_of
from tests.support.clients.talker import order
from tsx_runtime.errors import BadRequest
from tsx_runtime.worker.exceptions import BadRows
from tsx_runtime.worker.handlers.torchscript import TorchScriptHandler

pytestmark = pytest.mark.anyio


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def write_cpp_archive(
    path: Path, handler: str = "TorchScriptHandler", *, script: bool = True
) -> Path:
    buffer = io.BytesIO()
    if script:
        torch.jit.save(torch.jit.script(Double()), buffer)
    else:
        torch.save({"weight": torch.zeros(2)}, buffer)
    model = {
        "modelName": path.stem,
        "modelVersion": "1.0",
        "handler": handler,
        "serializedFile": "model.pt",
    }
    with zipfile.ZipFile(path, "w") as mar:
        mar.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "LSP", "model": model}))
        mar.writestr("model.pt", buffer.getvalue())
    return path


def save_tensor(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


async def test_torchscript_of_a_cpp_archive_exchanges_torch_save_tensors(registry, tmp_path):
    path = write_cpp_archive(tmp_path / "double.mar")

    version = await registry.register_path(path, order(batch_size=4))
    assert version.runtime == "LSP"
    bodies = [
        save_tensor(torch.tensor([1.0, 2.0])),
        save_tensor(torch.tensor([[3.0]])),
        b"no tensor",
        save_tensor(torch.tensor([4.0, 5.0])),
    ]
    jobs = [a_waiting_job(body) for body in bodies]
    for job in jobs:
        version.submit(job)
    answers = [await answer_of(job) for job in jobs]
    assert [answer.status for answer in answers] == [200, 200, 400, 200]
    tensors = [
        torch.load(io.BytesIO(await answers[index].read_all(1 << 20)), weights_only=True).tolist()
        for index in (0, 1, 3)
    ]
    assert tensors == [[2.0, 4.0], [[6.0]], [8.0, 10.0]]
    assert b"torch.save writes it" in await answers[2].read_all(1 << 20)


@pytest.mark.parametrize("body", [b"\x80\x02R.", b"\x80\x02h\x01.", b"\x80\x02X\x05"])
def test_only_the_corrupt_tensor_of_a_batch_is_refused(body):
    with pytest.raises(BadRows) as exc_info:
        TorchScriptHandler().preprocess([{"body": save_tensor(torch.zeros(1))}, {"body": body}])
    assert list(exc_info.value.faults) == [1]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"handler": "libmnist:MnistHandler"},
            "its handler libmnist:MnistHandler is compiled code, which tsx does not run. Pack the model again",
        ),
        ({"script": False}, "model.pt holds eager"),
    ],
)
async def test_cpp_only_models_are_refused_with_the_reason(registry, tmp_path, options, text):
    path = write_cpp_archive(tmp_path / "other.mar", **options)

    with pytest.raises(BadRequest, match=text):
        await registry.register_path(path, order())
    assert not registry.models
