"""The facts about requests and answers of all forms."""

from __future__ import annotations

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tsx_archiver.monitor.config import FieldKind, MonitorConfig
from tsx_runtime.features.monitor.messages import MonitorSample
from tsx_runtime.features.monitor.statistics.columns import GUESS_ROWS, Extractor, RowFacts
from tsx_runtime.features.monitor.statistics.facts import category_of

JSON = "application/json"
FIELDS: dict[str, FieldKind] = {"age": "number", "country": "category"}


def as_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def sample(
    body: Any, answer: Any = 1, kind: str = JSON, answer_kind: str = JSON, **options: Any
) -> MonitorSample:
    headers = {"content-type": kind} | options.pop("headers", {})
    values = {"status": 200} | options
    return MonitorSample(
        "m",
        "1",
        "r",
        0.0,
        0.0,
        values["status"],
        headers,
        answer_kind,
        as_bytes(body),
        as_bytes(answer),
    )


def rows_of(
    body: Any, answer: Any = 1, fields: dict[str, FieldKind] = FIELDS, **options: Any
) -> list[RowFacts]:
    config = options.pop("config", MonitorConfig())
    return Extractor(config, fields, centres=options.pop("centres", {})).rows(
        sample(body, answer, **options)
    )


def inputs_of(body: Any, fields: dict[str, FieldKind] = FIELDS, **options: Any) -> dict[str, Any]:
    (row,) = rows_of(body, fields=fields, **options)
    return {name: value for name, value in row.columns.items() if name.startswith("input.")}


def guess(*bodies: Any, **options: Any) -> dict[str, FieldKind]:
    extractor = Extractor(MonitorConfig())
    for body in bodies:
        assert all(row.columns == {} for row in extractor.rows(sample(body, **options)))
    extractor.freeze()
    return extractor.fields


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ([{"age": 30, "country": "de"}, {"age": 40}], JSON),
        ({"instances": [{"age": 30, "country": "de"}, {"age": 40}]}, JSON),
        (b"age,country\n30,de\n40,\n", "text/csv"),
        (
            {
                "inputs": [
                    {"name": "age", "shape": [2, 1], "datatype": "FP32", "data": [30, 40]},
                    {"name": "country", "shape": [2], "datatype": "BYTES", "data": ["de", None]},
                ]
            },
            JSON,
        ),
    ],
    ids=["list", "KServe V1", "CSV", "KServe V2"],
)
def test_each_row_of_a_request_has_its_own_facts(body: Any, kind: str) -> None:
    rows = rows_of(body, ["yes", "no"], kind=kind)
    assert [row.columns for row in rows] == [
        {"input.age": 30.0, "input.country": "de", "answer.class": "yes"},
        {"input.age": 40.0, "input.country": None, "answer.class": "no"},
    ]
    assert [row.prediction for row in rows] == ["yes", "no"]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"age=30&country=de", "application/x-www-form-urlencoded"),
        (b'{"age": 30, "country": "de"}', "application/x-www-form-urlencoded"),
        (b'{"age": 30, "country": "de"}', ""),
        (
            b'--x\r\nContent-Disposition: form-data; name="age"\r\n\r\n30\r\n'
            b'--x\r\nContent-Disposition: form-data; name="country"\r\n\r\nde\r\n--x--\r\n',
            "multipart/form-data; boundary=x",
        ),
    ],
)
def test_forms_are_rows(body: bytes, kind: str) -> None:
    assert inputs_of(body, kind=kind) == {"input.age": 30.0, "input.country": "de"}


def test_lists_of_numbers_are_rows_with_indices_as_paths() -> None:
    assert inputs_of([5.1, "x"], {"0": "number", "1": "category"}) == {
        "input.0": 5.1,
        "input.1": "x",
    }
    rows = rows_of(b"1,2\n3,4\n", [0, 1], {"1": "number"}, kind="text/csv")
    assert [row.columns["input.1"] for row in rows] == [2.0, 4.0]


def test_paths_name_inner_values_and_headers() -> None:
    fields: dict[str, FieldKind] = {"a.b.1": "number", "header:x-country": "category"}
    body = {"a": {"b": [1, 2]}}
    assert inputs_of(body, fields, headers={"x-country": "fr"}) == {
        "input.a.b.1": 2.0,
        "input.header:x-country": "fr",
    }
    assert inputs_of({"a": 3}, fields) == {"input.a.b.1": None, "input.header:x-country": None}


