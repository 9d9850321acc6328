"""Routing as pure functions: weights, sticky keys, rules and versions that are ready."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.core.traffic.routing import (
    Table,
    choose_version,
    draw,
    key_in_body,
    key_in_head,
    make_table,
    pick_sticky,
    serving_versions,
    version_by_rule,
)
from tsx_runtime.errors import ModelVersionNotFound
from tsx_runtime.settings.traffic_policy import Rule, Traffic, parse_traffic
from tsx_runtime.wire import MAX_COPIED_BYTES

NUMBERS = ("1.0", "2.0", "3.0", "4.0")
weights = st.dictionaries(
    st.sampled_from(NUMBERS), st.one_of(st.integers(0, 1000), st.floats(0, 1e9)), max_size=4
)
versions = st.sets(st.sampled_from(NUMBERS), min_size=1)
points = st.floats(0, 1, exclude_max=True)
keys = st.binary(max_size=40)


def a_table(
    traffic: Traffic,
    *,
    registered: tuple[str, ...] = NUMBERS,
    ready: tuple[str, ...] = NUMBERS,
    default: str = "1.0",
) -> Table:
    return make_table("digits", traffic, registered, ready, default)


def a_sticky_table(sticky_source: str) -> Table:
    return a_table(Traffic(weights={"1.0": 1, "2.0": 1}, sticky=sticky_source))


@given(weights, versions, versions, points, keys)
def test_versions_that_are_not_ready_get_no_requests(
    weights_by_version: dict[str, float],
    registered: set[str],
    available: set[str],
    point: float,
    key: bytes,
) -> None:
    ready, default = registered & available, min(registered)
    traffic = Traffic(
        weights=weights_by_version,
        rules=[Rule(header="x-to", equals=number, to=number) for number in NUMBERS],
    )
    routes = make_table("digits", traffic, registered, ready, default)
    possible_versions = {number for number in ready if weights_by_version.get(number, 0) > 0}
    for chosen_version in (draw(routes, point), pick_sticky(routes, key)):
        assert (
            chosen_version in possible_versions if possible_versions else chosen_version == default
        )
    for number in NUMBERS:
        assert version_by_rule(routes, [(b"x-to", number.encode())]) == (
            number if number in ready else None
        )
    assert routes.shares().keys() == (possible_versions or {default})
    assert math.isclose(sum(routes.shares().values()), 1)


def test_registered_policy_versions_answer_or_else_the_default() -> None:
    policy = {"weights": {"canary": 1, "3.0": 0, "9.0": 5}, "labels": {"canary": "2.0"}}
    policy_with_rule = policy | {
        "rules": [
            {"header": "a", "equals": "1", "to": "4.0"},
            {"header": "a", "equals": "2", "to": "8.0"},
        ]
    }
    assert serving_versions(parse_traffic(policy), NUMBERS, "1.0") == {"2.0"}
    assert serving_versions(parse_traffic(policy_with_rule), NUMBERS, "1.0") == {"2.0", "4.0"}
    assert serving_versions(Traffic(weights={"9.0": 1}), NUMBERS, "1.0") == {"1.0"}


# JSON can contain lone surrogates.
texts = st.text(st.characters(exclude_categories=()), max_size=5)


@given(texts, texts, texts)
def test_any_accepted_policy_routes_requests(value: str, field: str, header: str) -> None:
    policy = {
        "weights": {"1.0": 1, "2.0": 1},
        "sticky": f"field:{field}",
        "rules": [{"header": header or "a", "equals": value, "to": "2.0"}],
    }
    try:
        traffic = parse_traffic(policy)
    except ValueError:
        return
    routes = a_table(traffic)
    assert version_by_rule(routes, [(routes.rules[0].header, value.strip().encode())]) == "2.0"
    key_in_body(routes, b'{"a": 1}')


@given(
    weights.filter(
        lambda weights_by_version: any(weight > 1e-6 for weight in weights_by_version.values())
    )
)
def test_random_draws_follow_the_weights(weights_by_version: dict[str, float]) -> None:
    routes = a_table(Traffic(weights=weights_by_version))
    count = 2000
    # The draws are spread evenly.
    drawn_versions = [draw(routes, (number + 0.5) / count) for number in range(count)]
    for number, fraction in routes.shares().items():
        assert abs(drawn_versions.count(number) / count - fraction) <= 2 / count


@pytest.mark.slow
@pytest.mark.parametrize(
    "weights_by_version",
    [{"1.0": 90, "2.0": 10}, {"1.0": 1, "2.0": 2, "3.0": 7}, {"1.0": 0.5, "2.0": 0.5}],
)
def test_sticky_keys_follow_the_weights(weights_by_version: dict[str, float]) -> None:
    routes = a_table(Traffic(weights=weights_by_version, sticky="header:x-user"))
    count = 20_000
    sticky_versions = [pick_sticky(routes, b"user-%d" % number) for number in range(count)]
    for number, fraction in routes.shares().items():
        deviation = math.sqrt(fraction * (1 - fraction) / count)
        assert abs(sticky_versions.count(number) / count - fraction) < 5 * deviation


@given(
    st.dictionaries(st.sampled_from(NUMBERS), st.integers(1, 1000), min_size=2),
    st.sampled_from(NUMBERS),
    st.integers(0, 1000),
    st.lists(keys, min_size=1, max_size=30),
)
def test_a_changed_weight_moves_only_keys_of_its_version(
    weights_by_version: dict[str, int], changed_version: str, weight: int, sticky_keys: list[bytes]
) -> None:
    old_table, new_table = (
        a_table(Traffic(weights=weights_by_version)),
        a_table(Traffic(weights=weights_by_version | {changed_version: weight})),
    )
    for key in sticky_keys:
        old_version, new_version = pick_sticky(old_table, key), pick_sticky(new_table, key)
        if old_version != new_version and new_table.versions:
            assert changed_version in (old_version, new_version)
            assert (new_version == changed_version) == (
                weight > weights_by_version.get(changed_version, 0)
            )


def test_a_temporarily_unready_version_regains_its_keys() -> None:
    traffic = Traffic(weights={"1.0": 1, "2.0": 1, "3.0": 1})
    sticky_keys = [b"%d" % number for number in range(300)]
    full_table, table_without_2 = a_table(traffic), a_table(traffic, ready=("1.0", "3.0"))
    for key in sticky_keys:
        assert (
            pick_sticky(table_without_2, key) == pick_sticky(full_table, key)
            or pick_sticky(full_table, key) == "2.0"
        )


def test_two_models_assign_keys_independently() -> None:
    traffic = Traffic(weights={"1.0": 1, "2.0": 1})
    digits, faces = (
        make_table(name, traffic, NUMBERS, NUMBERS, "1.0") for name in ("digits", "faces")
    )
    equal_choices = sum(
        pick_sticky(digits, b"%d" % number) == pick_sticky(faces, b"%d" % number)
        for number in range(2000)
    )
    assert 850 < equal_choices < 1150


def test_a_label_and_its_version_share_one_weight() -> None:
    routes = a_table(
        Traffic(
            weights={"2.0": 10, "canary": 20, "stable": 70},
            labels={"canary": "2.0", "stable": "1.0"},
        )
    )
    assert routes.shares() == {"2.0": 0.3, "1.0": 0.7}


def test_a_version_precedes_a_label_of_the_same_name() -> None:
    assert a_table(Traffic(weights={"2.0": 1}, labels={"2.0": "3.0"})).shares() == {"2.0": 1.0}


def test_rules_apply_in_order_and_skip_unready_versions() -> None:
    rules = [
        Rule(header="X-Group", equals="new", to="4.0"),
        Rule(header="X-Group", matches="new|beta-[0-9]+", to="canary"),
        Rule(header="X-Group", equals="new", to="3.0"),
    ]
    traffic = Traffic(rules=rules, labels={"canary": "2.0"})
    routes = a_table(traffic, ready=("1.0", "2.0", "3.0"))
    assert version_by_rule(routes, [(b"x-group", b" new ")]) == "2.0"
    assert version_by_rule(routes, [(b"x-group", b"beta-7")]) == "2.0"
    assert version_by_rule(routes, [(b"x-group", b"a beta-7")]) is None
    assert version_by_rule(routes, [(b"x-other", b"new")]) is None
    assert version_by_rule(a_table(traffic, ready=("1.0", "3.0")), [(b"x-group", b"new")]) == "3.0"
    assert version_by_rule(routes, [(b"x-group", b"old"), (b"x-group", b"new")]) == "2.0"


def test_patterns_are_not_matched_against_long_values() -> None:
    routes = a_table(Traffic(rules=[Rule(header="x-group", matches="a*", to="2.0")]))
    assert version_by_rule(routes, [(b"x-group", b"a" * 1024)]) == "2.0"
    assert version_by_rule(routes, [(b"x-group", b"a" * 1025)]) is None


@pytest.mark.parametrize("pattern", [r"(a*)*b", r"(a|aa)+b", r"(a|a)*.*.*.*.*.*b", r"(\w+\s?)+!"])
def test_no_value_makes_a_pattern_slow(pattern: str) -> None:
    """Match patterns for which Python's own engine would take years."""
    routes = a_table(Traffic(rules=[Rule(header="x-group", matches=pattern, to="2.0")]))
    assert version_by_rule(routes, [(b"x-group", b"a" * 1024)]) is None


