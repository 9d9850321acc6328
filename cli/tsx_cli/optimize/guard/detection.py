"""The mean average precision of boxes, as COCO computes it.

It is the mean of the precision at 101 points of recall, over IoU 0.5, 0.55, ..., 0.95 and over
classes. A class without an object in the ground truth does not count: its recall is undefined.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

THRESHOLDS = [0.5 + 0.05 * step for step in range(10)]
MOST = 100  # detections of an image and class that count
_ALL = (True,) * len(THRESHOLDS)

Box = Sequence[float]  # x0, y0, x1, y1
Boxes = Mapping[str, Sequence[tuple[float, Box]]]  # label -> scores and boxes, the best first


class Detections(NamedTuple):
    """One image, by label: the number of objects, and the score of each detection with whether it
    matches at each IoU.
    """

    objects: Mapping[str, int]
    found: Mapping[str, Sequence[tuple[float, Sequence[bool]]]]


def boxes_of(value: Any) -> Boxes:
    """From [{"cat": [x0, y0, x1, y1], "score": 0.9}], as the handler object_detector answers;
    labels need no scores. Raises ValueError.
    """
    found: dict[str, list[tuple[float, Box]]] = defaultdict(list)
    if not isinstance(value, list):
        raise ValueError("it is not a list of boxes")
    for item in value:
        named = (
            [(label, box) for label, box in item.items() if label != "score"]
            if isinstance(item, dict)
            else []
        )
        if len(named) != 1 or not isinstance(named[0][1], list) or len(named[0][1]) != 4:
            raise ValueError('a box is written {"cat": [x0, y0, x1, y1], "score": 0.9}')
        label, box = named[0]
        if not all(
            type(number) in (int, float) and math.isfinite(number)
            for number in (*box, item.get("score", 1.0))
        ):
            raise ValueError("a box or its score is not a number")
        found[label].append((item.get("score", 1.0), box))
    return {label: sorted(boxes, key=lambda each: -each[0]) for label, boxes in found.items()}


def match(found: Boxes, truth: Boxes) -> Detections:
    counts = {label: len(boxes) for label, boxes in truth.items()}
    return Detections(
        counts,
        {label: _matched(boxes[:MOST], truth.get(label, ())) for label, boxes in found.items()},
    )


def perfect(truth: Boxes) -> Detections:
    """All objects, detected with higher scores than anything else."""
    counts = {label: len(boxes) for label, boxes in truth.items()}
    return Detections(
        counts, {label: [(math.inf, _ALL)] * count for label, count in counts.items()}
    )


def average_precision(images: Sequence[Detections]) -> Callable[[Sequence[int]], float]:
    """A function of how many times each image counts."""
    objects: dict[str, list[tuple[int, int]]] = defaultdict(list)
    found: dict[str, list[tuple[float, int, Sequence[bool]]]] = defaultdict(list)
    for row, image in enumerate(images):
        for label, count in image.objects.items():
            objects[label].append((row, count))
        for label, detections in image.found.items():
            found[label] += [(-score, row, hits) for score, hits in detections]
    classes = []
    for label, counts in objects.items():
        ordered = sorted(found[label])
        hits_by_iou = Counter(
            tuple(hits[level] for _, _, hits in ordered) for level in range(len(THRESHOLDS))
        )  # most are alike
        classes.append((counts, [row for _, row, _ in ordered], hits_by_iou))

    if not classes:
        return lambda _: 0.0

    def mean_over_classes(times: Sequence[int]) -> float:
        precisions = []
        for counts, rows, hits_by_iou in classes:
            total = sum(times[row] * count for row, count in counts)
            if total:
                weights = [times[row] for row in rows]
                precisions.append(
                    sum(_precision(weights, hits, total) * of for hits, of in hits_by_iou.items())
                    / len(THRESHOLDS)
                )
        return fmean(precisions) if precisions else 1.0

    return mean_over_classes


def _precision(weights: Sequence[int], hits: Sequence[bool], objects: int) -> float:
    seen = right = 0
    points = []  # (objects found, precision there), the most certain first
    for weight, hit in zip(weights, hits, strict=True):
        seen += weight
        if hit and weight:
            right += weight
            points.append((right, right / seen))
    total, best, step = 0.0, 0.0, 100
    for right, precision in [*reversed(points), (0, 0.0)]:
        while (
            step >= 0 and step * objects > right * 100
        ):  # this recall is only reached by the points after this one
            total += best
            step -= 1
        best = max(best, precision)
    return (total + best * (step + 1)) / 101


def _matched(
    found: Sequence[tuple[float, Box]], truth: Sequence[tuple[float, Box]]
) -> list[tuple[float, list[bool]]]:
    overlaps = [[_iou(box, other) for _, other in truth] for _, box in found]
    free = [set(range(len(truth))) for _ in THRESHOLDS]
    matched = []
    for (score, _), row in zip(found, overlaps, strict=True):
        hits = []
        for level, threshold in enumerate(THRESHOLDS):
            best = max(free[level], key=row.__getitem__, default=None)
            hit = best is not None and row[best] >= threshold
            if hit:
                free[level].discard(best)
            hits.append(hit)
        matched.append((score, hits))
    return matched


def _iou(one: Box, other: Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    both = max(0.0, width) * max(0.0, height)
    areas = sum(max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1]) for box in (one, other))
    return both / (areas - both) if both else 1.0 if list(one) == list(other) else 0.0
