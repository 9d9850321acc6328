"""The memory pages of weights, which the workers of a model share."""

from __future__ import annotations

import inspect
import re
import zipfile
from pathlib import Path

import pytest
import torch

from tsx_runtime.worker.handlers.models.model_files import load_model_file
from tsx_runtime.worker.handlers.models.sharing import share_with_file

CPU = torch.device("cpu")


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)
        self.register_buffer("table", torch.arange(40_000, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.table[:256]  # type: ignore[no-any-return, index]  # torch's modules


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wide")
    model, example = Wide().eval(), torch.ones(2, 256)
    source = f"import torch\n\n\n{inspect.getsource(Wide)}"
    (directory / "wide_model.py").write_text(source)
    torch.save(model.state_dict(), directory / "wide.pth")
    from safetensors.torch import save_file

    save_file(model.state_dict(), directory / "wide.safetensors")
    torch.jit.save(torch.jit.trace(model, example), directory / "wide.pt")
    torch.jit.save(torch.jit.freeze(torch.jit.trace(model, example)), directory / "frozen.pt")
    torch.export.save(torch.export.export(model, (example,)), directory / "wide.pt2")
    return directory


def mapped_ranges(path: Path) -> list[range]:
    """Return the address ranges at which this process has the file mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [re.split("[- ]", line)[:2] for line in lines if line.endswith(str(path))]
    return [range(int(start, 16), int(end, 16)) for start, end in spans]


@pytest.mark.skipif(
    not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped where"
)
@pytest.mark.parametrize(
    "name", ["wide.pth", "wide.safetensors", "wide.pt", "frozen.pt", "wide.pt2"]
)
def test_the_weights_are_mapped_from_the_file(directory: Path, name: str) -> None:
    path = directory / name
    model_file = directory / "wide_model.py" if name in ("wide.pth", "wide.safetensors") else None
    model = load_model_file(path, model_file, CPU)
    tensors = [*model.parameters(), *model.buffers()]
    if name == "frozen.pt":
        nodes = model.graph.findAllNodes("prim::Constant")
        tensors = [
            node.t("value")
            for node in nodes
            if node.hasAttribute("value") and node.kindOf("value") == "t"
        ]
    large = [tensor for tensor in tensors if tensor.nbytes > 100_000]
    # Freezing drops the unused part of the table.
    assert len(large) == (1 if name == "frozen.pt" else 2)
    spans = mapped_ranges(path)
    assert all(any(tensor.data_ptr() in span for span in spans) for tensor in large)
    with torch.inference_mode():
        torch.testing.assert_close(model(torch.ones(2, 256)).double(), reference(directory))


def reference(directory: Path) -> torch.Tensor:
    model = Wide()
    model.load_state_dict(torch.load(directory / "wide.pth"))
    with torch.inference_mode():
        return model(torch.ones(2, 256)).double()


def test_writing_to_a_shared_weight_does_not_change_the_file(directory: Path) -> None:
    file_bytes = (directory / "wide.pt").read_bytes()
    model = load_model_file(directory / "wide.pt", None, CPU)
    with torch.no_grad():
        model.layer.weight.zero_()
    assert model.layer.weight.abs().sum() == 0
    assert (directory / "wide.pt").read_bytes() == file_bytes


def write_zip(
    path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED, pad: int = 0
) -> None:
    with zipfile.ZipFile(path, "w", compression) as archive:
        if pad:
            archive.writestr("p" * pad, b"")
        for name, content in members.items():
            archive.writestr(name, content)


def test_tensors_with_a_common_storage_still_share_it(tmp_path: Path) -> None:
    storage = torch.arange(20_000, dtype=torch.uint8)
    write_zip(tmp_path / "m.zip", {"data/0": storage.numpy().tobytes()})
    head, tail = storage[:10], storage[10:].view(-1, 10)
    expected = tail.clone()
    assert share_with_file([storage, head, tail], tmp_path / "m.zip") == 20_000
    assert (
        storage.untyped_storage().data_ptr()
        == head.untyped_storage().data_ptr()
        == tail.untyped_storage().data_ptr()
    )
    assert torch.equal(tail, expected)


def test_equal_sizes_are_distinguished_by_content(tmp_path: Path) -> None:
    first, second = torch.ones(5000), torch.full((5000,), 2.0)
    write_zip(
        tmp_path / "m.zip", {"aaaa": first.numpy().tobytes(), "bbbb": second.numpy().tobytes()}
    )
    share_with_file([second, first], tmp_path / "m.zip")
    assert (float(first[0]), float(second[0])) == (1, 2)


@pytest.mark.parametrize("case", ["other content", "compressed", "misaligned", "not a zip"])
def test_a_tensor_that_differs_from_the_file_remains_a_copy(tmp_path: Path, case: str) -> None:
    tensor = torch.arange(5000, dtype=torch.float64)
    content, path = tensor.numpy().tobytes(), tmp_path / "m.zip"
    if case == "not a zip":
        path.write_bytes(content)
    elif case == "other content":
        write_zip(path, {"a": b"\x01" * len(content)})
    elif case == "compressed":
        write_zip(path, {"a": content}, zipfile.ZIP_DEFLATED)
    else:
        shared = []
        # One of eight paddings is aligned to eight bytes.
        for pad in range(1, 9):
            write_zip(path, {"a": content}, pad=pad)
            shared.append(share_with_file([tensor.clone()], path))
        assert sorted(shared) == [0] * 7 + [len(content)]
        return
    assert share_with_file([tensor], path) == 0
    assert torch.equal(tensor, torch.arange(5000, dtype=torch.float64))
