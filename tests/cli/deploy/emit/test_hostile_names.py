"""Names from an archive and values from a command line stay plain text in every emitted file."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.support.deploying import LOCAL, a_spec
from tests.support.platforms.helm import IS_THERE, objects, render
from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.emit.render import emit
from tsx_cli.deploy.emit.yaml_text import yaml_text
from tsx_cli.deploy.engine.facts import Facts

# Model names may contain anything except slashes, backslashes and control characters.
HOSTILE = (
    """a" b='c'$(id)`id`${HOME}${AWS::Region}{{ .Release.Name }}${{ secrets.X }}"""
    "#!!x &y *z %n ]]><script> TSX1X CHART"
)
FACTS = Facts(Path("digits.mar"), "ab" * 32, HOSTILE, "1e5", "", "", "")
MODEL = f"{HOSTILE}/1e5"
ROLE = "arn:aws:iam::123456789012:role/digits"
KUBERNETES = {"target": "kubernetes", "image": "digits"}


def files(kind: str, facts: Facts = FACTS, arguments: Any = (), **more: Any) -> dict[str, str]:
    return dict(emit(kind, a_spec(**more), facts, LOCAL, arguments).files)


def test_an_image_label_cannot_escape_its_quotes() -> None:
    text = files("dockerfile", target="container")["Dockerfile"]
    (label,) = re.findall(r"^LABEL tsx\.model=(.*) \\$", text, re.MULTILINE)
    quoted = re.fullmatch(r'"((?:[^"\\$]|\\["\\$])*)"', label)
    assert quoted is not None
    assert re.sub(r"\\(.)", r"\1", quoted[1]) == MODEL


def test_compose_reads_a_label_unchanged() -> None:
    text = files("compose", target="container", image="digits")["compose.yaml"]
    labels = yaml.safe_load(text)["services"]["digits"]["labels"]
    assert labels["tsx.model"] == MODEL.replace("$", "$$")


@pytest.mark.parametrize("kind", ["kubernetes", "kustomize"])
def test_a_kubernetes_annotation_has_the_name_unchanged(kind: str) -> None:
    documents = map(yaml.safe_load, files(kind, **KUBERNETES).values())
    metadata = [document["metadata"] for document in documents if "metadata" in document]
    models = [entry["annotations"]["tsx/model"] for entry in metadata if "annotations" in entry]
    assert len(models) > 3
    assert set(models) == {MODEL}


def test_the_templates_of_a_chart_contain_no_name() -> None:
    chart = files("helm", **KUBERNETES)
    names = [name for name, text in chart.items() if "secrets.X" in text]
    assert names == ["Chart.yaml", "templates/NOTES.txt"]
    head = yaml.safe_load(chart["Chart.yaml"])
    assert (head["annotations"]["tsx/model"], head["appVersion"]) == (MODEL, "1e5")
    # Go's YAML would read the unquoted text as a number.
    assert 'appVersion: "1e5"' in chart["Chart.yaml"]
    (request,) = [line for line in chart["templates/NOTES.txt"].splitlines() if "secrets.X" in line]
    assert re.fullmatch(r"  curl http://[\d.:]+/predictions/[\w.%~-]+ --upload-file INPUT", request)


@pytest.mark.skipif(not IS_THERE, reason="needs helm, or helm-python-sdk")
def test_helm_renders_the_name_unchanged(tmp_path: Path) -> None:
    for name, text in files("helm", **KUBERNETES).items():
        (tmp_path / "digits" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "digits" / name).write_text(text)
    values = yaml.safe_load((tmp_path / "digits" / "values.yaml").read_text())
    _, (rendered,) = render(tmp_path / "digits", "digits", "models", [values])
    (deployment,) = (manifest for manifest in objects(rendered) if manifest["kind"] == "Deployment")
    assert deployment["metadata"]["annotations"]["tsx/model"] == MODEL
    assert deployment["spec"]["template"]["metadata"]["annotations"]["tsx/model"] == MODEL


def test_a_stack_substitutes_only_its_account_and_region() -> None:
    env = {"OWN": "${AWS::Region} ${HOME}"}
    text = files("cloudformation", target="lambda", create_role=True, env=env)["template.yaml"]
    properties = yaml.safe_load(text)["Resources"]["Function"]["Properties"]
    assert MODEL in properties["Description"]
    assert properties["Environment"]["Variables"]["OWN"] == env["OWN"]
    parameters = {"AWS::AccountId", "AWS::Region", "AWS::Partition", "Image"}
    for substituted in re.findall(r'"Fn::Sub": "([^"]*)"', json.dumps(yaml.safe_load(text))):
        assert set(re.findall(r"\$\{(.*?)\}", substituted)) <= parameters


def test_a_name_with_a_cloudformation_reference_is_refused() -> None:
    facts = replace(FACTS, model_name="{{resolve:secretsmanager:key}}")
    with pytest.raises(UsageError, match=re.escape("'{{resolve:secretsmanager:key}}/1e5'")):
        files("cloudformation", facts, target="lambda", create_role=True)


def test_a_value_cannot_contain_a_github_expression() -> None:
    expression = "${{ secrets.X }}"
    more = {"model": f"{expression}/{expression}.mar"}
    bounds = {"github": {"slo": expression, "fail_if": [expression]}}
    cluster = {**KUBERNETES, "kubernetes": {"context": expression}}
    for target in (cluster, {"target": "sagemaker", "sagemaker": {"role": ROLE}}):
        arguments = ["--set", f"env.A={expression}"]
        (text,) = files("github", arguments=arguments, **target, **more, **bounds).values()
        yaml.safe_load(text)
        assert "${{ '${{' }} secrets.X }}" in text
        assert expression not in text


@pytest.mark.parametrize("key", ["image", "repository", "region"])
@pytest.mark.parametrize("name", ["a; id", "a\nb", "a'b", "a$(id)", "${{ x }}"])
def test_a_name_with_shell_characters_is_refused(key: str, name: str) -> None:
    with pytest.raises(ValidationError, match=key):
        files("compose", target="container", **{key: name})


@given(st.dictionaries(st.text(), st.text() | st.text("a\n \x85\u2028\0#:!&*%'\"")))
def test_every_text_round_trips_through_yaml(values: dict[str, str]) -> None:
    assert yaml.safe_load(yaml_text([values])) == values


@pytest.mark.parametrize("text", ["1e5", "-1.5E+3", "0o17", "y", "N", "true", "~", "1_000", "1:30"])
def test_a_text_that_looks_like_another_yaml_type_is_quoted(text: str) -> None:
    assert yaml_text([{"a": text}]).strip() in (f'a: "{text}"', f"a: '{text}'")
