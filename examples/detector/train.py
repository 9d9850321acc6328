"""Train the detector on random drawings, measure it on others, and write its files.

    python examples/detector/train.py

takes about two minutes on two cores and writes next to itself: detector.pth (the weights, for
model.py), metrics.json, and samples/, drawings that it has not seen. `export.py` makes the other
forms of the weights.
"""

import json
import platform
import time
from datetime import date
from pathlib import Path

import numpy as np
import PIL
import torch
from decoding import decode, overlap
from drawings import HELD_OUT_SEED, NAMES, SIZE, Drawing, draw
from model import CLASSES, STRIDE, Detector
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

HERE = Path(__file__).resolve().parent
SEED = 0
STEPS = 700
BATCH = 8
CROP = 192  # pixels; the receptive field is no larger, and small drawings train faster
HELD_OUT = 200
SAMPLES = 8
TARGET = 0.95


def as_input(drawing: Drawing) -> Tensor:
    """Convert a drawing like handler.to_tensor."""
    return 1 - torch.from_numpy(np.array(drawing.image, dtype=np.float32)).unsqueeze(0) / 255


class Targets:
    """The expected output for each cell of a batch of drawings."""

    def __init__(self, drawings: list[Drawing], side: int) -> None:
        middles = torch.arange(side) + 0.5
        self.heat = torch.zeros(len(drawings), CLASSES, side, side)
        self.distances = torch.zeros(len(drawings), 4, side, side)
        # Cells that must predict the box.
        self.near = torch.zeros(len(drawings), side, side, dtype=torch.bool)
        for index, drawing in enumerate(drawings):
            for label, box in drawing.symbols:
                left, top, right, bottom = (value / STRIDE for value in box)
                across, down = middles - (left + right) / 2, middles - (top + bottom) / 2
                apart = across[None, :] ** 2 + down[:, None] ** 2
                bump = torch.exp(-apart / (2 * 0.7**2))
                # At least one cell, and four if the centre lies between them.
                bump[apart < 0.75**2] = 1
                torch.maximum(self.heat[index, label], bump, out=self.heat[index, label])
                near = apart < 1.2**2
                self.near[index] |= near
                columns, rows = (
                    middles[None, :].expand(side, side),
                    middles[:, None].expand(side, side),
                )
                sides = torch.stack([columns - left, rows - top, right - columns, bottom - rows])
                self.distances[index][:, near] = sides[:, near]


def loss_of(maps: Tensor, targets: Targets) -> Tensor:
    """Return the focal loss of centres (CenterNet, arXiv:1904.07850) plus the boxes' error."""
    logits, distances = maps[:, :CLASSES], maps[:, CLASSES:]
    scores = logits.sigmoid()
    here = targets.heat == 1
    hits = -((1 - scores) ** 2) * nn.functional.logsigmoid(logits) * here
    false = -((1 - targets.heat) ** 4) * scores**2 * nn.functional.logsigmoid(-logits) * ~here
    off = (
        nn.functional.smooth_l1_loss(distances, targets.distances, reduction="none", beta=0.1).sum(
            1
        )
        * targets.near
    )
    return (hits.sum() + false.sum()) / here.sum() + off.sum() / targets.near.sum()


def train() -> Detector:
    torch.manual_seed(SEED)
    model = Detector(norm=True).to(memory_format=torch.channels_last)
    nn.init.constant_(model.head[-1].bias[:CLASSES], -3.0)  # nearly all cells are empty
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.008, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.008, total_steps=STEPS)
    total = 0.0
    for step in range(STEPS):
        drawings = [draw(SEED + step * BATCH + index, CROP) for index in range(BATCH)]
        images = torch.stack([as_input(drawing) for drawing in drawings])
        images += torch.randn_like(images) * torch.rand(BATCH, 1, 1, 1) * 0.05  # noise of scans
        loss = loss_of(model(images), Targets(drawings, CROP // STRIDE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        total += loss.item()
        if step % 50 == 49:
            print(f"step {step + 1:3d}: training loss {total / 50:.4f}", flush=True)
            total = 0.0
    return model.eval()


def folded(model: Detector) -> Detector:
    """Return the same network with the norms folded into the convolutions."""
    served = Detector().eval()
    layers = [
        module for module in model.modules() if isinstance(module, nn.Conv2d | nn.BatchNorm2d)
    ]
    plain = iter(module for module in served.modules() if isinstance(module, nn.Conv2d))
    for layer, after in zip(layers, [*layers[1:], None], strict=True):
        if isinstance(layer, nn.Conv2d):
            fused = fuse_conv_bn_eval(layer, after) if isinstance(after, nn.BatchNorm2d) else layer
            next(plain).load_state_dict(fused.state_dict())
    # Convolutions are fastest in this format, which files keep.
    return served.to(memory_format=torch.channels_last)


def measure(model: nn.Module, count: int = HELD_OUT) -> dict[str, float]:
    """Measure a model on held-out drawings.

    Returns:
        `recall`, the share of symbols that are found, `precision`, the share of predictions that
        are right, and `overlap`, the mean intersection over union of these. A right prediction has
        the class of a symbol and at least half of its area.
    """
    right = predicted = expected = 0
    fit = 0.0
    for number in range(count):
        drawing = draw(HELD_OUT_SEED + number)
        with torch.inference_mode():
            symbols = decode(model(as_input(drawing).unsqueeze(0)))[0]
        truth = torch.tensor([symbol.box for symbol in drawing.symbols]) / SIZE
        labels = torch.tensor([symbol.label for symbol in drawing.symbols])
        alike = overlap(truth, symbols["boxes"]) * (labels[:, None] == symbols["labels"][None])
        best = alike.max(1).values if len(symbols["labels"]) else torch.zeros(len(labels))
        right += int((best >= 0.5).sum())
        fit += float(best[best >= 0.5].sum())
        predicted += len(symbols["labels"])
        expected += len(labels)
    return {
        "recall": right / expected,
        "precision": right / max(predicted, 1),
        "overlap": fit / max(right, 1),
    }


def save_samples() -> None:
    """Save drawings beyond the measured ones."""
    (HERE / "samples").mkdir(exist_ok=True)
    for number in range(SAMPLES):
        draw(HELD_OUT_SEED + HELD_OUT + number).image.save(
            HERE / "samples" / f"{number}.png", optimize=True
        )


def main() -> None:
    started = time.monotonic()
    model = folded(train())
    measured = measure(model)
    took = time.monotonic() - started
    print(
        f"held-out drawings: {measured['recall']:.2%} found, {measured['precision']:.2%} right, {took:.0f} s"
    )
    if min(measured["recall"], measured["precision"]) < TARGET:
        raise SystemExit(f"that is below {TARGET:.0%}: nothing was written")
    torch.save(model.state_dict(), HERE / "detector.pth")
    save_samples()
    (HERE / "index_to_name.json").write_text(
        json.dumps(dict(enumerate(NAMES)), indent=2) + "\n", encoding="utf-8"
    )
    metrics = {name: round(value, 4) for name, value in measured.items()} | {
        "held_out": HELD_OUT,
        "trained_on": STEPS * BATCH,
        "seed": SEED,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": (HERE / "detector.pth").stat().st_size,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__.partition("+")[0],
            "numpy": np.__version__,
            "pillow": PIL.__version__,
        },
        "date": date.today().isoformat(),
    }
    (HERE / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
