"""The detector example finds symbols in new drawings, in each form and precision."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from PIL import Image

from tsx_archiver import ArchiveSpec, write_archive
from tsx_runtime.core.registry.standalone import open_model
from tsx_runtime.core.scheduling.job import WaitingJob
from tsx_runtime.settings.schema import Settings
from tsx_runtime.wire import request_meta

pytestmark = pytest.mark.slow


DETECTOR = Path(__file__).parents[2] / "examples" / "detector"
MODULES = ("drawings", "decoding", "model", "train", "export")
METRICS = json.loads((DETECTOR / "metrics.json").read_text(encoding="utf-8"))
SAMPLES = sorted((DETECTOR / "samples").glob("*.png"))
SIZE = 384

Things = list[dict[str, Any]]


@contextmanager
def as_scripts_import() -> Iterator[None]:
    """Let the example's scripts import each other, and remove their short names afterwards."""
    other_modules = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    sys.path.insert(0, str(DETECTOR))
    try:
        yield
    finally:
        sys.path.remove(str(DETECTOR))
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(other_modules)


@pytest.fixture(scope="module")
def example() -> dict[str, ModuleType]:
    with as_scripts_import():
        return {name: importlib.import_module(name) for name in MODULES}


@pytest.fixture(scope="module")
def exported(
    example: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory
) -> dict[torch.dtype, Path]:
    folder = tmp_path_factory.mktemp("exported")
    return {
        dtype: example["export"].export(dtype, folder) for dtype in (torch.float32, torch.bfloat16)
    }


@pytest.fixture(scope="module")
def true_symbols(example: dict[str, ModuleType]) -> list[Things]:
    """Return the symbols of each sample, with boxes as fractions of the image's sides."""
    drawings = example["drawings"]
    first = drawings.HELD_OUT_SEED + METRICS["held_out"]
    return [
        [
            {drawings.NAMES[symbol.label]: [side / SIZE for side in symbol.box]}
            for symbol in drawings.draw(first + number).symbols
        ]
        for number in range(len(SAMPLES))
    ]


def overlap(first: list[float], second: list[float]) -> float:
    width, height = (
        min(first[side + 2], second[side + 2]) - max(first[side], second[side]) for side in (0, 1)
    )
    intersection = max(width, 0) * max(height, 0)
    return intersection / (
        sum((box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)) - intersection
    )


def count_found(detections: Things, symbols: Things) -> int:
    """Count the symbols detected with the right name and at least half of the area in common."""
    return sum(
        any(overlap(box, detection[name]) >= 0.5 for detection in detections if name in detection)
        for symbol in symbols
        for name, box in symbol.items()
    )


def boxes_of(outputs: dict[str, torch.Tensor]) -> Things:
    return [
        {str(label): box}
        for label, box in zip(outputs["labels"].tolist(), outputs["boxes"].tolist(), strict=True)
    ]


def test_the_weights_reach_their_recorded_metrics(example: dict[str, ModuleType]) -> None:
    measured = example["train"].measure(example["export"].trained(), count=12)
    assert METRICS["recall"] >= 0.95
    assert METRICS["precision"] >= 0.95
    # The tolerance is large, since the test draws 12 images instead of 200.
    assert measured["recall"] == pytest.approx(METRICS["recall"], abs=0.06)
    assert measured["precision"] == pytest.approx(METRICS["precision"], abs=0.06)


def test_weights_are_small_and_contain_no_paths() -> None:
    content = (DETECTOR / "detector.pth").read_bytes()
    assert len(content) == METRICS["bytes"] < 1_000_000
    assert str(DETECTOR).encode() not in content


def test_drawings_are_reproducible_and_their_symbols_do_not_overlap(
    example: dict[str, ModuleType],
) -> None:
    draw = example["drawings"].draw
    for seed in range(5):
        drawing = draw(seed)
        second_drawing = draw(seed)
        assert second_drawing.symbols == drawing.symbols
        assert second_drawing.image.tobytes() == drawing.image.tobytes()
        boxes = [symbol.box for symbol in drawing.symbols]
        assert len(boxes) >= 3
        assert all(0 <= side <= SIZE for box in boxes for side in box)
        assert all(
            overlap(first, second) == 0
            for position, first in enumerate(boxes)
            for second in boxes[:position]
        )


