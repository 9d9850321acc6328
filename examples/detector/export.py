"""The trained detector as exported programs, one for each precision.

    python examples/detector/export.py FOLDER

writes detector.pt2, detector-bf16.pt2 and detector-fp16.pt2. All take and return float32, for any
number of drawings.
"""

import sys
from pathlib import Path

import torch
from model import Detector
from torch import nn

HERE = Path(__file__).resolve().parent
SIZE = 384
NAMES = {
    torch.float32: "detector.pt2",
    torch.bfloat16: "detector-bf16.pt2",
    torch.float16: "detector-fp16.pt2",
}


class Within(nn.Module):
    """A network that computes in another dtype than its input and output."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network = network.to(dtype)
        self.dtype = dtype

    def forward(self, drawings: torch.Tensor) -> torch.Tensor:
        maps: torch.Tensor = self.network(drawings.to(self.dtype)).to(torch.float32)
        return maps


def trained() -> Detector:
    model = Detector().eval()
    model.load_state_dict(torch.load(HERE / "detector.pth", weights_only=True))
    return model


def export(dtype: torch.dtype, folder: Path) -> Path:
    """Export a program without source locations, which hold paths of this machine."""
    batch = torch.export.Dim("batch", min=1, max=1024)
    network = trained() if dtype is torch.float32 else Within(trained(), dtype)
    program = torch.export.export(
        network, (torch.zeros(2, 1, SIZE, SIZE),), dynamic_shapes=({0: batch},)
    )
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    path = folder / NAMES[dtype]
    torch.export.save(program, path)
    return path


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for dtype in NAMES:
        print(export(dtype, folder))


if __name__ == "__main__":
    main()
