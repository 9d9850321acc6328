"""Train the digits model, measure it on held-out images, and write all its files.

    python examples/digits/train.py

takes about a minute on one core and writes next to itself: digits.pth, digits.safetensors (weights
alone, for model.py), digits.pt (TorchScript), digits.pt2 (torch.export, any batch size),
metrics.json and images/.
"""

import io
import json
import platform
import time
from datetime import date
from pathlib import Path

import numpy as np
import sklearn
import torch
from data import HELD_OUT, SEED, Split, load_split
from model import DigitNet
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
EPOCHS = 60
BATCH = 64
TARGET = 0.98


def as_input(pixels: np.ndarray) -> Tensor:
    """Convert pixels like handler.to_tensor."""
    return torch.from_numpy(pixels.astype(np.float32) / 255).unsqueeze(1)


def shifted(images: Tensor) -> Tensor:
    """Shift each image by up to one pixel, so that the model learns shapes and not positions."""
    padded = nn.functional.pad(images, (1, 1, 1, 1))
    rows = torch.randint(0, 3, (len(images), 1, 1)) + torch.arange(8).view(1, 8, 1)
    columns = torch.randint(0, 3, (len(images), 1, 1)) + torch.arange(8).view(1, 1, 8)
    return padded[torch.arange(len(images)).view(-1, 1, 1), 0, rows, columns].unsqueeze(1)


def train(split: Split) -> DigitNet:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # Results are then equal on all machines.
    images, labels = as_input(split.train_pixels), torch.from_numpy(split.train_labels)
    model = DigitNet()
    steps = EPOCHS * -(-len(images) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=steps)
    for epoch in range(EPOCHS):
        total = 0.0
        for chosen in torch.randperm(len(images)).split(BATCH):
            loss = nn.functional.cross_entropy(model(shifted(images[chosen])), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(chosen)
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1:2d}: training loss {total / len(images):.4f}")
    return model.eval()


def accuracy(model: nn.Module, split: Split) -> float:
    """Return the share of held-out images with the right prediction."""
    with torch.inference_mode():
        guesses = model(as_input(split.test_pixels)).argmax(1).numpy()
    return float((guesses == split.test_labels).mean())


def save_variants(model: DigitNet) -> list[str]:
    torch.save(model.state_dict(), HERE / "digits.pth")
    save_file(model.state_dict(), HERE / "digits.safetensors")
    save_torchscript(model, HERE / "digits.pt")
    save_program(model, HERE / "digits.pt2")
    return ["digits.pth", "digits.safetensors", "digits.pt", "digits.pt2"]


def save_torchscript(model: DigitNet, path: Path) -> None:
    """Save TorchScript without debug records, which hold paths of the training machine."""
    complete = io.BytesIO()
    torch.jit.save(torch.jit.script(model), complete)
    reader = torch._C.PyTorchFileReader(io.BytesIO(complete.getvalue()))
    writer = torch._C.PyTorchFileWriter(str(path))
    for record in reader.get_all_records():
        # The writer itself adds these records.
        added = ("version", "byteorder", ".data/serialization_id")
        if not record.endswith(".debug_pkl") and record not in added:
            data = reader.get_record(record)
            writer.write_record(record, data, len(data))
    writer.write_end_of_file()


def save_program(model: DigitNet, path: Path) -> None:
    """Export a program for batches of up to 4,096, without paths of the training machine."""
    batch = torch.export.Dim("batch", min=1, max=4096)
    program = torch.export.export(model, (torch.zeros(2, 1, 8, 8),), dynamic_shapes=({0: batch},))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    torch.export.save(program, path)


def save_images(split: Split) -> None:
    """Save the first held-out image of each digit."""
    (HERE / "images").mkdir(exist_ok=True)
    for digit in range(10):
        first = int(np.flatnonzero(split.test_labels == digit)[0])
        Image.fromarray(split.test_pixels[first]).save(
            HERE / "images" / f"{digit}.png", optimize=True
        )


def main() -> None:
    started = time.monotonic()
    split = load_split()
    model = train(split)
    measured = accuracy(model, split)
    print(
        f"held-out accuracy {measured:.2%} on {HELD_OUT} pictures, {time.monotonic() - started:.0f} s"
    )
    if measured < TARGET:
        raise SystemExit(f"the accuracy is below {TARGET:.0%}: nothing was written")
    files = save_variants(model)
    save_images(split)
    metrics = {
        "accuracy": measured,
        "held_out": HELD_OUT,
        "trained_on": len(split.train_labels),
        "seed": SEED,
        "epochs": EPOCHS,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bytes": {file: (HERE / file).stat().st_size for file in files},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__.partition("+")[0],
            "scikit-learn": sklearn.__version__,
            "numpy": np.__version__,
        },
        "date": date.today().isoformat(),
    }
    (HERE / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(metrics["bytes"]))


if __name__ == "__main__":
    main()
