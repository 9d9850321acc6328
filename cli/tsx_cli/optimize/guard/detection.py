"""The mean average precision of boxes, as COCO computes it.

The precision is averaged over 101 points of recall, over IoU 0.5, 0.55, ..., 0.95 and over classes.
A class without objects in the ground truth is ignored, because its recall is undefined.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

THRESHOLDS = [0.5 + 0.05 * step for step in range(10)]
MAX_DETECTIONS = 100  # per image and class
_ALL = (True,) * len(THRESHOLDS)

Box = Sequence[float]  # x0, y0, x1, y1
Boxes = Mapping[str, Sequence[tuple[float, Box]]]  # label -> scores and boxes, the best first


class Detections(NamedTuple):
    """The objects and the detections in one image, by label.

    `detected` has the score of each detection, and whether it matches an object at each IoU.
    """

    objects: Mapping[str, int]
    detected: Mapping[str, Sequence[tuple[float, Sequence[bool]]]]


def boxes_of(value: Any) -> Boxes:
    """Return the boxes by label from [{"cat": [x0, y0, x1, y1], "score": 0.9}].

    This is the format of the handler object_detector. Labels (ground truth) need no scores.

    Raises:
        ValueError: The value is not a list of such boxes.
    """
    detected: dict[str, list[tuple[float, Box]]] = defaultdict(list)
    if not isinstance(value, list):
        raise ValueError("it is not a list of boxes")
    for item in value:
        labels = (
            [(label, box) for label, box in item.items() if label != "score"]
            if isinstance(item, dict)
            else []
        )
        if len(labels) != 1 or not isinstance(labels[0][1], list) or len(labels[0][1]) != 4:
            raise ValueError('a box is written {"cat": [x0, y0, x1, y1], "score": 0.9}')
        label, box = labels[0]
        if not all(
            type(number) in (int, float) and math.isfinite(number)
            for number in (*box, item.get("score", 1.0))
        ):
            raise ValueError("a box or its score is not a number")
        detected[label].append((item.get("score", 1.0), box))
    return {label: sorted(boxes, key=lambda pair: -pair[0]) for label, boxes in detected.items()}


def match(detected: Boxes, truth: Boxes) -> Detections:
    counts = {label: len(boxes) for label, boxes in truth.items()}
    return Detections(
        counts,
        {
            label: _match_boxes(boxes[:MAX_DETECTIONS], truth.get(label, ()))
            for label, boxes in detected.items()
        },
    )


def perfect(truth: Boxes) -> Detections:
    """Return a detection of all objects, with higher scores than any other detection."""
    counts = {label: len(boxes) for label, boxes in truth.items()}
    return Detections(
        counts, {label: [(math.inf, _ALL)] * count for label, count in counts.items()}
    )


def average_precision(images: Sequence[Detections]) -> Callable[[Sequence[int]], float]:
    """Return a function that maps the weight of each image to the mean average precision.

    The weight is the number of times that an image counts.
    """
    objects: dict[str, list[tuple[int, int]]] = defaultdict(list)
    detected: dict[str, list[tuple[float, int, Sequence[bool]]]] = defaultdict(list)
    for row, image in enumerate(images):
        for label, count in image.objects.items():
            objects[label].append((row, count))
        for label, detections in image.detected.items():
            detected[label] += [(-score, row, hits) for score, hits in detections]
    classes = []
    for label, counts in objects.items():
        sorted_detections = sorted(detected[label])
        # Most IoU levels have the same hits, so each distinct list is evaluated once.
        hits_by_iou = Counter(
            tuple(hits[level] for _, _, hits in sorted_detections)
            for level in range(len(THRESHOLDS))
        )
        classes.append((counts, [row for _, row, _ in sorted_detections], hits_by_iou))

    if not classes:
        return lambda _: 0.0

    def mean_over_classes(times: Sequence[int]) -> float:
        precisions = []
        for counts, rows, hits_by_iou in classes:
            total = sum(times[row] * count for row, count in counts)
            if total:
                weights = [times[row] for row in rows]
                precisions.append(
                    sum(
                        _precision(weights, hits, total) * levels
                        for hits, levels in hits_by_iou.items()
                    )
                    / len(THRESHOLDS)
                )
        return fmean(precisions) if precisions else 1.0

    return mean_over_classes


def _precision(weights: Sequence[int], hits: Sequence[bool], objects: int) -> float:
    detections = correct = 0
    points = []  # (detected objects, precision), the highest score first
    for weight, hit in zip(weights, hits, strict=True):
        detections += weight
        if hit and weight:
            correct += weight
            points.append((correct, correct / detections))
    total, best, step = 0.0, 0.0, 100
    for correct, precision in [*reversed(points), (0, 0.0)]:
        # Only points with more detected objects reach this recall.
        while step >= 0 and step * objects > correct * 100:
            total += best
            step -= 1
        best = max(best, precision)
    return (total + best * (step + 1)) / 101


def _match_boxes(
    detected: Sequence[tuple[float, Box]], truth: Sequence[tuple[float, Box]]
) -> list[tuple[float, list[bool]]]:
    overlaps = [[_iou(box, true_box) for _, true_box in truth] for _, box in detected]
    free_objects = [set(range(len(truth))) for _ in THRESHOLDS]
    matched = []
    for (score, _), overlaps_of_box in zip(detected, overlaps, strict=True):
        hits = []
        for level, threshold in enumerate(THRESHOLDS):
            best = max(free_objects[level], key=overlaps_of_box.__getitem__, default=None)
            hit = best is not None and overlaps_of_box[best] >= threshold
            if hit:
                free_objects[level].discard(best)
            hits.append(hit)
        matched.append((score, hits))
    return matched


def _iou(first: Box, second: Box) -> float:
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    overlap = max(0.0, width) * max(0.0, height)
    areas = sum(max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1]) for box in (first, second))
    return overlap / (areas - overlap) if overlap else 1.0 if list(first) == list(second) else 0.0
