"""The headers of asynchronous requests."""

from __future__ import annotations

import pytest

from tsx_runtime.features.jobs.http.preference import (
    MAX_WAIT_S,
    Preference,
    callback_of,
    parse_preference,
)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([b"respond-async"], Preference()),
        ([b"Respond-Async, wait=10"], Preference(10)),
        ([b"wait=10", b"return=minimal; foo=bar, respond-async"], Preference(10)),
        ([b'respond-async; x=1, wait="7"'], Preference(7)),
        ([b"respond-async, wait=5, wait=9"], Preference(5)),
        ([b"respond-async, wait=soon"], Preference()),
        ([b"respond-async, wait=-1"], Preference()),
        ([b"respond-async, wait=99999999999999999999"], Preference(MAX_WAIT_S)),
        ([b"wait=10"], None),
        ([b"no-respond-async"], None),
        ([], None),
    ],
)
def test_prefer_headers_are_parsed_as_rfc_7240_specifies(
    values: list[bytes], expected: Preference | None
) -> None:
    assert parse_preference([(b"prefer", value) for value in values]) == expected


def test_a_callback_is_read_from_its_header() -> None:
    assert callback_of([(b"x-tsx-callback-url", b" https://a.example/ ")]) == "https://a.example/"
    assert callback_of([]) == ""
