"""`tsx models traffic`, `label` and `rollback` against a real server, which is killed and started
again.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models import make_model
from tests.support.servers import serving
from tsx_cli.common.failure import UsageError
from tsx_cli.models.traffic import _label, _rule, read_weights, with_shares

NUMBER = """
def handle(data, context):
    return data and [context.manifest["model"]["modelVersion"]] * len(data)
"""


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("header X-Beta=1 -> v2", {"header": "X-Beta", "equals": "1", "to": "v2"}),
        ("header X-User~test-.* -> 2.0", {"header": "X-User", "matches": "test-.*", "to": "2.0"}),
        ("  header X-A = b c=d  ->  2.0 ", {"header": "X-A", "equals": "b c=d", "to": "2.0"}),
        ("header X-Empty= -> 2.0", {"header": "X-Empty", "equals": "", "to": "2.0"}),
    ],
)
def test_a_rule_is_read(text: str, rule: dict[str, str]) -> None:
    assert _rule(text) == rule


@pytest.mark.parametrize(
    "text", ["", "X-Beta=1 -> v2", "header X-Beta -> v2", "header X-Beta=1", "header X-Beta=1 ->"]
)
def test_what_is_no_rule_is_reported_what_one_looks_like(text: str) -> None:
    with pytest.raises(UsageError, match="a rule has the form 'header X-Beta=1 ->"):
        _rule(text)


def test_weights_and_labels_are_read() -> None:
    assert read_weights(["1.0=90", "canary=0.5"]) == {"1.0": 90, "canary": 0.5}
    assert _label("stable=1.0") == ("stable", "1.0")
    for wrong in ("1.0", "1.0=", "=5", "1.0=many"):
        with pytest.raises(UsageError, match="takes VERSION=PERCENT"):
            read_weights([wrong])
    for wrong in ("stable", "stable=", "=1.0"):
        with pytest.raises(UsageError, match="takes LABEL=VERSION"):
            _label(wrong)


@pytest.mark.parametrize(
    ("named", "weights", "wanted"),
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
def test_versions_that_are_not_named_keep_their_proportions(
    named: dict[str, float], weights: dict[str, float], wanted: dict[str, float | None]
) -> None:
    assert (
        with_shares(
            named, {"default": "1.0", "traffic": {"weights": weights, "labels": {"canary": "2.0"}}}
        )
        == wanted
    )


def test_shares_beyond_everything_are_refused() -> None:
    with pytest.raises(UsageError, match=r"add up to 110 %: nothing is left for 1\.0"):
        with_shares({"2.0": 110}, {"default": "1.0", "traffic": {}})


@pytest.mark.parametrize(
    ("named", "weights"), [({"1.0": 0}, {}), ({"1.0": 0, "2.0": 0}, {"1.0": 90, "2.0": 10})]
)
def test_shares_that_are_all_zero_are_refused(
    named: dict[str, float], weights: dict[str, float]
) -> None:
    with pytest.raises(UsageError, match="all shares are 0"):
        with_shares(named, {"default": "1.0", "traffic": {"weights": weights}})


def test_a_version_has_one_weight() -> None:
    with pytest.raises(UsageError, match=r"'1\.0' has two shares"):
        read_weights(["1.0=90", "2.0=10", "1.0=10"])


def test_traffic_is_set_from_a_terminal_and_survives_a_server_that_is_killed(
    run: Callable[..., Any],
    tmp_path: Path,
    user_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    for number in ("1.0", "2.0"):
        make_model(store / f"digits-{number}.mar", NUMBER, name="digits", version=number)
    (tmp_path / "tsx.toml").write_text(
        '[models.digits.traffic]\nweights = { "1.0" = 1 }\nlabels = { stable = "1.0" }\n'
    )
    environment = user_environment | {"TSX_WORKER_PRELOAD": "false", "TSX_LOAD_MODELS": "all"}
    monkeypatch.setenv("TSX_MANAGEMENT_ADDRESS", user_environment["TSX_MANAGEMENT_ADDRESS"])
    predict = f"{user_environment['TSX_INFERENCE_ADDRESS']}/predictions/digits"

    def models(*words: str) -> str:
        ended = run("models", *words)
        assert ended.code == 0, ended.err
        return str(ended.out)

    def said() -> Any:
        return json.loads(models("traffic", "digits", "--json"))["traffic"]

    def ask(path: str = "") -> str:
        return httpx.post(predict + path, content=b"x", timeout=60).raise_for_status().text

    command = ["serve", "--model-store", store]
    with serving(command, tmp_path, environment) as running:
        assert said() == {"weights": {"1.0": 1}, "labels": {"stable": "1.0"}}
        unknown = run("models", "traffic", "digits", "3.0=10")
        assert (
            unknown.code,
            "version or label 3.0; it has 1.0, 2.0" in unknown.err,
            "--force" in unknown.err,
        ) == (1, True, True)
        looked = models("traffic", "digits", "2.0=25", "--dry-run")
        assert [line.split()[-6:] for line in looked.splitlines()[1:3]] == [
            ["100", "%", "75", "%", "0", "0"],
            ["0", "%", "25", "%", "0", "0"],
        ]
        assert looked.endswith(
            "would change: weights.1.0: 1 -> 75\nwould change: weights.2.0: none -> 25\n"
        )
        assert said() == {"weights": {"1.0": 1}, "labels": {"stable": "1.0"}}
        shown = models(
            "traffic",
            "digits",
            "2.0=100",
            "--sticky",
            "header:X-User",
            "--rule",
            "header X-Beta=1 -> stable",
        )
        assert "100 %" in shown
        assert "sticky by header X-User\n" in shown
        assert (
            "\nrule: header X-Beta=1 -> stable\nchanged: weights.1.0: 1 -> 0\nchanged: weights.2.0: none -> 100\n"
            in shown
        )
        assert run("models", "label", "digits", "next=3.0").code == 1
        models("label", "digits", "canary=2.0", "next=3.0", "--force")
        assert [
            line.split() for line in models("label", "digits", "--remove", "next").splitlines()[1:]
        ] == [
            ["canary", "2.0", "yes"],
            ["stable", "1.0", "yes"],
        ]
        kept = said()
        assert (
            "'nxt'; it has stable, canary"
            in run("models", "label", "digits", "new=1.0", "--remove", "nxt").err
        )
        assert run("models", "label", "digits", "canary=1.0", "--remove", "canary").code == 2
        assert run("models", "label", "digits", "--remove", "").code == 1
        assert (
            "label 'live' must point to a version"
            in run("models", "label", "digits", "live=stable").err
        )
        assert (
            "'a/b' is not a valid name"
            in run("models", "traffic", "a/b").err
        )
        assert (
            "'' is not a valid name"
            in run("models", "rollback", "").err
        )
        assert said() == kept
        models("set-default", "digits", "--version", "2.0")
        wanted = said()
        assert (ask(), ask("/stable"), ask("/canary")) == ("2.0", "1.0", "2.0")
        assert running.stop(signal.SIGKILL) != 0
    with serving(command, tmp_path, environment) as running:
        assert said() == wanted
        assert (ask(), ask("/stable"), ask("/canary")) == ("2.0", "1.0", "2.0")
        assert json.loads(models("describe", "digits", "--json"))
        undone = models("rollback", "digits")
        assert "\nchanged: default: 2.0 -> 1.0\nundone: the change of 20" in undone
        assert undone.endswith("Z; 3 more can be undone\n")
        assert json.loads(models("traffic", "digits", "--json"))["default"] != "2.0"
        models("traffic", "digits", "--no-rules", "--sticky", "none")
        assert said() == {
            "weights": {"1.0": 0, "2.0": 100},
            "labels": {"stable": "1.0", "canary": "2.0"},
        }
        models("traffic", "digits", "--clear")
        assert (said(), ask()) == ({"labels": {"stable": "1.0", "canary": "2.0"}}, "1.0")
        make_model(store / "digits-1.1.mar", NUMBER, name="digits", version="1.1")
        assert (
            models("replace", "digits-1.1.mar")
            == 'Model "digits" Version: 1.1 has taken the place of version 1.0 with 1 workers\n'
        )
        assert (said(), ask(), ask("/stable")) == (
            {"labels": {"stable": "1.1", "canary": "2.0"}},
            "1.1",
            "1.1",
        )
        (store / "digits-1.1.mar").unlink()
        assert running.stop() == 0
    (tmp_path / "tsx.toml").write_text('[models.digits.traffic]\nweights = { "2.0" = 1 }\n')
    with serving(command, tmp_path, environment) as running:
        assert said() == {"weights": {"2.0": 1}}
        assert "the configuration has changed since then" in running.log
        assert "tsx models label digits stable=1.0" in models("label", "digits")


def test_a_configuration_with_traffic_that_cannot_be_is_reported_with_its_place(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "tsx.toml").write_text('[models.digits.traffic]\nweigths = { "1.0" = 1 }\n')
    ended = run("config", "show")
    assert ended.code != 0
    assert "models.digits.traffic (from " in ended.err
    assert "no 'weigths'; did you mean 'weights'?" in ended.err
    (tmp_path / "tsx.toml").write_text('[models.digits.traffic]\nweights = { "1.0" = 1 }\n')
    shown = json.loads(run("config", "show", "--json").out)["models.digits.traffic"]
    assert shown["value"] == {"weights": {"1.0": 1}}
