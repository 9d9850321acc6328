"""From what the network says of each cell to a list of boxes; in float32, whatever the network
reckons with.
"""

import torch

THRESHOLD = 0.5  # of the score, for a box to count
OVERLAP = 0.4  # of two boxes' common area in what both cover: beyond it they are one symbol
MOST = 100  # boxes of a drawing


def decode(maps: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Of each drawing `boxes` (n, 4) as fractions of its sides, `labels` and `scores`, the surest
    of each symbol.

    A symbol is a peak among its neighbours, and sometimes two, where its middle lies between cells.
    """
    logits, distances = maps.float().split([maps.shape[1] - 4, 4], dim=1)
    scores = logits.sigmoid()
    peaks = scores * (scores == torch.nn.functional.max_pool2d(scores, 3, stride=1, padding=1))
    return [_surest(peak, sides) for peak, sides in zip(peaks, distances, strict=True)]


def _surest(peaks: torch.Tensor, distances: torch.Tensor) -> dict[str, torch.Tensor]:
    height, width = peaks.shape[1:]
    best, labels = peaks.max(0)
    scores, cells = best.flatten().sort(
        descending=True, stable=True
    )  # of equals the first, wherever it runs
    count = min(MOST, int((scores >= THRESHOLD).sum()))
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
    kept = _apart(boxes)
    return {"boxes": boxes[kept], "labels": labels.flatten()[cells][kept], "scores": scores[kept]}


def _apart(boxes: torch.Tensor) -> list[int]:
    """The places of those boxes that no earlier one covers."""
    overlaps = overlap(boxes, boxes).tolist()
    kept: list[int] = []
    for place, row in enumerate(overlaps):
        if all(row[other] < OVERLAP for other in kept):
            kept.append(place)
    return kept


def overlap(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Intersection over union of each box with each: (n, 4) and (m, 4) -> (n, m)."""
    low = torch.maximum(first[:, None, :2], second[None, :, :2])
    high = torch.minimum(first[:, None, 2:], second[None, :, 2:])
    common = (high - low).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (first, second)]
    return common / (areas[0][:, None] + areas[1][None] - common).clamp(min=1e-9)
