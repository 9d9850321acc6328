"""What a configuration answers beside what the archive answers as it is."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_archiver import open_archive
from tsx_cli.bench.accuracy import compare_answers, parse_tolerance, reference
from tsx_cli.bench.payloads import Payload
from tsx_cli.failure import CliError, UsageError
from tsx_runtime.plugins import ComparedAnswer


def answer(value: object, status: int = 200) -> ComparedAnswer:
    return ComparedAnswer(status, {}, json.dumps(value).encode())


@pytest.mark.parametrize(
    ("tolerance", "same_top", "kind", "rtol", "atol", "k"),
    [
        (None, None, "numeric", 1e-2, 1e-3, None),
        ("rtol=1e-2,atol=1e-3", None, "numeric", 0.01, 0.001, None),
        (" RTOL = 0.5 ", None, "numeric", 0.5, 0.0, None),
        ("atol=2", None, "numeric", 0.0, 2.0, None),
        ("exact", None, "exact", None, None, None),
        (None, 3, "top-k", None, None, 3),
    ],
)
def test_each_way_to_compare_can_be_said(
    tolerance: str | None, same_top: int | None, kind: str, rtol: float | None, atol: float | None, k: int | None
) -> None:
    how = parse_tolerance(tolerance, same_top)
    assert (how.kind, how.rtol, how.atol, how.k) == (kind, rtol, atol, k)


@pytest.mark.parametrize(
    ("tolerance", "same_top", "said"),
    [
        ("1e-2", None, "'1e-2' is no tolerance; say rtol=1e-2,atol=1e-3"),
        ("rtol=1e-2,", None, "'' is no tolerance"),
        ("rtol=1.2.3", None, "'rtol=1.2.3' is no tolerance"),
        ("rtol=1,rtol=2", None, "'rtol=2' is no tolerance"),
        ("rtol=-1", None, "'rtol=-1' is no tolerance"),
        ("rtol=9e999", None, "'rtol=9e999' is no tolerance"),
        (None, 0, "1 to 1000"),
        ("exact", 1, "two ways to compare"),
    ],
)
def test_what_is_no_tolerance_is_refused(tolerance: str | None, same_top: int | None, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_tolerance(tolerance, same_top)
    assert said in str(refused.value)


def test_rounding_is_no_difference_and_another_label_is_one() -> None:
    given = [answer({"cat": 0.9, "dog": 0.1}), answer([1.0, 2.0])]
    rounded = [answer({"cat": 0.8999, "dog": 0.1001}), answer([1.001, 2.0])]
    turned = [answer({"cat": 0.4, "dog": 0.6}), answer([1.0, 2.0])]
    for how in (parse_tolerance(), parse_tolerance(same_top=1)):
        assert compare_answers(given, rounded, how).same
        found = compare_answers(given, turned, how)
        assert (found.same, found.compared, found.different) == (False, 2, 1)
    assert compare_answers(given, turned, parse_tolerance()).worst == "input 1: dog: 0.1, and 0.6 of this configuration"
    assert not compare_answers(given, rounded, parse_tolerance("exact")).same


def test_an_error_where_the_archive_answers_is_a_difference() -> None:
    found = compare_answers([answer(1)], [answer("no", 500)], parse_tolerance())
    assert found.worst == "input 1: status 200, and 500 of this configuration"


def test_answers_that_come_in_turn_are_compared_each_with_its_own_inputs() -> None:
    found = compare_answers([answer(1), answer(2)], [answer(each) for each in (1, 2, 1, 2, 2)], parse_tolerance())
    assert (found.compared, found.different, found.worst) == (5, 1, "input 1: the whole: 1, and 2 of this configuration")


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5), st.floats(0, 0.1), st.floats(-1, 1))
def test_what_is_within_the_tolerance_is_the_same(numbers: list[float], rtol: float, part: float) -> None:
    moved = [number * (1 + part * rtol) for number in numbers]
    assert compare_answers([answer(numbers)], [answer(moved)], parse_tolerance(f"rtol={rtol * 1.001 + 1e-9:.12f},atol=1e-6")).same
    assert compare_answers([answer(numbers)], [answer(numbers)], parse_tolerance("exact")).same


@pytest.mark.skipif(os.name == "nt", reason="workers that are programs need Linux or macOS")
@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("['%s of %d' % (row['body'], len(data)) for row in data]", None),
        ("['x' + os.urandom(8).hex()] * len(data)", "answers the same request differently each time"),
        ("data[9]", "the archive as it is answers 503 to an input: .*list index out of range"),
    ],
)
def test_the_archive_as_it_is_is_asked_one_by_one_and_must_answer_alike(tmp_path: Path, returned: str, said: str | None) -> None:
    directory = tmp_path / "m"
    (directory / "MAR-INF").mkdir(parents=True)
    manifest = {"model": {"modelName": "m", "modelVersion": "1.0", "handler": "handler.py"}, "runtime": "python"}
    (directory / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
    (directory / "handler.py").write_text(textwrap.dedent(f"import os\n\ndef handle(data, context):\n    return data and {returned}\n"))
    payloads = [Payload(b"a", "text/plain"), Payload(b"b", "text/plain")]
    with open_archive(directory) as archive:
        if said is None:
            assert [each.body for each in reference(archive, payloads, parse_tolerance())] == [b"a of 1", b"b of 1"]
        else:
            with pytest.raises(CliError, match=said):
                reference(archive, payloads, parse_tolerance())
