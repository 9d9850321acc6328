"""Error messages about values that pydantic rejects."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import Field

from tsx_runtime.worker.codecs.bodies import BodyObject, RefusedField, Seed, Stops, validate_body


class ExampleBody(BodyObject):
    seed: Seed = None
    stop: Stops[Annotated[str, Field(min_length=1)]] | None = None
    names: dict[str, str] = {}


@pytest.mark.parametrize(
    ("body", "path", "ending"),
    [
        (
            {"seed": 1 << 63},
            "seed",
            "less than 9223372036854775808.",
        ),
        ({"stop": ["a", ""]}, "stop[1]", '"": it must have at least 1 character.'),
        ({"stop": ["a"] * 17}, "stop", "at most 16 items after validation, not 17."),
        ({"names": 5}, "names", "is 5: it must be a valid dictionary."),
    ],
)
def test_an_error_shows_the_value_and_the_expected_form(body: Any, path: str, ending: str) -> None:
    with pytest.raises(RefusedField) as exc_info:
        validate_body(ExampleBody, body)
    assert exc_info.value.param == path
    assert exc_info.value.message.startswith(f"The field '{path}' is ")
    assert exc_info.value.message.endswith(ending)


def test_a_single_stop_string_becomes_a_list() -> None:
    assert validate_body(ExampleBody, {"stop": "a"}).stop == ["a"]
