"""A workflow's specification: its fields, its problems, and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tsx_archiver.errors import InvalidConfig
from tsx_archiver.workflow import (
    CycleInSpec,
    InvalidSpec,
    NodeSettings,
    WorkflowSpec,
    parse_spec,
    read_spec,
)


def parse(text: str, has_handler: bool = True) -> WorkflowSpec:
    return parse_spec(yaml.safe_load(text), source="spec.yaml", has_handler=has_handler)


def test_a_model_inherits_the_common_settings() -> None:
    spec = parse("""
models:
    min-workers: 1
    max-workers: 4
    batch-size: 3
    max-batch-delay: 5000
    retry-attempts: 3
    timeout-ms: 5000
    m1:
        url: model1.mar
        max-workers: 2
        retry-attempts: 0
    m2:
        url: model2.mar
dag:
    pre: [m1]
    m1: [m2]
    m2: [post]
""")
    assert spec.settings == NodeSettings(1, 4, 3, 5000, 3, 5000)
    assert spec.nodes["m1"].settings == NodeSettings(1, 2, 3, 5000, 0, 5000)
    assert spec.nodes["m2"].settings == spec.settings
    assert {name: node.url for name, node in spec.nodes.items()} == {
        "pre": None,
        "m1": "model1.mar",
        "m2": "model2.mar",
        "post": None,
    }
    assert spec.functions == ("pre", "post")
    assert spec.leaves == ("post",)
    assert spec.parents == {"pre": (), "m1": ("pre",), "m2": ("m1",), "post": ("m2",)}
    assert spec.problems == ()


def test_a_workflow_of_only_models_needs_no_handler() -> None:
    spec = parse("models: {m1: {url: a.mar}}\ndag: {m1: }", has_handler=False)
    assert spec.leaves == ("m1",)
    assert spec.nodes["m1"].settings == NodeSettings()


def test_one_successor_may_be_written_without_brackets() -> None:
    assert parse("models: {m1: {url: a.mar}}\ndag: {pre: m1}").edges == {"pre": ("m1",), "m1": ()}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("batch-size: two", "models.batch-size: 'two'"),
        ("timeout-ms: 0", "models.timeout-ms: 0"),
        ("min_workers: 2", "did you mean models.min-workers?"),
        ("comment: hello", "models.comment is not a known key"),
        ("m2: {url: b.mar}", "model m2 is not used in the dag"),
    ],
)
def test_settings_without_effect_are_reported_and_ignored(line: str, problem: str) -> None:
    spec = parse(f"models:\n  {line}\n  m1: {{url: a.mar}}\ndag: {{m1: []}}")
    assert len(spec.problems) == 1
    assert problem in spec.problems[0]
    assert spec.nodes["m1"].settings == NodeSettings()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- a\n- b", "spec.yaml holds a list"),
        ("", "spec.yaml holds nothing instead"),
        ("models: [a]\ndag: {a: [b]}", "models holds a list"),
        ("models: {m1: {url: a.mar}}", "dag holds nothing"),
        ("models: {m1: {min-workers: 1}}\ndag: {m1: []}", "model 'm1' has no url"),
        ("models: {m1: {url: [a]}}\ndag: {m1: []}", "model 'm1' has no url"),
        ("dag: {a: {b: c}}", "dag.a holds a dict"),
        ("dag: {'a b': []}", "the node 'a b' has an invalid name"),
        ("dag: {'../x': []}", "the node '../x' has an invalid name"),
        ("models: {model: {url: a.mar}}\ndag: {pre-1: [model]}", "the node pre-1 of the dag"),
        ("dag: {" + ", ".join(f"a{number}: [b]" for number in range(256)) + "}", "257 nodes"),
    ],
)
def test_an_invalid_workflow_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse(text)
    assert reason in caught.value.message


def test_a_node_that_is_not_a_model_needs_a_handler() -> None:
    with pytest.raises(InvalidSpec, match=r"modle .* mean model\?"):
        parse("models: {model: {url: a.mar}}\ndag: {modle: []}", has_handler=False)


def test_a_cycle_is_reported_with_its_nodes() -> None:
    with pytest.raises(CycleInSpec, match=r"has a cycle: .*m1 -> post -> m1|post -> m1 -> post"):
        parse("models: {m1: {url: a.mar}}\ndag: {pre: [m1], m1: [post], post: [m1]}")


@pytest.mark.parametrize(
    "document", ["x: !!python/object/apply:os.system ['touch pwned']", "a: [b", "a: &a [*a]"]
)
def test_a_document_that_is_not_plain_yaml_is_refused(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yaml").write_text(document)
    with pytest.raises(InvalidConfig):
        read_spec(tmp_path / "spec.yaml", has_handler=True)
    assert [file.name for file in tmp_path.iterdir()] == ["spec.yaml"]


@pytest.mark.parametrize(
    "data", [None, 3, "text", [], {}, {"dag": 3}, {"models": 3, "dag": {"a": []}}]
)
def test_values_that_are_not_a_workflow_are_refused(data: Any) -> None:
    with pytest.raises(InvalidSpec):
        parse_spec(data, source="spec.yaml", has_handler=False)
