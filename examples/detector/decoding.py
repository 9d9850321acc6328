"""The decoding of the network's output to boxes, in float32 for every precision."""

import torch

THRESHOLD = 0.5  # lowest score of a box
MAX_OVERLAP = 0.4  # Boxes with a larger intersection over union are one symbol.
MAX_BOXES = 100  # boxes in a drawing


def decode(maps: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Return the boxes of each drawing.

    A symbol is a local maximum of the scores, or two if its centre lies between cells.

    Args:
        maps: The network's output, (batch, CLASSES + 4, height, width).

    Returns:
        For each drawing `boxes` (n, 4) as fractions of its sides, `labels` (n) and `scores` (n),
        the highest score first.
    """
    logits, distances = maps.float().split([maps.shape[1] - 4, 4], dim=1)
    scores = logits.sigmoid()
    peaks = scores * (scores == torch.nn.functional.max_pool2d(scores, 3, stride=1, padding=1))
    return [_best_boxes(peak, sides) for peak, sides in zip(peaks, distances, strict=True)]


def _best_boxes(peaks: torch.Tensor, distances: torch.Tensor) -> dict[str, torch.Tensor]:
    height, width = peaks.shape[1:]
    best, labels = peaks.max(0)
    # A stable order gives equal results on all devices.
    scores, cells = best.flatten().sort(descending=True, stable=True)
    count = min(MAX_BOXES, int((scores >= THRESHOLD).sum()))
    scores, cells = scores[:count], cells[:count]
    across, down = cells % width + 0.5, cells // width + 0.5
    left, top, right, bottom = distances.flatten(1)[:, cells]
    sides = torch.stack(
        [
            (across - left) / width,
            (down - top) / height,
            (across + right) / width,
            (down + bottom) / height,
        ],
        1,
    )
    boxes = sides.clamp(0, 1)
    indices = _without_overlaps(boxes)
    return {
        "boxes": boxes[indices],
        "labels": labels.flatten()[cells][indices],
        "scores": scores[indices],
    }


def _without_overlaps(boxes: torch.Tensor) -> list[int]:
    """Return the indices of the boxes that no earlier box covers."""
    overlaps = overlap(boxes, boxes).tolist()
    indices: list[int] = []
    for index, row in enumerate(overlaps):
        if all(row[earlier] < MAX_OVERLAP for earlier in indices):
            indices.append(index)
    return indices


def overlap(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the intersection over union of all pairs: (n, 4) and (m, 4) to (n, m)."""
    low = torch.maximum(first[:, None, :2], second[None, :, :2])
    high = torch.minimum(first[:, None, 2:], second[None, :, 2:])
    common = (high - low).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (first, second)]
    return common / (areas[0][:, None] + areas[1][None] - common).clamp(min=1e-9)