def test_keys_and_groups_are_read_from_the_request() -> None:
    config = MonitorConfig(key="id", groups=("person.sex", "header:x-country", "age_group"))
    (row,) = rows_of({"id": 17, "person": {"sex": "f"}}, config=config, headers={"x-country": "it"})
    assert row.key == "17"
    assert row.groups == {"person.sex": "f", "header:x-country": "it"}


def test_a_large_integer_keeps_its_digits() -> None:
    id = 12345678901234567
    (row,) = rows_of({"id": id}, id, config=MonitorConfig(key="id"))
    assert (row.key, row.prediction) == (str(id), str(id))


def picture(brightness: int, kind: str = "PNG", size: tuple[int, int] = (40, 30)) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", size, (brightness,) * 3).save(data, kind)
    return data.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_an_image_has_size_brightness_and_contrast(kind: str) -> None:
    facts = inputs_of(picture(51, kind), {"body": "image"}, kind=f"image/{kind.lower()}")
    assert facts["input.body.width"] == 40
    assert facts["input.body.height"] == 30
    assert facts["input.body.brightness"] == pytest.approx(0.2, abs=0.02)
    assert facts["input.body.contrast"] == pytest.approx(0, abs=0.02)


def test_images_in_json_and_in_forms_are_read_too() -> None:
    data = picture(255)
    encoded = base64.b64encode(data).decode()
    form = b'--x\r\nContent-Disposition: form-data; name="p"; filename="p.png"\r\n\r\n%b\r\n--x--'
    bodies = [
        ({"p": encoded}, JSON),
        ({"p": f"data:image/png;base64,{encoded}"}, JSON),
        ({"p": {"b64": encoded}}, JSON),
        (form % data, "multipart/form-data; boundary=x"),
    ]
    for body, kind in bodies:
        assert inputs_of(body, {"p": "image"}, kind=kind)["input.p.brightness"] == 1
        assert guess(body, kind=kind) == {"p": "image"}


def test_of_a_broken_or_huge_image_only_what_is_safe_is_read() -> None:
    huge = picture(0, size=(5100, 5000))
    assert inputs_of(huge, {"body": "image"}, kind="image/png") == {
        "input.body.width": 5100.0,
        "input.body.height": 5000.0,
    }
    assert "input.body.brightness" not in inputs_of(
        picture(9)[:60], {"body": "image"}, kind="image/png"
    )
    assert inputs_of(b"%!PS-Adobe-3.0 EPSF-3.0\n", {"body": "image"}, kind="image/eps") == {}


def test_an_array_has_mean_contrast_minimum_and_maximum() -> None:
    facts = inputs_of({"x": [[0, 2], [4, 6]] * 20}, {"x": "image"})
    assert facts == {
        "input.x.mean": 3.0,
        "input.x.contrast": pytest.approx(5**0.5),
        "input.x.minimum": 0.0,
        "input.x.maximum": 6.0,
    }


def test_a_text_has_length_script_and_share_of_digits() -> None:
    assert inputs_of("Вход 12".encode(), {"body": "text"}, kind="text/plain") == {
        "input.body.length": 7.0,
        "input.body.script": "cyrillic",
        "input.body.digits": 2 / 7,
    }
    assert inputs_of({"t": ""}, {"t": "text"})["input.t.script"] == "none"


def test_an_embedding_has_a_similarity_to_the_centre_of_the_baseline() -> None:
    centres = {"input.e.similarity": [1.0, 0.0], "answer.similarity": [1.0] * 32}
    (row,) = rows_of({"e": [3, 4]}, [-2.0] * 32, {"e": "embedding"}, centres=centres)
    assert row.columns == {"input.e.similarity": 0.6, "answer.similarity": pytest.approx(-1)}
    assert row.vectors["input.e.similarity"].tolist() == [3, 4]
    (row,) = rows_of({"e": [3, 4]}, fields={"e": "embedding"})
    assert set(row.vectors) == {"input.e.similarity"}
    assert row.columns == {"input.e.similarity": None, "answer.class": "1"}


