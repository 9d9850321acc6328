"""The stubs that `generate` writes only declare types; text from a server is never executed."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_client.stubs import render

CODE = 'x"""\n    __import__("os").system("exit")\n    """'
ODD_TEXTS = [CODE, "a'b", "{name}", "a\nb", "\\", "\0", "\u2028", "class", "ﬁ", "__debug__", "self"]
TEXTS = st.text() | st.sampled_from(ODD_TEXTS)
SHAPES = st.lists(TEXTS | st.integers())
TENSORS = st.fixed_dictionaries({"name": TEXTS, "datatype": TEXTS, "shape": SHAPES})
SCHEMAS: Any = st.recursive(
    st.sampled_from([{}, {"type": "string"}, {"$ref": "#/$defs/A b"}])
    | st.fixed_dictionaries({"enum": st.lists(TEXTS | st.integers(), max_size=2)}),
    lambda schemas: (
        st.fixed_dictionaries(
            {
                "type": st.just("object"),
                "properties": st.dictionaries(TEXTS, schemas, max_size=2),
                "required": st.lists(TEXTS, max_size=1),
            }
        )
        | st.fixed_dictionaries({"type": st.just("array"), "items": schemas})
        | st.fixed_dictionaries({"anyOf": st.lists(schemas, max_size=2)})
    ),
    max_leaves=4,
).map(lambda schema: {"$defs": {"A b": schema}, **schema})
SIGNATURES = st.fixed_dictionaries(
    {
        "input": SCHEMAS,
        "output": SCHEMAS,
        "streams": st.booleans(),
        "description": TEXTS,
        "outputType": TEXTS,
        "contentTypes": st.lists(TEXTS, max_size=1),
    }
)
METADATA = st.fixed_dictionaries(
    {
        "versions": st.lists(TEXTS, max_size=2),
        "inputs": st.lists(TENSORS, max_size=3),
        "parameters": st.none() | st.fixed_dictionaries({"input": TEXTS}),
    },
    optional={"signature": SIGNATURES},
)


@pytest.mark.slow
@given(st.dictionaries(TEXTS, METADATA, max_size=3), TEXTS)
def test_generated_stubs_contain_no_calls_or_assignments(
    models: dict[str, dict[str, Any]], url: str
) -> None:
    source = render(url, models)
    compile(source, "stubs.py", "exec")
    tree = ast.parse(source)
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Call | ast.Assign)]
    assert [node.lineno for node in tree.body if isinstance(node, ast.Expr)] == [1]


@pytest.mark.parametrize("field", ["name", "datatype", "shape", "version", "kind"])
def test_code_sent_by_a_server_is_never_executed(field: str) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1]}
    metadata: dict[str, Any] = {"versions": ["1"], "inputs": [], "parameters": {}}
    if field == "version":
        metadata["versions"] = [CODE]
    elif field == "kind":
        metadata["parameters"] = {"input": CODE}
    else:
        metadata["inputs"] = [tensor | {field: [CODE] if field == "shape" else CODE}]
    source = render("http://a", {"m": metadata})
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    assert (calls, "class MModel" in source) == ([], True)


@pytest.mark.parametrize("name", ["self", "version", "timeout", "a-b", "class", "ﬁ", "__debug__"])
def test_inputs_whose_names_cannot_be_arguments_are_accepted_as_kwargs(name: str) -> None:
    inputs = [{"name": input, "datatype": "FP32", "shape": [1]} for input in ("x", name)]
    source = render("http://a", {"m": {"versions": ["1"], "inputs": inputs}})
    assert "payload: Any = None, /, *, version: str | None" in source
    assert ", **inputs: Any) -> Any: ..." in source


def test_models_whose_names_differ_in_case_or_underscores_share_no_class() -> None:
    names = ["a_b", "aB", "async_a_b", "x", "async_x"]
    tree = ast.parse(render("http://a", {name: {"versions": ["1"]} for name in names}))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    assert len(set(classes)) == len(classes) == 2 * len(names) + 4