def test_a_sticky_key_is_read_from_a_header() -> None:
    routes = a_sticky_table("header:X-User")
    assert key_in_head(routes, [(b"accept", b"*/*"), (b"x-user", b" ann ")]) == b"ann"
    assert key_in_head(routes, [(b"x-user", b"")]) is None
    assert key_in_head(routes, []) is None


@pytest.mark.parametrize(
    ("cookies", "key"),
    [
        ([b"user=ann"], b"ann"),
        ([b"a=1; user=ann; b=2"], b"ann"),
        ([b"a=1;user=ann"], b"ann"),
        ([b"a=1", b"user=ann"], b"ann"),
        ([b'user="ann"'], b"ann"),
        ([b"user = ann"], b"ann"),
        ([b"user=a=b"], b"a=b"),
        ([b"user="], None),
        ([b"user"], None),
        ([b"User=ann"], None),
        ([b"xuser=ann; userx=bob"], None),
        ([b";;=;"], None),
        ([], None),
    ],
)
def test_a_sticky_key_is_read_from_a_cookie(cookies: list[bytes], key: bytes | None) -> None:
    routes = a_sticky_table("cookie:user")
    assert key_in_head(routes, [(b"cookie", value) for value in cookies]) == key


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b'{"user": {"id": "ann"}}', b"ann"),
        (b' {"user": {"id": 7}}', b"7"),
        (b'{"user": {"id": true}}', b"True"),
        (b'{"user": {"id": ["ann"]}}', None),
        (b'{"user": {"id": null}}', None),
        (b'{"user": ["ann"]}', None),
        (b'{"user": "ann"}', None),
        (b"[1]", None),
        (b"user", None),
        (b"{" * 10, None),
        (b"[" * 10_000, None),
        (b"", None),
    ],
)
def test_a_sticky_key_is_read_from_a_json_field(body: bytes, key: bytes | None) -> None:
    assert key_in_body(a_sticky_table("field:user.id"), body) == key


