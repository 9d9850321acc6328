"""Secrets in plans: variables with secret names are hidden in every format, since CI keeps logs."""

from __future__ import annotations

from typing import Any

import pytest

from tsx_cli.deploy.engine.plan import HIDDEN, Change, Field, Plan, changed_parts, hide_secrets
from tsx_cli.deploy.engine.resources import Resource


@pytest.mark.parametrize(
    ("value", "redacted"),
    [
        (
            {"Variables": {"API_TOKEN": "x", "LEVEL": "low"}},
            {"Variables": {"API_TOKEN": HIDDEN, "LEVEL": "low"}},
        ),
        (
            [{"name": "DB_PASSWORD", "value": "x"}, {"name": "A", "value": "b"}],
            [{"name": "DB_PASSWORD", "value": HIDDEN}, {"name": "A", "value": "b"}],
        ),
        (
            ["run", "--env", "AWS_SECRET_ACCESS_KEY=x=y", "--env", "A=b"],
            ["run", "--env", f"AWS_SECRET_ACCESS_KEY={HIDDEN}", "--env", "A=b"],
        ),
        ({"TSX_DISABLE_TOKEN_AUTHORIZATION": "true"}, {"TSX_DISABLE_TOKEN_AUTHORIZATION": "true"}),
        (
            {"secretKeyRef": {"name": "tokens", "key": "inference"}},
            {"secretKeyRef": {"name": "tokens", "key": "inference"}},
        ),
        ([1, None, True], [1, None, True]),
    ],
)
def test_only_values_of_secret_variables_are_hidden(value: Any, redacted: Any) -> None:
    assert hide_secrets(value) == redacted


def test_a_single_value_is_hidden_by_its_path() -> None:
    change = Change(
        "update",
        Resource("a", "k", "n", {}),
        None,
        (Field("Environment.Variables.HF_TOKEN", "x", "y"),),
    )
    (field,) = Plan((change,)).as_json()["changes"][0]["fields"]
    assert (field["old"], field["new"]) == (HIDDEN, HIDDEN)


def test_only_changed_variables_are_shown_without_secrets() -> None:
    variables = [
        {"name": "A", "value": "a"},
        {"name": "API_TOKEN", "value": "one"},
        {"name": "GONE", "value": "x"},
    ]
    old = [
        {
            "name": "tsx",
            "image": "digits:1",
            "env": variables,
            "terminationMessagePath": "/dev/termination-log",
        }
    ]
    changed = [
        {"name": "A", "value": "b"},
        {"name": "API_TOKEN", "value": "two"},
        {"name": "B", "value": "c"},
    ]
    new = [{"name": "tsx", "image": "digits:2", "env": changed}]
    assert changed_parts(Field("spec.containers", old, new)) == [
        ("spec.containers.tsx.image", "digits:1", "digits:2"),
        ("spec.containers.tsx.env.A.value", "a", "b"),
        ("spec.containers.tsx.env.API_TOKEN.value", HIDDEN, HIDDEN),
        ("spec.containers.tsx.env.GONE", {"name": "GONE", "value": "x"}, None),
        ("spec.containers.tsx.env.B", None, {"name": "B", "value": "c"}),
    ]
    assert changed_parts(Field("Memory", 1, 2)) == [("Memory", 1, 2)]
    assert changed_parts(Field("Layers", ["a"], ["b"])) == [("Layers", ["a"], ["b"])]
    rotated = [variables[2], *variables[:2]]
    assert [path for path, _, _ in changed_parts(Field("env", variables, rotated))] == ["env"]
