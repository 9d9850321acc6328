"""The specification as a file says it: what is misspelled there is an error that names what was
meant.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.commands.spec_file import read_spec
from tsx_cli.deploy.emit.github import command_words

HEAD = '[deploy]\ntarget = "kubernetes"\nmodel = "digits.mar"\nimage = "a"\n'


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            "[deploy.kubernets]\nreplicas = 3",
            r"kubernets\] .* did you mean 'kubernetes'\?",
        ),
        (
            "[deploy.other]\nmemory = 3",
            "has no 'memory'$",
        ),
        (
            "[deploy.kubernetes]\nreplica = 3",
            r"kubernetes\.replica'; did you mean 'replicas'\?",
        ),
        (
            "[deploy.kubernetes]\nkeda = true",
            r"not a value: kubernetes\.keda\.prometheus",
        ),
        (
            "[deploy.kubernetes]\nreplicas = 0",
            "replicas is 0, .* or replicas to 1$",
        ),  # without the whole table behind it
        ("[deploy.kubernetes]\nreplicas = -1", r"kubernetes\.replicas: .* \(it is -1\)$"),
    ],
)
def test_what_is_misspelled_is_an_error_that_names_what_was_meant(
    table: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "tsx.toml").write_text(f"{HEAD}{table}\n")
    with pytest.raises(UsageError, match=said):
        read_spec(tmp_path / "tsx.toml", {})


def test_a_table_of_another_deployment_is_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "tsx.toml").write_text(f"{HEAD}[deploy.faces]\nkubernetes = {{replicas = 3}}\n")
    assert read_spec(tmp_path / "tsx.toml", {}).kubernetes.replicas == 2
    assert read_spec(tmp_path / "tsx.toml", {"name": "faces"}).kubernetes.replicas == 3


def test_labels_with_dots_can_be_given_as_a_table() -> None:
    given = {
        "name": "digits",
        "target": "kubernetes",
        "model": "digits.mar",
        "tags": '{"example.com/team" = "vision"}',
    }
    labels = '{"eks.amazonaws.com/capacityType" = "SPOT"}'
    spec = read_spec(None, {**given, "kubernetes": {"node_selector": labels}})
    assert spec.kubernetes.node_selector == {"eks.amazonaws.com/capacityType": "SPOT"}
    assert spec.tags == {"example.com/team": "vision"}
    assert command_words(None, {"kubernetes": {"node_selector": labels}}) == [
        "--set",
        f"kubernetes.node_selector={labels}",
    ]
    for wrong in ("SPOT", '{"a": "b"}', '{"a" = 1}'):
        with pytest.raises(UsageError, match=r"kubernetes\.node_selector"):
            read_spec(None, {**given, "kubernetes": {"node_selector": wrong}})