def test_an_exported_program_equals_the_weights_at_any_batch_size(
    example: dict[str, ModuleType], exported: dict[torch.dtype, Path]
) -> None:
    drawings_module = example["drawings"]
    drawings = [drawings_module.draw(drawings_module.HELD_OUT_SEED + number) for number in range(3)]
    images = torch.stack([example["train"].as_input(drawing) for drawing in drawings])
    model, decode = example["export"].trained(), example["decoding"].decode
    programs = {dtype: torch.export.load(path).module() for dtype, path in exported.items()}
    with torch.inference_mode():
        maps = model(images)
        torch.testing.assert_close(programs[torch.float32](images), maps, rtol=1e-3, atol=1e-3)
        for program in programs.values():
            outputs = program(images)
            assert outputs.dtype is torch.float32
            torch.testing.assert_close(program(images[:1]), outputs[:1], rtol=0.05, atol=0.2)
            for detections, expected in zip(decode(outputs), decode(maps), strict=True):
                assert len(detections["labels"]) == len(expected["labels"])
                assert count_found(boxes_of(detections), boxes_of(expected)) == len(
                    expected["labels"]
                )


def test_two_peaks_of_one_symbol_give_one_box(
    example: dict[str, ModuleType],
) -> None:
    decode = example["decoding"].decode
    maps = torch.full((2, 12, 8, 8), -9.0)
    maps[0, 8:] = 1.5
    # Rounding to bfloat16 makes neighbours equal.
    maps[0, 2, 3, 3:5] = 4.0
    detected, none = decode(maps.bfloat16())
    assert detected["labels"].tolist() == [2]
    assert detected["boxes"].dtype is torch.float32
    assert detected["boxes"][0].tolist() == pytest.approx([0.25, 0.25, 0.625, 0.625])
    assert none["boxes"].shape == (0, 4)


async def detect(archive: Path, cache: Path) -> list[Things]:
    """Return one worker's answers to one batch of the samples."""
    async with open_model(archive, Settings(cache_dir=cache), batch_size=len(SAMPLES)) as version:
        meta = request_meta("test", b"", [(b"Content-Type", b"image/png")])
        jobs = [WaitingJob(meta, sample.read_bytes(), time.monotonic()) for sample in SAMPLES]
        for job in jobs:
            version.submit(job)
        return [json.loads((await job.done).body) for job in jobs]


@pytest.mark.parametrize("form", ["detector.pth", "detector.pth in bf16", "detector-bf16.pt2"])
def test_each_form_is_served_and_detects_the_samples_symbols(
    form: str, exported: dict[torch.dtype, Path], true_symbols: list[Things], tmp_path: Path
) -> None:
    eager = form.startswith("detector.pth")
    config = tmp_path / "model-config.yaml"
    config.write_text(
        (DETECTOR / "model-config.yaml").read_text(encoding="utf-8")
        + ("precision: bf16\n" if " in " in form else "")
    )
    spec = ArchiveSpec(
        "detector",
        str(DETECTOR / "handler.py"),
        serialized_file=DETECTOR / "detector.pth" if eager else exported[torch.bfloat16],
        model_file=DETECTOR / "model.py" if eager else None,
        extra_files=[DETECTOR / "decoding.py", DETECTOR / "index_to_name.json"],
        config_file=config,
    )
    answers = asyncio.run(detect(write_archive(spec, tmp_path), tmp_path / "cache"))
    symbols = sum(map(len, true_symbols))
    assert sum(map(count_found, answers, true_symbols)) >= 0.95 * symbols
    assert sum(map(len, answers)) <= 1.05 * symbols
    for detections in answers:
        names = [next(iter(detection)) for detection in detections]
        assert names == sorted(names)
        assert all(detection["score"] >= 0.5 for detection in detections)


def test_samples_are_complete_drawings_in_small_files() -> None:
    assert len(SAMPLES) == 8
    for sample in SAMPLES:
        assert sample.stat().st_size < 10_000
        with Image.open(sample) as image:
            assert image.size == (SIZE, SIZE)