@pytest.mark.parametrize(
    ("answer", "columns"),
    [
        ("cat", {"class": "cat"}),
        (3, {"class": "3"}),
        (True, {"class": "true"}),
        (2.5, {"number": 2.5}),
        ([[2.5]], {"number": 2.5}),
        ({"cat": 0.5, "dog": 0.5}, {"class": "cat", "confidence": 0.5, "entropy": 1.0}),
        (
            [0.25, 0.75],
            {"class": "1", "confidence": 0.75, "entropy": pytest.approx(0.811, abs=0.001)},
        ),
        ({"cat": 0.5, "dog": 0.2, "cow": 0.1}, {"class": "cat", "confidence": 0.5}),
        ({"label": "cat", "score": 0.75}, {"class": "cat", "confidence": 0.75}),
        (
            [[{"label": "a", "score": 0.1}, {"label": "b", "score": 0.7}]],
            {"class": "b", "confidence": 0.7},
        ),
        (
            {"class": "b", "probabilities": {"a": 0.5, "b": 0.5}},
            {"class": "b", "confidence": 0.5, "entropy": 1.0},
        ),
        ({"prediction": 12.5, "unit": "EUR"}, {"number": 12.5, "unit": "EUR"}),
        ({"price": 1200, "sizes": {"x": 3}}, {"price": 1200.0, "sizes.x": 3.0}),
        ({"predictions": ["cat"]}, {"class": "cat"}),
        (
            {"outputs": [{"name": "p", "shape": [1, 2], "data": [0.5, 0.5]}]},
            {"class": "0", "confidence": 0.5, "entropy": 1.0},
        ),
        ([{"box": [1, 2]}, {"box": [3, 4]}], {"count": 2.0}),
        ({"predictions": []}, {"count": 0.0}),
        (None, {}),
    ],
)
def test_facts_of_an_answer(answer: Any, columns: dict[str, Any]) -> None:
    (row,) = rows_of({}, answer)
    facts = {
        name.removeprefix("answer."): value
        for name, value in row.columns.items()
        if name.startswith("answer.")
    }
    assert facts == columns
    assert row.prediction == columns.get("class", columns.get("number"))
    assert row.confidence == columns.get("confidence")


def test_a_long_answer_is_a_text() -> None:
    (row,) = rows_of({}, b"word " * 50, answer_kind="text/plain")
    assert row.columns["answer.length"] == 250
    assert row.prediction is None


@pytest.mark.parametrize(
    "answer",
    [
        {"prediction": "word " * 50},
        {"class": "word " * 50, "score": 0.5},
        [{"label": "word " * 50, "score": 0.9}],
        {"word " * 50: 0.9, "other": 0.1},
    ],
)
def test_a_text_in_place_of_a_label_is_no_class(answer: Any) -> None:
    (row,) = rows_of({}, answer)
    assert row.prediction is None
    assert "word" not in str(row.columns)


def test_a_long_label_of_scores_is_the_class_that_its_truth_names() -> None:
    label = "American Staffordshire terrier, American pit bull terrier, pit bull terrier"
    (row,) = rows_of({}, {label: 0.9, "cat": 0.1})
    assert row.prediction == category_of(label)


def test_the_configuration_can_name_the_prediction() -> None:
    config = MonitorConfig(prediction="result.risk")
    (row,) = rows_of({}, {"result": {"risk": 0.25}, "label": "x"}, config=config)
    assert row.prediction == 0.25
    assert row.columns["answer.number"] == 0.25


def test_kinds_are_guessed_from_the_first_rows() -> None:
    bodies = [
        {
            "n": index,
            "b": index % 2 == 0,
            "c": f"c{index % 3}",
            "t": "a text of several words" if index else "short",
            "pixels": [0.5] * 65,
            "mixed": 1 if index else "x",
            "empty": None,
        }
        for index in range(GUESS_ROWS)
    ]
    assert guess(*bodies) == {
        "n": "number",
        "b": "category",
        "c": "category",
        "t": "text",
        "pixels": "image",
        "mixed": "ignore",
    }
    assert guess([1.5, 2]) == {"0": "number", "1": "number"}


def test_a_guess_is_frozen_after_the_first_rows() -> None:
    extractor = Extractor(MonitorConfig())
    for _ in range(GUESS_ROWS):
        assert extractor.rows(sample({"n": 1}))[0].columns == {}
    assert extractor.fields == {"n": "number"}
    (row,) = extractor.rows(sample({"n": 2, "new": 3}))
    assert row.columns == {"input.n": 2.0, "answer.class": "1"}


