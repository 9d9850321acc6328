"""Changes to the keys of a model-config.yaml."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.search.variants import changes, with_keys

COMMENTED = """\
# how it is served
minWorkers: 1   # one is enough
maxWorkers: 1
# the most in a batch
batchSize: 4

handler:   # its own
  threshold: 0.5  # of the score
  # trailing
# last
"""


def test_values_change_and_comments_are_kept() -> None:
    assert with_keys(COMMENTED, {"minWorkers": 2, "batchSize": 16, "deviceType": "cpu"}) == (
        COMMENTED.replace("minWorkers: 1   # one", "minWorkers: 2  # one").replace(
            "batchSize: 4", "batchSize: 16"
        )
        + "deviceType: cpu\n"
    )


def test_blocks_are_replaced_and_removed_completely() -> None:
    assert with_keys(COMMENTED, {"handler": None, "maxWorkers": None}) == (
        "# how it is served\nminWorkers: 1   # one is enough\n# the most in a batch\nbatchSize: 4\n\n  # trailing\n# last\n"
    )
    nested = with_keys(
        "a: 1\npt2:\n  compile:\n    enable: false\nb: 2", {"pt2": {"compile": {"enable": True}}}
    )
    assert nested == "a: 1\npt2:\n  compile:\n    enable: true\nb: 2\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only a comment\n",
        "{a: 1, batchSize: 4}",
        "a: &x [1]\nbatchSize: *x\n",
        "---\na: 1\n...\n",
        "batchSize: |\n  4\n",
    ],
)
def test_keys_are_set_in_documents_of_any_style(text: str) -> None:
    expected = {**(yaml.safe_load(text) or {}), "batchSize": 8}
    assert yaml.safe_load(with_keys(text, {"batchSize": 8})) == expected


KEYS = st.sampled_from(["batchSize", "minWorkers", "handler", "pt2", "own: key", "x"])
SCALARS = st.integers() | st.booleans() | st.text(max_size=8) | st.floats(allow_nan=False)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(KEYS, VALUES), st.dictionaries(KEYS, VALUES | st.none()), st.booleans())
@example({}, {"batchSize": {"\x85": "\u2028"}}, False)
def test_any_document_gets_the_requested_keys(
    document: dict[str, Any], changed: dict[str, Any], flow: bool
) -> None:
    text = yaml.safe_dump(document, default_flow_style=flow)
    expected = {key: value for key, value in {**document, **changed}.items() if value is not None}
    assert (yaml.safe_load(with_keys(text, changed)) or {}) == expected


@pytest.mark.parametrize(
    ("value", "compiled", "expected"),
    [
        (None, True, {"compile": {"enable": True}}),
        ("inductor", True, {"compile": {"backend": "inductor", "enable": True}}),
        ({"mode": "max-autotune"}, True, {"compile": {"mode": "max-autotune", "enable": True}}),
        (
            {"compile": {"enable": False, "backend": "eager"}},
            True,
            {"compile": {"enable": True, "backend": "eager"}},
        ),
        (
            {"export": {"aot_compile": True}, "compile": {"enable": True}},
            False,
            {"export": {"aot_compile": True}},
        ),
        ({"compile": {"enable": True}}, False, None),
    ],
)
def test_compilation_is_switched_and_its_options_are_kept(
    value: Any, compiled: bool, expected: Any
) -> None:
    raw = {} if value is None else {"pt2": value}
    changed = changes(Configuration(compiled=compiled), raw)
    assert changed["pt2"] == expected
    assert "pt2" not in changes(Configuration(compiled=None), raw)


def test_an_absent_key_is_not_removed() -> None:
    assert "pt2" not in changes(Configuration(compiled=False), {})
