"""Average precision of boxes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tsx_cli.optimize.guard.detection import Detections, average_precision, boxes_of, match, perfect


def boxes(*items: tuple[str, list[float], float]) -> Any:
    return boxes_of([{label: box, "score": score} for label, box, score in items])


def score(*images: Detections) -> float:
    return average_precision(images)([1] * len(images))


SQUARE: list[float] = [0, 0, 10, 10]
ONE_CAT = boxes(("cat", SQUARE, 1.0))
TRUTH = boxes(("cat", SQUARE, 1.0), ("cat", [20, 20, 30, 30], 1.0), ("dog", [50, 50, 60, 60], 1.0))


def test_equal_boxes_have_a_perfect_score() -> None:
    assert score(match(TRUTH, TRUTH)) == score(perfect(TRUTH)) == 1.0


def test_a_missing_class_costs_its_part_of_the_score() -> None:
    assert score(match({"cat": TRUTH["cat"]}, TRUTH)) == pytest.approx(0.5)
    assert score(match({}, TRUTH)) == 0.0


def test_half_of_the_objects_give_51_of_101_recall_points() -> None:
    true_boxes = {"cat": TRUTH["cat"]}
    assert score(match({"cat": TRUTH["cat"][:1]}, true_boxes)) == pytest.approx(51 / 101)


def test_a_wrong_box_costs_only_if_its_score_is_above_right_ones() -> None:
    assert score(match(boxes(("cat", SQUARE, 0.9), ("cat", [70, 70, 80, 80], 0.5)), ONE_CAT)) == 1.0
    assert score(
        match(boxes(("cat", SQUARE, 0.5), ("cat", [70, 70, 80, 80], 0.9)), ONE_CAT)
    ) == pytest.approx(0.5)


def test_a_box_counts_at_thresholds_up_to_its_overlap() -> None:
    # An overlap (IoU) of 0.72 counts at the thresholds from 0.5 to 0.7.
    smaller = boxes(("cat", [0, 0, 10, 7.2], 0.9))
    assert score(match(smaller, ONE_CAT)) == pytest.approx(0.5)


def test_an_object_is_matched_once() -> None:
    matches = match(boxes(("cat", SQUARE, 0.9), ("cat", SQUARE, 0.8)), ONE_CAT)
    assert [all(hits) for _, hits in matches.detected["cat"]] == [True, False]


def test_classes_without_objects_do_not_count() -> None:
    assert score(match(boxes(("cat", SQUARE, 0.9), ("cow", SQUARE, 0.9)), ONE_CAT)) == 1.0
    assert score(match({}, {})) == 0.0


def test_an_image_with_weight_two_equals_two_images() -> None:
    chance = random.Random(2)
    images = []
    for _ in range(12):
        true_boxes = boxes(
            *(
                (chance.choice("ab"), [x, x, x + 10, x + 10], 1.0)
                for x in chance.sample(range(0, 200, 15), 3)
            )
        )
        detections = {
            label: sorted(
                ((chance.random(), [c + chance.gauss(0, 0.7) for c in box]) for _, box in objects),
                reverse=True,
            )
            for label, objects in true_boxes.items()
        }
        images.append(match(detections, true_boxes))
    times = [chance.randrange(4) for _ in images]
    several = [image for image, count in zip(images, times, strict=True) for _ in range(count)]
    assert average_precision(images)(times) == pytest.approx(score(*several))
    assert 0.1 < score(*several) < 0.9


@pytest.mark.parametrize(
    "value",
    [
        {"cat": SQUARE},
        [{"cat": SQUARE[:3]}],
        [{"score": 0.3}],
        [3],
        [{"cat": [0, 0, float("nan"), 1]}],
    ],
)
def test_invalid_boxes_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="box"):
        boxes_of(value)