def test_the_configuration_wins_over_the_handler_and_that_over_the_schema() -> None:
    schema = {
        "anyOf": [{"$ref": "#/$defs/Row"}, {"type": "array", "items": {"$ref": "#/$defs/Row"}}],
        "$defs": {
            "Row": {
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"enum": [1, 2]},
                    "c": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "d": {"type": "string"},
                    "e": {"properties": {"f": {"type": "boolean"}}},
                }
            }
        },
    }
    config = MonitorConfig(fields={"a": "category"})
    extractor = Extractor(config, schema=schema)
    assert extractor.fields == {"a": "category", "b": "category", "c": "number", "e.f": "category"}
    extractor.rows(sample({"a": 1, "b": 1, "d": "x"}))
    extractor.freeze()
    assert extractor.fields == {
        **{"a": "category", "b": "category", "d": "category"},
        **{"c": "number", "e.f": "category"},
    }
    assert Extractor(config, {"a": "number", "b": "ignore"}, schema).fields["b"] == "ignore"
    assert Extractor(config, {"z": "number"}, {"properties": 3}).fields == {
        "z": "number",
        "a": "category",
    }


def test_at_most_200_fields_are_monitored() -> None:
    extractor = Extractor(MonitorConfig())
    extractor.rows(sample({f"f{index}": index for index in range(250)}))
    extractor.freeze()
    assert len(extractor.fields) == 200


def test_failed_answers_have_no_rows_and_unreadable_requests_are_counted() -> None:
    extractor = Extractor(MonitorConfig(), FIELDS)
    assert extractor.rows(sample({"age": 1}, status=500)) == []
    assert extractor.unreadable == 0
    assert extractor.rows(sample(b"{", kind=JSON)) == []
    assert extractor.unreadable == 1
    (row,) = extractor.rows(sample({"age": 1}, b"{"))
    assert row.columns == {"input.age": 1.0, "input.country": None}
    assert extractor.unreadable == 2


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"--x\r\n\r\n\r\n" * 5000, "multipart/form-data; boundary=x"),
        (b"a=1&" * 5000, "application/x-www-form-urlencoded"),
        (b"1\n" * 300_000, "text/csv"),
    ],
)
def test_a_request_of_very_many_parts_is_not_read(body: bytes, kind: str) -> None:
    extractor = Extractor(MonitorConfig())
    assert extractor.rows(sample(body, kind=kind)) == []
    assert extractor.unreadable == 1


def test_answers_that_fit_no_rows_are_ignored() -> None:
    rows = rows_of([{"age": 1}, {"age": 2}], [1, 2, 3])
    assert [row.prediction for row in rows] == [None, None]


ODD_VALUES = [
    *(None, float("nan"), float("inf"), -1e308, 10**400, "", "x" * 100_000, [], {}, [[]]),
    *(
        [[1], [2, 3]],
        {"a": {"b": [{}]}},
        ["a", 1, None],
        [10**400] * 70,
        {"b64": 3},
        "data:image/png;base64,!",
    ),
    *(np.zeros((3, 3)).tolist(), "\ud800", True),
]


@pytest.mark.parametrize("kind", ["number", "category", "text", "image", "embedding", "ignore"])
def test_odd_values_have_no_facts(kind: FieldKind) -> None:
    for value in ODD_VALUES:
        for body in ({"x": value}, [value, value], value):
            fields: dict[str, FieldKind] = {"x": kind, "0": kind, "body": kind}
            for row in rows_of(body, value, fields):
                for fact in row.columns.values():
                    assert fact is None or isinstance(fact, str) or abs(fact) < 1e101


KINDS = [
    *(JSON, "", "text/csv", "text/plain", "image/png", "application/octet-stream"),
    *(
        "multipart/form-data; boundary=x",
        "multipart/form-data",
        "application/x-www-form-urlencoded",
    ),
]


@settings(max_examples=40, deadline=None)
@given(
    st.one_of(
        st.binary(), st.text().map(str.encode), st.just(b"[" * 5000), st.just(b'{"a":' * 5000)
    ),
    st.binary(max_size=50),
    st.sampled_from(KINDS),
)
def test_any_bytes_are_read_without_an_error(body: bytes, answer: bytes, kind: str) -> None:
    extractor = Extractor(MonitorConfig(), {"a": "text", "0": "image", "body": "number"})
    extractor.rows(sample(body, answer, kind, kind))
    guess(body, kind=kind)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@settings(max_examples=40, deadline=None)
@given(values, values)
def test_any_json_is_read_without_an_error(body: Any, answer: Any) -> None:
    fields: dict[str, FieldKind] = {"a": "text", "0": "image", "body": "embedding"}
    Extractor(MonitorConfig(groups=("0",), key="a", prediction="0"), fields).rows(
        sample(body, answer)
    )
    guess(body)
    wrapped = {"inputs": [{"name": body, "data": answer, "shape": body}], "outputs": answer}
    rows_of(wrapped, {"predictions": body, "outputs": [body]})
