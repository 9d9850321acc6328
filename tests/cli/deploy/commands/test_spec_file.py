"""The specification file: errors name the nearest valid key."""

from __future__ import annotations

from pathlib import Path

import pytest

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.commands.spec_file import read_spec
from tsx_cli.deploy.emit.github import command_arguments

HEAD = '[deploy]\ntarget = "kubernetes"\nmodel = "digits.mar"\nimage = "a"\n'


@pytest.mark.parametrize(
    ("table", "error"),
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
        # The message contains the key, and not the whole table.
        ("[deploy.kubernetes]\nreplicas = 0", "replicas is 0, .* or replicas to 1$"),
        ("[deploy.kubernetes]\nreplicas = -1", r"kubernetes\.replicas: .* \(it is -1\)$"),
    ],
)
def test_the_error_of_a_misspelled_key_names_the_nearest(
    table: str, error: str, tmp_path: Path
) -> None:
    (tmp_path / "tsx.toml").write_text(f"{HEAD}{table}\n")
    with pytest.raises(UsageError, match=error):
        read_spec(tmp_path / "tsx.toml", {})


def test_the_table_of_another_deployment_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "tsx.toml").write_text(f"{HEAD}[deploy.faces]\nkubernetes = {{replicas = 3}}\n")
    assert read_spec(tmp_path / "tsx.toml", {}).kubernetes.replicas == 2
    assert read_spec(tmp_path / "tsx.toml", {"name": "faces"}).kubernetes.replicas == 3


def test_labels_with_dots_can_be_given_as_a_table() -> None:
    settings = {
        "name": "digits",
        "target": "kubernetes",
        "model": "digits.mar",
        "tags": '{"example.com/team" = "vision"}',
    }
    labels = '{"eks.amazonaws.com/capacityType" = "SPOT"}'
    kubernetes = {"kubernetes": {"node_selector": labels}}
    spec = read_spec(None, settings | kubernetes)
    assert spec.kubernetes.node_selector == {"eks.amazonaws.com/capacityType": "SPOT"}
    assert spec.tags == {"example.com/team": "vision"}
    arguments = command_arguments(None, kubernetes)
    assert arguments == ["--set", f"kubernetes.node_selector={labels}"]
    for wrong in ("SPOT", '{"a": "b"}', '{"a" = 1}'):
        with pytest.raises(UsageError, match=r"kubernetes\.node_selector"):
            read_spec(None, settings | {"kubernetes": {"node_selector": wrong}})
