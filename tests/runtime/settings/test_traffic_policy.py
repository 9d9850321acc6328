"""Traffic policies of a model, and the errors of invalid ones."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from tsx_runtime.settings.traffic_policy import NOTHING, Traffic, parse_traffic

FULL_POLICY = {
    "weights": {"1.0": 90, "canary": 10.5},
    "sticky": "cookie:user",
    "rules": [
        {"header": "X-Beta", "equals": "1", "to": "canary"},
        {"header": "X-User", "matches": "test-.*", "to": "2.0"},
    ],
    "labels": {"canary": "2.0"},
    "shadow": {"to": "2.0", "share": 5, "compare": {"kind": "exact"}},
}


def a_rule(**fields: str) -> dict[str, Any]:
    return {"rules": [{"to": "1.0"} | fields]}


def a_shadow(**fields: Any) -> dict[str, Any]:
    return {"shadow": {"to": "2.0", "share": 5} | fields}


def test_a_policy_survives_a_round_trip() -> None:
    assert parse_traffic(FULL_POLICY).as_json() == FULL_POLICY
    assert NOTHING.as_json() == {}
    assert parse_traffic(parse_traffic(FULL_POLICY).as_json()) == parse_traffic(FULL_POLICY)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"weigths": {}}, "traffic has no 'weigths'; did you mean 'weights'?"),
        ({"zzz": {}}, "traffic has no 'zzz'"),
        (a_rule(heeader="a"), "traffic has no 'rules.0.heeader'; did you mean"),
        (a_shadow(shar=1), "traffic has no 'shadow.shar'; did you mean 'share'?"),
        ({"weights": {"1.0": -1}}, "weights.1.0: Input should be greater"),
        ({"weights": {"1.0": float("nan")}}, "weights.1.0: "),
        ({"weights": {"1.0": float("inf")}}, "weights.1.0: "),
        ({"weights": {"1.0": "many"}}, "weights.1.0: "),
        ({"weights": {"a b": 1}}, "weights.a b: a version or label consists"),
        ({"sticky": "user"}, "sticky: it takes header:NAME, cookie:NAME"),
        ({"sticky": "header:X User"}, "sticky: it takes header:NAME"),
        ({"sticky": "field:a.\ud800"}, "sticky: 'field:a.\\ud800' contains half"),
        (a_rule(header="a", equals="\udc80"), "rules.0.equals: '\\udc80' contains half"),
        (a_shadow(compare={"ignore": ["\ud800"]}), "shadow.compare.ignore.0: '\\ud800' contains"),
        (a_rule(header="a"), "rules.0: a rule has either"),
        (a_rule(header="a", equals="1", matches="1"), "rules.0: a rule has either"),
        (a_rule(header="a", matches="("), "rules.0.matches: it is not a regular"),
        (a_rule(header="a", matches="(?=a)a"), "rules.0.matches: it is not a regular"),
        (a_rule(header="a", matches=r"(a)\1"), "rules.0.matches: it is not a regular"),
        (a_rule(header="a", matches=r"(?:\pL{0,100}a){9}"), "rules.0.matches: it is not a regular"),
        (a_rule(header="a:b", equals="1"), "rules.0.header: 'a:b' cannot be"),
        ({"rules": [{"header": "a", "equals": "1"}]}, "rules.0.to: Field required"),
        ({"labels": {"all": "1.0"}}, "labels.all: 'all' cannot be a label"),
        ({"labels": {"../x": "1.0"}}, "labels.../x: a version or label consists"),
        ({"labels": {"canary": "2/0"}}, "labels.canary: a version or label consists"),
        (
            {"labels": {"stable": "1.0", "live": "stable"}},
            "traffic: label 'live' must point to a version, but 'stable' is itself",
        ),
        ({"labels": {"live": "live"}}, "traffic: label 'live' must point to a version"),
        (a_shadow(share=101), "shadow.share: Input should be less"),
        (a_shadow(share=0), "shadow.share: Input should be greater than 0"),
        ([], "traffic: "),
    ],
)
def test_an_invalid_policy_is_reported_with_its_field(policy: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(expected)}") as exc_info:
        parse_traffic(policy)
    assert "https://" not in str(exc_info.value)


def test_a_pattern_without_re2_explains_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "re2", None)
    # A pattern that is already compiled needs no package.
    with pytest.raises(ValueError, match=re.escape("pip install 'tsx-serve[rules]'")):
        parse_traffic(a_rule(header="a", matches="nobody has asked for this one yet"))


def test_changes_are_merged_and_null_removes_a_field() -> None:
    traffic = parse_traffic(FULL_POLICY)
    weights = {"1.0": 50, "canary": None, "3.0": 50}
    changed_traffic = traffic.changed({"weights": weights, "sticky": None, "rules": []})
    assert changed_traffic.as_json() == {
        "weights": {"1.0": 50, "3.0": 50},
        "labels": FULL_POLICY["labels"],
        "shadow": FULL_POLICY["shadow"],
    }
    assert traffic.changed({}) == traffic
    with pytest.raises(ValueError, match="traffic has no 'weight'; did you mean 'weights'"):
        traffic.changed({"weight": {}})


def test_a_policy_with_only_labels_and_a_sticky_key_does_not_split() -> None:
    assert not Traffic(labels={"stable": "1.0"}, sticky="header:x-user").splits
    assert Traffic(weights={"1.0": 0}).splits
