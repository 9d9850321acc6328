"""The members of the calls of a continuous batch, and those that a failed call blames."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.worker.execution.continuous_members import Membership

# Requests that arrive in each turn: whether each is guilty, and the calls that it needs.
arrivals = st.lists(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=4), max_size=6)


@given(arrivals)
def test_each_request_ends_once_and_the_guilty_alone_fail(turns: list[list[tuple[bool, int]]]):
    """A guilty request makes its first call fail."""
    membership: Membership[int] = Membership()
    guilty, remaining, ended, failed, joined, seen = set(), {}, [], [], 0, set()
    calls = 0
    pending = list(turns)
    while pending or membership:
        for bad, needs in pending.pop(0) if pending else []:
            if bad:
                guilty.add(joined)
            remaining[joined] = needs
            membership.join(joined)
            joined += 1
        if not membership:
            continue
        now = membership.next_call()
        calls += 1
        assert now
        assert len(set(now)) == len(now)
        assert not set(now) & {*ended, *failed}
        if any(member in guilty and member not in seen for member in now):
            failed += membership.record_failure()
            continue
        seen.update(now)
        for member in now:
            remaining[member] -= 1
        over = [member for member in now if remaining[member] == 0]
        membership.record_success(over)
        ended += over
    assert sorted([*ended, *failed]) == list(range(joined))
    assert set(failed) == guilty
    assert calls <= sum(needs + 3 for turn in turns for _, needs in turn)


def members_of(*names: str, can_retry: bool = True) -> Membership[str]:
    membership: Membership[str] = Membership(can_retry=can_retry)
    for name in names:
        membership.join(name)
    return membership


def test_newcomers_join_at_once_and_stay():
    membership = members_of("a")
    assert membership.next_call() == ["a"]
    membership.record_success([])
    membership.join("b")
    membership.join("c")
    assert membership.next_call() == ["a", "b", "c"]
    membership.record_success(["a"])
    assert membership.next_call() == ["b", "c"]


def test_a_call_without_newcomers_that_fails_ends_all():
    membership = members_of("a", "b")
    membership.next_call()
    membership.record_success([])
    membership.next_call()
    assert membership.record_failure() == ["a", "b"]
    assert not membership


def test_a_handler_that_must_not_be_called_again_fails_all():
    membership = members_of("a", "b", can_retry=False)
    membership.next_call()
    assert membership.record_failure() == ["a", "b"]


def test_a_member_that_leaves_is_in_no_further_call():
    membership = members_of("a", "b")
    membership.leave("a")
    assert membership.next_call() == ["b"]
    membership.record_success([])
    membership.leave("b")
    membership.leave("b")
    assert not membership