def test_a_sticky_key_is_read_from_a_field_in_a_list() -> None:
    assert (
        key_in_body(
            a_sticky_table("field:instances.0.user"),
            memoryview(b'{"instances": [{"user": "ann"}]}'),
        )
        == b"ann"
    )


def test_no_sticky_key_is_read_if_one_version_serves() -> None:
    one_ready_table = a_table(
        Traffic(weights={"1.0": 1, "2.0": 1}, sticky="field:user"), ready=("1.0",)
    )
    assert key_in_body(one_ready_table, b'{"user": "ann"}') is None


def test_a_large_body_is_not_parsed_for_a_key() -> None:
    routes = a_sticky_table("field:user")
    body = json.dumps({"user": "ann", "rest": "x" * MAX_COPIED_BYTES}).encode()
    assert key_in_body(routes, body) is None
    assert key_in_body(routes, memoryview(body)) is None


def test_a_label_is_found_if_no_version_has_its_name() -> None:
    versions = {"1.0": "one", "2.0": "two"}
    labels = {"canary": "2.0", "1.0": "2.0", "gone": "3.0"}
    assert choose_version("digits", versions, "1.0", "canary", labels) == "two"
    assert choose_version("digits", versions, "1.0", "1.0", labels) == "one"
    assert choose_version("digits", versions, "1.0", None, labels) == "one"
    with pytest.raises(
        ModelVersionNotFound,
        match=r"3\.0 does not exist .*label gone",
    ):
        choose_version("digits", versions, "1.0", "gone", labels)
    with pytest.raises(ModelVersionNotFound, match="version: other does not exist"):
        choose_version("digits", versions, "1.0", "other", labels)


def test_a_rule_checks_only_the_first_headers_of_its_name():
    table = a_table(Traffic(rules=[Rule(header="X-User", equals="me", to="2.0")]))
    headers = [(b"x-user", b"you")]
    assert version_by_rule(table, [*headers * 7, (b"x-user", b"me")]) == "2.0"
    assert version_by_rule(table, [*headers * 8, (b"x-user", b"me")]) is None


def test_a_sticky_cookie_is_found_among_a_browsers_maximum():
    by_cookie = a_sticky_table("cookie:session")
    assert key_in_head(by_cookie, [(b"cookie", b"a=b;" * 199 + b"session=x")]) == b"x"
    assert key_in_head(by_cookie, [(b"cookie", b"a=b;" * 200 + b"session=x")]) is None
