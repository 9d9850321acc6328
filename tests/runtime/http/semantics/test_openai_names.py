"""The model that a body of OpenAI's API names, found in small bodies and in large ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.errors import BadRequest, error_body
from tsx_runtime.http.semantics import openai
from tsx_runtime.http.semantics.errors import error_event, for_openai
from tsx_runtime.http.semantics.openai import PARSED, model_in_json, speaks_openai, split_name
from tsx_runtime.wire import Parts

VALUES = st.recursive(
    st.none() | st.integers() | st.text() | st.sampled_from(['"model": "x"', "\\", '\\"', "model"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["model", "a", '"', "\\"]), inner, max_size=3),
    max_leaves=12,
)


@given(before=st.dictionaries(st.text(max_size=3), VALUES, max_size=3), after=VALUES, name=st.text(min_size=1, max_size=9))
def test_a_search_finds_what_a_parser_does(before: Any, after: Any, name: str) -> None:
    document = before | {"model": name, "z": after, "": [{"model": "nested"}]}
    for ascii in (True, False):
        body = json.dumps(document, ensure_ascii=ascii).encode(errors="surrogatepass")
        assert openai._search(body) == name
    assert openai._search(json.dumps({"z": after} | {"x": {"model": name}}).encode()) is None


def test_large_bodies_are_searched_or_parsed_and_never_guessed() -> None:
    image = {"messages": [{"content": "A" * PARSED + '"model": "no"'}], "model": "yes"}
    assert model_in_json(json.dumps(image).encode()) == "yes"
    assert model_in_json(json.dumps(image | {"texts": ['"'] * 5000}).encode()) == "yes"
    assert model_in_json(b'{"model": "a", "\\u006dodel": "b", "x": "%b"}' % (b"A" * PARSED)) == "b"
    whole = json.dumps(image).encode()
    assert model_in_json(Parts([whole[:9], whole[9:]], len(whole))) == "yes"
    for values in (b'"",' * 400_000, b'{"a":{}},' * 150_000):
        with pytest.raises(BadRequest, match="predictions/MODEL"):
            model_in_json(b'{"model": "a", "x": [%b1]}' % values)


@pytest.mark.parametrize("body", [b"", b"no", b"[]", b'{"model": 1}', b'{"model": "%b"}' % (b"x" * 2000), b"[" * 60_000, b"\xff"])
def test_what_names_no_model_is_refused_in_words(body: bytes) -> None:
    with pytest.raises(BadRequest, match=r"JSON|model"):
        model_in_json(body)


def test_names_and_paths() -> None:
    assert split_name("m") == ("m", None, None)
    assert split_name("m:1.0/ada") == ("m", "1.0", "ada")
    assert [speaks_openai(path) for path in ("/v1/models", "/v1/models/a/b", "/v1/models/a:predict", "/v2/rerank", "/v1/x")] == [
        *(True, True, False, True, False)
    ]


def test_errors_have_both_shapes() -> None:
    error = json.loads(for_openai(error_body(404, "ModelNotFoundException", "Model not found: é")))
    assert error["error"] == {"message": "Model not found: é", "type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    assert error["message"] == "Model not found: é"
    assert for_openai(b"no error") == b"no error"
    for why, told in (("it died", "it died"), ('{"error": {"message": "own"}}', "own"), (error_body(500, "X", "long").decode(), "long")):
        assert json.loads(error_event(why).strip().removeprefix(b"data: "))["error"]["message"] == told
