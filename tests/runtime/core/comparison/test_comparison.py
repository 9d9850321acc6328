"""Comparisons of two answers: exact, with a tolerance, by the best labels, or by a plugin."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.core.comparison.comparison import (
    compare,
    tolerance_of,
    without_paths,
)
from tsx_runtime.core.comparison.response_body import NO_JSON, read_answer
from tsx_runtime.core.comparison.top_k import agree, ranking_of
from tsx_runtime.plugins import ComparedAnswer, Comparison
from tsx_runtime.settings.traffic_policy import Compare

EXACT, NUMERIC, TOP_K = Compare(kind="exact"), Compare(kind="numeric"), Compare(kind="top-k")

numbers = st.integers() | st.floats()
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=3), children, max_size=4)
    ),
    max_leaves=20,
)
rankings = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 4) | st.floats(), min_size=1)
bodies = st.binary(max_size=50) | json_values.map(lambda value: json.dumps(value).encode())
configurations = st.sampled_from(
    [
        EXACT,
        NUMERIC,
        Compare(kind="top-k", k=2),
        Compare(kind="numeric", rtol=0, atol=0),
        Compare(kind="exact", ignore=["a.*"]),
    ]
)


def an_answer(body: bytes | object, status: int = 200, **headers: str) -> ComparedAnswer:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ComparedAnswer(
        status, {name.replace("_", "-"): value for name, value in headers.items()}, content
    )


def difference_of(
    config: Compare, first: Any, second: Any, plugin: Comparison | None = None
) -> str | None:
    primary, shadow = (
        value if isinstance(value, ComparedAnswer) else an_answer(value)
        for value in (first, second)
    )
    difference = compare(config, b"asked", primary, shadow, plugin).difference
    return None if difference is None else difference.between("client", "shadow")


@given(configurations, bodies)
def test_an_answer_agrees_with_itself(config: Compare, body: bytes) -> None:
    assert difference_of(config, body, bytes(bytearray(body))) is None


@given(configurations, bodies, bodies)
def test_agreement_is_symmetric_without_a_relative_tolerance(
    config: Compare, first: bytes, second: bytes
) -> None:
    if config.kind != "numeric" or config.rtol == 0:
        assert (difference_of(config, first, second) is None) == (
            difference_of(config, second, first) is None
        )


@given(bodies, bodies)
def test_equal_answers_agree_within_a_tolerance(first: bytes, second: bytes) -> None:
    if difference_of(EXACT, first, second) is None:
        assert difference_of(NUMERIC, first, second) is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 0.1), st.floats(0, 1), st.data())
def test_numbers_agree_exactly_up_to_the_tolerance(
    values: list[float], rtol: float, atol: float, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(values) - 1))
    tolerance = atol + rtol * abs(values[position])
    config = Compare(kind="numeric", rtol=rtol, atol=atol)

    def answer_shifted_by(shift: float) -> dict[str, Any]:
        return {
            "scores": [
                value + shift if position == index else value for index, value in enumerate(values)
            ]
        }

    # Rounding of the sum can exceed the tolerance; such cases are skipped.
    if abs(values[position] + tolerance * 0.99 - values[position]) <= tolerance:
        assert (
            difference_of(config, answer_shifted_by(0), answer_shifted_by(tolerance * 0.99)) is None
        )
    difference = difference_of(
        config, answer_shifted_by(0), answer_shifted_by(tolerance * 1.01 + 1e-3)
    )
    assert difference is not None
    assert difference.startswith(f"scores.{position}: ")


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        ({"a": [1, {"b": 2.0}]}, {"a": [1, {"b": 2.00001}]}, None),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, None),
        ({"a": 1}, {"a": 1.0}, None),
        (
            {"a": math.nan, "b": math.inf},
            {"a": math.nan, "b": math.inf, "c": 1},
            "c: absent (client), present (shadow)",
        ),
        ([math.nan], [1], "0: NaN (client), 1 (shadow)"),
        ([math.inf], [1e308], "0: Infinity (client), 1e+308 (shadow)"),
        ([math.inf], [-math.inf], "0: Infinity (client), -Infinity (shadow)"),
        ([10**400], [1.5], "0: 1000000"),
        ([10**400], [10**400], None),
        ([1], [True], "0: 1 (client), true (shadow)"),
        ({"a": 1}, {}, "a: present (client), absent (shadow)"),
        ([1, 2], [1], "the answer: 2 items (client), 1 item (shadow)"),
        ([[1, 2], "x"], [[1, 2], "y"], '1: "x" (client), "y" (shadow)'),
        ({"a": [1]}, {"a": {}}, "a: a list (client), an object (shadow)"),
        (
            b"plain",
            b"plain text",
            "body: 5 bytes (client), 10 bytes (shadow); they differ from byte 5 on",
        ),
        (b"{}", b"plain", "the answer: JSON (client), not JSON (shadow)"),
    ],
)
def test_the_position_of_a_difference_is_reported(
    first: Any, second: Any, difference: str | None
) -> None:
    report = difference_of(NUMERIC, first, second)
    assert (
        report is None
        if difference is None
        else report is not None and report.startswith(difference)
    )


def largest_of(first: Any, second: Any, config: Compare = NUMERIC) -> float | None:
    return compare(config, b"", an_answer(first), an_answer(second)).largest


def test_small_differences_agree_and_the_largest_is_reported() -> None:
    first = [5.00095e-07, 0.25, {"a": [1.0, 3.0]}]
    second = [5.00096e-07, 0.25001, {"a": [1.0, 3.0]}]
    assert difference_of(NUMERIC, first, second) is None
    for config in (NUMERIC, EXACT):
        assert largest_of(first, second, config) == pytest.approx(1e-5)
    # The largest difference may come after the first one.
    first, second = {"a": [1.0, 9.0], "b": 2.0}, {"a": [3.0, 4.0], "b": 2.5}
    assert difference_of(NUMERIC, first, second) is not None
    assert largest_of(first, second) == 5
    assert largest_of(first, second, Compare(ignore=["a.*"])) == 0.5


def test_the_coarser_precision_sets_the_default_tolerance() -> None:
    assert tolerance_of(NUMERIC) == tolerance_of(NUMERIC, "fp32", None) == (1e-4, 1e-6)
    for coarse_precision in ((None, "BF16"), ("fp16", "fp32")):
        assert tolerance_of(NUMERIC, *coarse_precision) == (1e-2, 1e-3)
    for coarser_precision in (("bf16", "int8"), ("pruned",)):
        assert tolerance_of(NUMERIC, *coarser_precision) == (1e-1, 1e-2)
    assert tolerance_of(Compare(rtol=0.5), "bf16") == (0.5, 1e-3)
    primary, shadow = an_answer([0.5]), an_answer([0.502])
    assert compare(NUMERIC, b"", primary, shadow).difference is not None
    assert compare(NUMERIC, b"", primary, shadow, precisions=["fp32", "bf16"]).difference is None
    halves = [
        an_answer({"outputs": [{"name": "y", "datatype": kind, "shape": [1], "data": [x]}]})
        for kind in ("FP16", "FP32")
        for x in (0.5, 0.502)
    ]
    assert compare(NUMERIC, b"", *halves[:2]).difference is None
    assert compare(NUMERIC, b"", *halves[2:]).difference is not None
    assert compare(Compare(rtol=1e-4), b"", *halves[:2]).difference is not None


def test_the_exact_comparison_compares_every_byte() -> None:
    assert (
        difference_of(EXACT, b'{"a": 1}', b'{"a":1}')
        == "body: 8 bytes (client), 7 bytes (shadow); they differ from byte 5 on"
    )
    assert difference_of(EXACT, {"a": 1}, {"a": 2}) == "a: 1 (client), 2 (shadow)"
    image = bytes(range(256)) * 100
    assert (
        difference_of(EXACT, image, image[:20_001] + b"x" + image[20_002:])
        == "body: 25600 bytes (client), 25600 bytes (shadow); they differ from byte 20001 on"
    )


def test_statuses_are_compared_first() -> None:
    for config in (EXACT, TOP_K, NUMERIC):
        difference = "status: 200 (client), 404 (shadow)"
        assert difference_of(config, an_answer(b"x"), an_answer(b"x", 404)) == difference
        assert (
            difference_of(config, an_answer(b"one error", 500), an_answer(b"another", 500)) is None
        )
        assert difference_of(config, an_answer(b"no", 404), an_answer(b"not", 404)) is not None


def test_ignored_fields_are_not_compared() -> None:
    first = {"id": "1", "outputs": [{"took": 5, "y": 1}, {"took": 6, "y": 2}]}
    second = {"id": "2", "outputs": [{"took": 7, "y": 1}, {"took": 8, "y": 2}]}
    ignored_fields = ["id", "outputs.*.took"]
    for kind in ("exact", "numeric", "top-k"):
        assert difference_of(Compare(kind=kind, ignore=ignored_fields), first, second) is None
    assert (
        difference_of(Compare(kind="numeric", ignore=["id", "outputs.0.took"]), first, second)
        == "outputs.1.took: 6 (client), 8 (shadow)"
    )
    assert difference_of(Compare(kind="exact", ignore=["id"]), {"id": 1}, {}) is None
    assert without_paths(
        {"a": {"b": 1, "c": [1, 2]}}, [("a", "c", "1"), ("a", "x"), ("b", "c")]
    ) == {"a": {"b": 1, "c": [1]}}


def tensor_answer(version: str, values: list[float]) -> ComparedAnswer:
    """Return an Open Inference Protocol answer: JSON followed by binary tensors."""
    raw = struct.pack(f"<{len(values)}f", *values)
    output = {
        "name": "scores",
        "datatype": "FP32",
        "shape": [1, len(values)],
        "parameters": {"binary_data_size": len(raw)},
    }
    head = json.dumps({"model_name": "m", "model_version": version, "outputs": [output]}).encode()
    return an_answer(head + raw, inference_header_content_length=str(len(head)))


def test_tensors_are_compared_without_their_version() -> None:
    first, equal = tensor_answer("1.0", [0.1, 0.9]), tensor_answer("2.0", [0.1, 0.9])
    near_answer, far_answer = tensor_answer("2.0", [0.10001, 0.9]), tensor_answer("2.0", [0.9, 0.1])
    assert difference_of(EXACT, first, equal) is None
    assert difference_of(Compare(kind="numeric", rtol=1e-3), first, near_answer) is None
    assert str(difference_of(NUMERIC, first, far_answer)).startswith("outputs.0.data.")
    assert difference_of(TOP_K, first, near_answer) is None
    assert difference_of(TOP_K, first, far_answer) == "outputs.0.data.0: 1 (client), 0 (shadow)"
    assert str(difference_of(EXACT, first, near_answer)).startswith("outputs.0.data.0: ")


def events(*values: Any) -> ComparedAnswer:
    lines = [f"data: {json.dumps(value, ensure_ascii=False)}\n\n" for value in values]
    return an_answer("".join(lines).encode(), content_type="text/event-stream; charset=utf-8")


def chat(number: int, text: str) -> dict[str, Any]:
    """Return a `/v1/chat/completions` answer, which has an id and a time."""
    function = {"id": f"call_{number}", "function": {"name": text}}
    return {
        "id": f"chatcmpl-{number}",
        "created": number,
        "object": "chat.completion",
        "choices": [{"message": {"role": "assistant", "tool_calls": [function]}}],
    }


def chat_events(number: int, text: str) -> ComparedAnswer:
    return events(*[chat(number, text) | {"object": "chat.completion.chunk"}] * 2)


def response(number: int, text: str) -> dict[str, Any]:
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": number,
        "output": [{"id": f"msg_{number}", "text": text}],
    }


def response_events(number: int, text: str) -> ComparedAnswer:
    """Stream as `/v1/responses` does; some events hold the response, others only its ids."""
    id = f"msg_{number}"
    parts = [
        {"type": "response.created", "response": response(number, "") | {"output": []}},
        {"type": "response.output_item.added", "item": {"id": id, "text": ""}},
        {"type": "response.output_text.delta", "item_id": id, "delta": text},
        {"type": "response.completed", "response": response(number, text)},
    ]
    return events(*(part | {"sequence_number": index} for index, part in enumerate(parts)))


def ranking(number: int, text: str) -> dict[str, Any]:
    """Answer as `/v1/rerank` does."""
    results = [{"index": 0, "relevance_score": 0.5, "document": {"text": text}}]
    meta = {"api_version": {"version": "2"}}
    return {"id": str(number), "object": "list", "results": results, "meta": meta}


@pytest.mark.parametrize("config", [EXACT, NUMERIC, TOP_K])
@pytest.mark.parametrize("shape", [chat, chat_events, response, response_events, ranking])
def test_openai_answers_are_compared_without_ids_and_times(config: Compare, shape: Any) -> None:
    assert difference_of(config, shape(1, "yes"), shape(2, "yes")) is None
    assert difference_of(config, shape(1, "yes"), shape(2, "no")) is not None


def test_answers_that_resemble_openais_are_compared_with_their_ids() -> None:
    first, second = (
        {"id": number, "object": "cat", "created": 7, "results": []} for number in (1, 2)
    )
    assert difference_of(EXACT, first, second) == "id: 1 (client), 2 (shadow)"


def test_an_event_may_contain_any_json_character() -> None:
    text = "a\u2028b\u0085c"
    assert read_answer(events({"text": text})) == [{"text": text}]
    assert read_answer(
        an_answer(b"data: 1\r\n\rdata: [2]\n", content_type="text/event-stream")
    ) == [
        1,
        [2],
    ]


@pytest.mark.parametrize("length", ["9999999", "0", "-1", "x", "10", ""])
def test_invalid_tensors_are_compared_as_bytes(length: str) -> None:
    whole_answer = tensor_answer("1.0", [1.0, 2.0])
    broken_answer = ComparedAnswer(
        200, {"inference-header-content-length": length}, whole_answer.body
    )
    assert (
        difference_of(
            NUMERIC, broken_answer, broken_answer._replace(body=broken_answer.body + b"x")
        )
        is not None
    )
    for body in (
        b"{}",
        b"[]",
        b"1",
        b'{"outputs": [1]}',
        b'{"outputs": [{"parameters": {"binary_data_size": 7}, "datatype": "FP32"}]}',
    ):
        assert (
            read_answer(
                ComparedAnswer(200, {"inference-header-content-length": str(len(body))}, body)
            )
            is NO_JSON
        )


@given(rankings, st.integers(1, 9))
def test_a_ranking_agrees_with_itself_in_any_order(ranking: dict[str, float], k: int) -> None:
    assert agree(ranking, dict(reversed(ranking.items())), k)


@given(rankings, rankings, st.integers(1, 9))
def test_rankings_agree_if_they_share_a_choice_of_k_best_labels(
    first: dict[str, float], second: dict[str, float], k: int
) -> None:
    def best_choices(ranking: dict[str, float], count: int) -> list[set[str]]:
        """List each choice of so many labels of which no other label is better."""
        scores = {
            label: -math.inf if math.isnan(value) else value for label, value in ranking.items()
        }
        choices = [
            {label for index, label in enumerate(scores) if bits >> index & 1}
            for bits in range(1 << len(scores))
        ]
        return [
            choice
            for choice in choices
            if len(choice) == count
            and all(
                scores[label] >= scores[other_label]
                for label in choice
                for other_label in scores.keys() - choice
            )
        ]

    count = min(k, len(first))
    expected = count == min(k, len(second)) and any(
        choice in best_choices(second, count) for choice in best_choices(first, count)
    )
    assert agree(first, second, k) == agree(second, first, k) == expected


@pytest.mark.parametrize(
    ("k", "first", "second", "difference"),
    [
        (
            1,
            {"cat": 0.9, "dog": 0.1},
            {"cat": 0.4, "dog": 0.6},
            "top labels: cat (client), dog (shadow)",
        ),
        (1, [[0.1, 0.9], [1, 0]], [[0.2, 0.8], [0, 1]], "1: 0 (client), 1 (shadow)"),
        (2, ["a", "b", "c"], ["b", "a", "d"], None),
        (1, ["a", "b"], ["b", "a"], "top labels: a (client), b (shadow)"),
        (
            1,
            [{"label": "x", "score": 0.9}, {"label": "y", "score": 0.1}],
            [{"label": "x", "score": 0.7}],
            None,
        ),
        (1, {"label": "x", "score": 0.9}, {"label": "x", "score": 0.7}, None),
        (
            1,
            {"label": "x", "score": 0.9},
            {"label": "y", "score": 0.7},
            "top labels: x (client), y (shadow)",
        ),
        (
            1,
            {"predictions": [{"cat": 1, "dog": 0}]},
            {"predictions": [{"cat": 0, "dog": 1}]},
            "predictions.0: cat (client), dog (shadow)",
        ),
        (1, {"predictions": [1]}, {"predictions": [1]}, None),
        (
            1,
            {"predictions": [1]},
            {"predictions": [2]},
            "predictions.0: 1 (client), 2 (shadow); neither equal nor both ranked labels",
        ),
        (
            1,
            {"a": {"x": 1}},
            {"b": {"x": 1}},
            "the answer: an object (client), an object (shadow); neither equal nor both ranked labels",
        ),
        (1, [], [], None),
        (1, b"cat", b"dog", "body: 3 bytes (client), 3 bytes (shadow); they differ from byte 0 on"),
        (
            1,
            {"class": 2, "score": 0.9},
            {"class": 3, "score": 0.9},
            "top labels: 2 (client), 3 (shadow)",
        ),
    ],
)
def test_the_best_labels_are_found_in_every_format(
    k: int, first: Any, second: Any, difference: str | None
) -> None:
    assert difference_of(Compare(kind="top-k", k=k), first, second) == difference


@given(json_values)
def test_arbitrary_json_is_a_ranking_or_none(value: Any) -> None:
    ranking = ranking_of(value)
    assert ranking is None or (len(ranking) > 0 and agree(ranking, ranking, 3))


def test_a_plugin_decides_if_the_statuses_are_equal() -> None:
    config = Compare(kind="plugin", name="mine")
    judged_pairs: list[Any] = []

    def judge(request: bytes, first: ComparedAnswer, second: ComparedAnswer) -> bool | str:
        judged_pairs.append((request, first.body, second.body))
        return {b"same": True, b"other": False}.get(second.body, "the labels differ")

    assert difference_of(config, b"x", b"same", judge) is None
    assert difference_of(config, b"x", b"other", judge) == "the plugin says that they differ"
    assert difference_of(config, b"x", b"x", judge) == "the labels differ"
    assert judged_pairs[0] == (b"asked", b"x", b"same")
    assert (
        difference_of(config, b"x", an_answer(b"same", 201), judge)
        == "status: 200 (client), 201 (shadow)"
    )
    with pytest.raises(TypeError, match="it returned a NoneType"):
        difference_of(config, b"x", b"y", lambda request, first, second: None)  # type: ignore[arg-type, return-value]
