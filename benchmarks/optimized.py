"""The results of `tsx optimize` for four models, each trained here or in examples/.

    python benchmarks/optimized.py [digits] [detector] [resnet18] [bert] [--time-limit 10m]
    [--directory DIR]

The results are the winning form, its speed relative to the archive's model in the same run, and its
loss of accuracy. resnet18 and bert are trained once into the directory, which takes minutes: on the
digits of scikit-learn in 224 x 224 pixels, and on synthetic texts of eight topics. The guard
compares held-out rows with labels: top1>=-0.5% for digits, resnet18 and bert, map>=-0.5% for the
boxes of the detector. Each run writes its report into the directory.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import machine
import servers

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "benchmarks" / "models"
DIGITS, DETECTOR = ROOT / "examples" / "digits", ROOT / "examples" / "detector"
# inputs, of which larger models use half; 256 are for calibration, the others for the guard
ROWS = 3200
sys.path[:0] = [str(MODELS)]


class Subject(NamedTuple):
    """An archive, its inputs, and the options of its guard."""

    archive: Path
    inputs: Path
    guard: list[str]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", metavar="|".join(SUBJECTS))
    parser.add_argument("--time-limit", default="10m")
    parser.add_argument("--directory", type=Path, default=Path("optimized"))
    options = parser.parse_args()
    print(machine.describe(), flush=True)
    for name in options.models or SUBJECTS:
        subject_directory = options.directory.absolute() / name
        subject_directory.mkdir(parents=True, exist_ok=True)
        subject = SUBJECTS[name](subject_directory)
        show(name, optimize(subject, subject_directory / "run", options.time_limit))


def optimize(subject: Subject, run: Path, limit: str) -> dict[str, Any]:
    """Run `tsx optimize`, or resume a run, and return its results.json."""
    command = [
        servers.TSX,
        "optimize",
        subject.archive,
        "--input",
        subject.inputs,
        *subject.guard,
        "--time-limit",
        limit,
        "--output",
        run,
    ]
    if (run / "journal.jsonl").exists():
        command = [servers.TSX, "optimize", subject.archive, "--resume", run, "--time-limit", limit]
    subprocess.run(list(map(str, command)), check=False, stdout=sys.stderr)
    results: dict[str, Any] = json.loads((run / "results.json").read_text())
    return results


def show(name: str, results: dict[str, Any]) -> None:
    print(
        f"\n{name}: {results['limit']}, {results['held_out_rows']} held-out rows; best:"
        f" {results['best'] or 'the archive as it is'}"
    )
    ratios = "".join(f"{f'x at {size}':>20}" for size in results["batch_sizes"])
    print(f"{'form':20}{ratios}{'loss':>9}{'at most':>9}{'MiB':>8}{'files':>8}{'load s':>8}  state")
    for form in sorted(results["forms"], key=lambda result: -(result["speedup"] or 0.0)):
        if not form["sizes"]:
            print(f"{form['name']:20}  {form['state']}: {form['reason'].partition(chr(10))[0]}")
            continue
        ratios = "".join(
            f"{size['ratio']:8.2f} [{size['low']:.2f}, {size['high']:.2f}]".rjust(20)
            for size in form["sizes"]
        )
        loss = (
            ""
            if form["guard"] is None
            else f"{form['guard']['loss']:9.2%}{form['guard']['loss_bound']:9.2%}"
        )
        needs = (
            f"{form['memory_mib'] or 0:8.0f}{form['size_mib'] or 0:8.1f}"
            f"{form['load_seconds'] or 0:8.1f}"
        )
        print(f"{form['name']:20}{ratios}{loss:18}{needs}  {form['state']}", flush=True)


def digits(directory: Path) -> Subject:
    labels = _digits_inputs(
        directory / "inputs", ROWS, 8, json.loads((DIGITS / "index_to_name.json").read_text())
    )
    files = (
        "--serialized-file",
        DIGITS / "digits.pth",
        "--model-file",
        DIGITS / "model.py",
        "--handler",
        DIGITS / "handler.py",
    )
    archive = servers.archive(
        directory, "digits", *files, "--extra-files", DIGITS / "index_to_name.json"
    )
    return Subject(
        archive, directory / "inputs", [*_labelled(directory, labels), "--max-loss", "top1>=-0.5%"]
    )


def detector(directory: Path) -> Subject:
    sys.path.insert(0, str(DETECTOR))
    from drawings import HELD_OUT_SEED, NAMES, SIZE, draw

    inputs, labels = directory / "inputs", {}
    inputs.mkdir(exist_ok=True)
    for number in range(ROWS // 2):
        drawing = draw(HELD_OUT_SEED + number)
        drawing.image.save(inputs / f"{number:04}.png")
        labels[f"{number:04}.png"] = [
            {NAMES[label]: [side / SIZE for side in box]} for label, box in drawing.symbols
        ]
    files = (
        "--serialized-file",
        DETECTOR / "detector.pth",
        "--model-file",
        DETECTOR / "model.py",
        "--handler",
        DETECTOR / "handler.py",
    )
    extra_files = f"{DETECTOR / 'decoding.py'},{DETECTOR / 'index_to_name.json'}"
    archive = servers.archive(directory, "detector", *files, "--extra-files", extra_files)
    return Subject(archive, inputs, [*_labelled(directory, labels), "--max-loss", "map>=-0.5%"])


def resnet18(directory: Path) -> Subject:
    import torch
    from resnet18 import ResNet18

    weights, side = directory / "resnet18.pth", 224
    if not weights.exists():
        split = _split()
        pixels = torch.from_numpy(split.train_pixels)[:, None] / 255
        mean, deviation = (
            torch.tensor(values)[:, None, None]
            for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        )

        def batch(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
            resized = torch.nn.functional.interpolate(
                pixels[rows], (side, side), mode="bicubic"
            ).clamp(0, 1)
            return (((resized - mean) / deviation).to(memory_format=torch.channels_last),)

        _train(ResNet18(), batch, torch.from_numpy(split.train_labels), weights, steps=120, size=24)
    labels = _digits_inputs(
        directory / "inputs", ROWS // 2, side, {str(digit): str(digit) for digit in range(10)}
    )
    files = (
        "--serialized-file",
        weights,
        "--model-file",
        MODELS / "resnet18.py",
        "--handler",
        "image_classifier",
    )
    return Subject(
        servers.archive(directory, "resnet18", *files),
        directory / "inputs",
        [*_labelled(directory, labels), "--max-loss", "top1>=-0.5%"],
    )


def bert(directory: Path) -> Subject:
    import torch
    from bert import CLASSES, Bert
    from bert_tokens import padded, tokens_of

    texts, topics = _texts(CLASSES, 6000 + ROWS)
    weights = directory / "bert.pth"
    if not weights.exists():
        numbers = [tokens_of(text) for text in texts[:6000]]

        def batch(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(padded([numbers[row] for row in rows]).values())

        _train(Bert(), batch, torch.tensor(topics[:6000]), weights, steps=400, size=32)
    inputs, labels = directory / "inputs", {}
    inputs.mkdir(exist_ok=True)
    for number, (text, topic) in enumerate(zip(texts[6000:], topics[6000:], strict=True)):
        (inputs / f"{number:04}.txt").write_text(text)
        labels[f"{number:04}.txt"] = f"topic {topic}"
    files = (
        "--serialized-file",
        weights,
        "--model-file",
        MODELS / "bert.py",
        "--handler",
        MODELS / "bert_handler.py",
    )
    archive = servers.archive(
        directory,
        "bert",
        *files,
        "--extra-files",
        f"{MODELS / 'bert_layer.py'},{MODELS / 'bert_tokens.py'}",
    )
    return Subject(archive, inputs, [*_labelled(directory, labels), "--max-loss", "top1>=-0.5%"])


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "digits": digits,
    "detector": detector,
    "resnet18": resnet18,
    "bert": bert,
}


def _split() -> Any:
    sys.path.insert(0, str(DIGITS))
    from data import load_split

    return load_split()


def _digits_inputs(directory: Path, rows: int, side: int, names: dict[str, str]) -> dict[str, str]:
    """Write the held-out images in a given size, several times with other noise; return the labels."""
    import numpy as np
    from PIL import Image

    directory.mkdir(exist_ok=True)
    split, random_source, labels = _split(), np.random.default_rng(0), {}
    for number in range(rows):
        row = number % len(split.test_pixels)
        noisy_image = np.clip(
            split.test_pixels[row] + random_source.normal(0, 8, (8, 8)), 0, 255
        ).astype(np.uint8)
        Image.fromarray(noisy_image).resize((side, side), Image.Resampling.BICUBIC).save(
            directory / f"{number:04}.png"
        )
        labels[f"{number:04}.png"] = names[str(split.test_labels[row])]
    return labels


def _texts(topics: int, count: int) -> tuple[list[str], list[int]]:
    """Return synthetic texts and their topics.

    A text has 6 to 60 common words, some words of its topic, and fewer of another topic.
    """
    random_source = random.Random(0)
    common = [f"word{number}" for number in range(500)]
    topic_words = [[f"topic{topic}-{number}" for number in range(60)] for topic in range(topics)]
    texts, topic_numbers = [], []
    for _ in range(count):
        topic, other_topic = random_source.sample(range(topics), 2)
        length = random_source.randint(6, 60)
        text = (
            random_source.choices(common, k=length)
            + random_source.choices(topic_words[topic], k=3 + length // 8)
            + random_source.choices(topic_words[other_topic], k=1 + length // 16)
        )
        random_source.shuffle(text)
        texts.append(" ".join(text))
        topic_numbers.append(topic)
    return texts, topic_numbers


def _train(
    model: Any,
    batch: Callable[[Any], tuple[Any, ...]],
    labels: Any,
    path: Path,
    *,
    steps: int,
    size: int,
) -> None:
    import torch

    torch.manual_seed(0)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-4, total_steps=steps)
    for step in range(steps):
        rows = torch.randint(len(labels), (size,))
        with torch.autocast("cpu", torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(*batch(rows)).float(), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 20 == 0:
            print(
                f"training {path.stem}: step {step} of {steps}, loss {loss.item():.3f}",
                file=sys.stderr,
                flush=True,
            )
    torch.save(model.eval().state_dict(), path)


def _labelled(directory: Path, labels: dict[str, Any]) -> list[str]:
    path = directory / "labels.json"
    path.write_text(json.dumps(labels))
    return ["--labels", str(path)]


if __name__ == "__main__":
    main()
