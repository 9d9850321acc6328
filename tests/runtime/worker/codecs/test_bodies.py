"""Messages about values that pydantic does not take."""

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
def test_a_value_is_shown_with_what_it_must_be(body: Any, path: str, ending: str) -> None:
    with pytest.raises(RefusedField) as caught:
        validate_body(ExampleBody, body)
    assert caught.value.param == path
    assert caught.value.message.startswith(f"The field '{path}' is ")
    assert caught.value.message.endswith(ending)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert validate_body(ExampleBody, {"stop": "a"}).stop == ["a"]
