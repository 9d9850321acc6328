"""The requests in each call of a continuous batch, and those that fail with a call."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.features.continuous.members import Membership

# The requests that arrive in each turn: whether one is guilty, and how many calls it needs.
arrivals = st.lists(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=4), max_size=6)


@given(arrivals)
def test_each_request_ends_once_and_only_guilty_ones_fail(turns: list[list[tuple[bool, int]]]):
    """Simulate guilty requests, which make their first call fail."""
    membership: Membership[int] = Membership()
    guilty_members, remaining, ended_members, failed_members, next_member, called_members = (
        set(),
        {},
        [],
        [],
        0,
        set(),
    )
    calls = 0
    pending = list(turns)
    while pending or membership:
        for is_guilty, call_count in pending.pop(0) if pending else []:
            if is_guilty:
                guilty_members.add(next_member)
            remaining[next_member] = call_count
            membership.join(next_member)
            next_member += 1
        if not membership:
            continue
        members = membership.next_call()
        calls += 1
        assert members
        assert len(set(members)) == len(members)
        assert not set(members) & {*ended_members, *failed_members}
        if any(member in guilty_members and member not in called_members for member in members):
            failed_members += membership.record_failure()
            continue
        called_members.update(members)
        for member in members:
            remaining[member] -= 1
        finished = [member for member in members if remaining[member] == 0]
        membership.record_success(finished)
        ended_members += finished
    assert sorted([*ended_members, *failed_members]) == list(range(next_member))
    assert set(failed_members) == guilty_members
    assert calls <= sum(call_count + 3 for turn in turns for _, call_count in turn)


def members_of(*names: str, may_retry: bool = True) -> Membership[str]:
    membership: Membership[str] = Membership(can_retry=may_retry)
    for name in names:
        membership.join(name)
    return membership


def test_new_requests_join_at_once_and_stay():
    membership = members_of("a")
    assert membership.next_call() == ["a"]
    membership.record_success([])
    membership.join("b")
    membership.join("c")
    assert membership.next_call() == ["a", "b", "c"]
    membership.record_success(["a"])
    assert membership.next_call() == ["b", "c"]


def test_a_failed_call_without_new_requests_ends_all():
    membership = members_of("a", "b")
    membership.next_call()
    membership.record_success([])
    membership.next_call()
    assert membership.record_failure() == ["a", "b"]
    assert not membership


def test_without_retries_a_failed_call_fails_all():
    membership = members_of("a", "b", may_retry=False)
    membership.next_call()
    assert membership.record_failure() == ["a", "b"]


def test_a_member_that_leaves_is_not_in_further_calls():
    membership = members_of("a", "b")
    membership.leave("a")
    assert membership.next_call() == ["b"]
    membership.record_success([])
    membership.leave("b")
    membership.leave("b")
    assert not membership
