"""Several hundred requests to TorchServe 0.12 and tsx; every difference has a documented name."""

from __future__ import annotations

import pytest

from tests.differential.accepted import ACCEPTED
from tests.differential.cases import STORY, Case, stateless
from tests.differential.compare import differences


@pytest.mark.parametrize("case", dict.fromkeys(stateless()), ids=str)
def test_a_request_gets_equal_responses(answers, case: Case) -> None:
    check(case, answers[case])


@pytest.mark.parametrize(
    "number", range(len(STORY)), ids=lambda number: f"{number} {STORY[number]}"
)
def test_a_step_of_the_story_gets_equal_responses(answers, number: int) -> None:
    check(STORY[number], answers[number])


def test_every_accepted_difference_still_exists(answers) -> None:
    unused = {difference.name for difference in ACCEPTED}
    for key, pair in answers.items():
        case = STORY[key] if isinstance(key, int) else key
        for part, (theirs, ours) in differences(*pair).items():
            unused -= {
                difference.name
                for difference in ACCEPTED
                if difference.covers(case, part, theirs, ours, pair)
            }
    assert not unused, (
        "these are no differences any more; take them out of accepted.py and docs/reference/torchserve.md"
    )


def check(case: Case, pair) -> None:
    unexpected = {
        part: f"{theirs!r} -> {ours!r}"
        for part, (theirs, ours) in differences(*pair).items()
        if not any(difference.covers(case, part, theirs, ours, pair) for difference in ACCEPTED)
    }
    responses = " and ".join(
        f"{server_name} {response.status} {response.body[:300]!r}"
        for server_name, response in zip(("TorchServe", "tsx"), pair, strict=True)
    )
    assert not unexpected, f"{case}: {responses}"
