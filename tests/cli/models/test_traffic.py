"""`tsx models traffic`, `label` and `rollback` against a server that is killed and restarted."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.models.conftest import TwoVersions
from tsx_cli.common.failure import UsageError
from tsx_cli.models.traffic import _label, _rule, read_weights, with_shares


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("header X-Beta=1 -> v2", {"header": "X-Beta", "equals": "1", "to": "v2"}),
        ("header X-User~test-.* -> 2.0", {"header": "X-User", "matches": "test-.*", "to": "2.0"}),
        ("  header X-A = b c=d  ->  2.0 ", {"header": "X-A", "equals": "b c=d", "to": "2.0"}),
        ("header X-Empty= -> 2.0", {"header": "X-Empty", "equals": "", "to": "2.0"}),
    ],
)
def test_a_rule_is_parsed(text: str, rule: dict[str, str]) -> None:
    assert _rule(text) == rule


@pytest.mark.parametrize(
    "text", ["", "X-Beta=1 -> v2", "header X-Beta -> v2", "header X-Beta=1", "header X-Beta=1 ->"]
)
def test_the_error_of_an_invalid_rule_gives_a_valid_one(text: str) -> None:
    with pytest.raises(UsageError, match="a rule has the form 'header X-Beta=1 ->"):
        _rule(text)


def test_weights_and_labels_are_parsed() -> None:
    assert read_weights(["1.0=90", "canary=0.5"]) == {"1.0": 90, "canary": 0.5}
    assert _label("stable=1.0") == ("stable", "1.0")
    for invalid in ("1.0", "1.0=", "=5", "1.0=many"):
        with pytest.raises(UsageError, match="takes VERSION=PERCENT"):
            read_weights([invalid])
    for invalid in ("stable", "stable=", "=1.0"):
        with pytest.raises(UsageError, match="takes LABEL=VERSION"):
            _label(invalid)


@pytest.mark.parametrize(
    ("new_weights", "weights", "expected"),
    [
        ({"2.0": 10}, {}, {"1.0": 90, "2.0": 10}),
        ({"2.0": 20}, {"1.0": 90, "2.0": 10}, {"1.0": 80, "2.0": 20}),
        ({"3.0": 10}, {"1.0": 90, "2.0": 10}, {"1.0": 81, "2.0": 9, "3.0": 10}),
        ({"2.0": 100}, {"1.0": 90, "2.0": 10}, {"1.0": 0, "2.0": 100}),
        ({"1.0": 1, "2.0": 3}, {"1.0": 90, "2.0": 10}, {"1.0": 1, "2.0": 3}),
        ({"1.0": 0}, {"1.0": 90, "2.0": 10}, {"1.0": 0, "2.0": 100}),
        ({"canary": 50}, {"1.0": 90, "2.0": 10}, {"1.0": 50, "2.0": None, "canary": 50}),
        ({"1.0": 1}, {}, {"1.0": 1}),
    ],
)
def test_other_versions_keep_their_proportions(
    new_weights: dict[str, float], weights: dict[str, float], expected: dict[str, float | None]
) -> None:
    traffic = {"weights": weights, "labels": {"canary": "2.0"}}
    assert with_shares(new_weights, {"default": "1.0", "traffic": traffic}) == expected


def test_shares_above_100_percent_are_refused() -> None:
    with pytest.raises(UsageError, match=r"add up to 110 %: nothing is left for 1\.0"):
        with_shares({"2.0": 110}, {"default": "1.0", "traffic": {}})


@pytest.mark.parametrize(
    ("new_weights", "weights"), [({"1.0": 0}, {}), ({"1.0": 0, "2.0": 0}, {"1.0": 90, "2.0": 10})]
)
def test_only_zero_shares_are_refused(
    new_weights: dict[str, float], weights: dict[str, float]
) -> None:
    with pytest.raises(UsageError, match="all shares are 0"):
        with_shares(new_weights, {"default": "1.0", "traffic": {"weights": weights}})


def test_two_weights_for_one_version_are_refused() -> None:
    with pytest.raises(UsageError, match=r"'1\.0' has two shares"):
        read_weights(["1.0=90", "2.0=10", "1.0=10"])


@pytest.mark.nightly
def test_traffic_set_by_the_command_survives_a_killed_server(
    run: Run, two_versions: TwoVersions
) -> None:
    two_versions.configure('weights = { "1.0" = 1 }\nlabels = { stable = "1.0" }')

    def models(arguments: str) -> str:
        result = run(f"models {arguments}")
        assert result.code == 0, result.err
        return result.out

    def error_of(arguments: str, code: int = 1) -> str:
        result = run(f"models {arguments}")
        assert result.code == code
        return result.err

    def traffic() -> Any:
        return json.loads(models("traffic digits --json"))["traffic"]

    def answering_versions(*paths: str) -> list[str]:
        return [two_versions.ask(path) for path in paths]

    with two_versions.serving() as running:
        initial_traffic = traffic()
        assert initial_traffic == {"weights": {"1.0": 1}, "labels": {"stable": "1.0"}}
        unknown_version = error_of("traffic digits 3.0=10")
        assert "version or label 3.0; it has 1.0, 2.0" in unknown_version
        assert "--force" in unknown_version
        output = models("traffic digits 2.0=25 --dry-run")
        assert [line.split()[-6:] for line in output.splitlines()[1:3]] == [
            ["100", "%", "75", "%", "0", "0"],
            ["0", "%", "25", "%", "0", "0"],
        ]
        assert output.endswith(
            "would change: weights.1.0: 1 -> 75\nwould change: weights.2.0: none -> 25\n"
        )
        assert traffic() == initial_traffic
        rule = "header X-Beta=1 -> stable"
        output = models(f"traffic digits 2.0=100 --sticky header:X-User --rule '{rule}'")
        assert "100 %" in output
        assert "sticky by header X-User\n" in output
        assert (
            f"\nrule: {rule}\nchanged: weights.1.0: 1 -> 0\nchanged: weights.2.0: none -> 100\n"
            in output
        )
        error_of("label digits next=3.0")
        models("label digits canary=2.0 next=3.0 --force")
        labels = models("label digits --remove next").splitlines()[1:]
        assert [line.split() for line in labels] == [
            ["canary", "2.0", "yes"],
            ["stable", "1.0", "yes"],
        ]
        traffic_before = traffic()
        assert "'nxt'; it has stable, canary" in error_of("label digits new=1.0 --remove nxt")
        error_of("label digits canary=1.0 --remove canary", code=2)
        error_of("label digits --remove ''")
        assert "label 'live' must point to a version" in error_of("label digits live=stable")
        assert "'a/b' is not a valid name" in error_of("traffic a/b")
        assert "'' is not a valid name" in error_of("rollback ''")
        assert traffic() == traffic_before
        models("set-default digits --version 2.0")
        traffic_before_kill = traffic()
        assert answering_versions("", "/stable", "/canary") == ["2.0", "1.0", "2.0"]
        assert running.stop(signal.SIGKILL) != 0
    with two_versions.serving() as running:
        assert traffic() == traffic_before_kill
        assert answering_versions("", "/stable", "/canary") == ["2.0", "1.0", "2.0"]
        assert json.loads(models("describe digits --json"))
        rollback_output = models("rollback digits")
        assert "\nchanged: default: 2.0 -> 1.0\nundone: the change of 20" in rollback_output
        assert rollback_output.endswith("Z; 3 more can be undone\n")
        assert json.loads(models("traffic digits --json"))["default"] != "2.0"
        models("traffic digits --no-rules --sticky none")
        labels = {"stable": "1.0", "canary": "2.0"}
        assert traffic() == {"weights": {"1.0": 0, "2.0": 100}, "labels": labels}
        models("traffic digits --clear")
        assert (traffic(), answering_versions("")) == ({"labels": labels}, ["1.0"])
        new_archive = two_versions.pack("1.1")
        assert "1.1 has taken the place of version 1.0" in models("replace digits-1.1.mar")
        assert traffic() == {"labels": labels | {"stable": "1.1"}}
        assert answering_versions("", "/stable") == ["1.1", "1.1"]
        new_archive.unlink()
        assert running.stop() == 0
    two_versions.configure('weights = { "2.0" = 1 }')
    with two_versions.serving() as running:
        assert traffic() == {"weights": {"2.0": 1}}
        assert "the configuration has changed since then" in running.log
        assert "tsx models label digits stable=1.0" in models("label digits")


def test_the_error_of_invalid_traffic_names_its_setting(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "tsx.toml"
    file.write_text('[models.digits.traffic]\nweigths = { "1.0" = 1 }\n')
    result = run("config show")
    assert result.code != 0
    assert "models.digits.traffic (from " in result.err
    assert "no 'weigths'; did you mean 'weights'?" in result.err
    file.write_text('[models.digits.traffic]\nweights = { "1.0" = 1 }\n')
    settings = json.loads(run("config show --json").out)
    assert settings["models.digits.traffic"]["value"] == {"weights": {"1.0": 1}}
