"""Recordings of requests, complete and truncated."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsx_runtime.recordings import NotARecording, Recorded, encode, file_head, read

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
HEADERS = st.lists(st.tuples(TEXT, TEXT), max_size=3).map(tuple)
ENTRIES = st.lists(
    st.tuples(
        st.integers(0, 10**10).map(float),
        TEXT,
        TEXT,
        HEADERS,
        st.binary(max_size=50),
        st.integers(0, 599),
        st.integers(0, 1000).map(float),
    )
    .map(lambda values: Recorded(*values, model="m"))
    .flatmap(lambda entry: TEXT.map(lambda text: entry._replace(request_id=text)))
    .flatmap(
        lambda entry: st.one_of(
            st.just(entry),
            st.tuples(HEADERS, st.binary(max_size=50)).map(
                lambda pair: entry._replace(answer_headers=pair[0], answer=pair[1])
            ),
        )
    ),
    max_size=5,
)


@pytest.mark.slow
@given(ENTRIES, st.integers(0, 60))
def test_entries_of_a_possibly_truncated_file_are_read_in_time_order(
    tmp_path_factory: pytest.TempPathFactory, entries: list[Recorded], cut_size: int
) -> None:
    file = tmp_path_factory.mktemp("recordings") / "a.tsxrec"
    encoded_entries = [encode(entry) for entry in entries]
    content = b"".join(encoded_entries)
    file.write_bytes(file_head("m") + content)
    assert list(read(file)) == sorted(entries, key=lambda entry: entry.at)
    length = len(content) - min(cut_size, len(content))
    file.write_bytes(file_head("m") + content[:length])
    complete_count = next(
        count
        for count in range(len(encoded_entries), -1, -1)
        if sum(map(len, encoded_entries[:count])) <= length
    )
    assert list(read(file)) == sorted(entries[:complete_count], key=lambda entry: entry.at)


def test_the_files_of_a_directory_form_one_recording(tmp_path: Path) -> None:
    first, second, third = (Recorded(time_s, "1.0", "", [], b"%d" % time_s) for time_s in (1, 2, 3))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "a.tsxrec").write_bytes(file_head("m") + encode(third) + encode(first))
    (tmp_path / "m" / "b.tsxrec").write_bytes(file_head("m") + encode(second))
    assert [entry.body for entry in read(tmp_path)] == [b"1", b"2", b"3"]


def test_a_recording_of_an_old_release_has_no_request_ids(tmp_path: Path) -> None:
    head = b'{"at": 1.5, "version": "1.0", "body": 1, "answer": {"status": 200, "seconds": 0.1}}\n'
    (tmp_path / "a.tsxrec").write_bytes(file_head("m") + head + b"x\n")
    assert list(read(tmp_path)) == [Recorded(1.5, "1.0", "", (), b"x", 200, 0.1, model="m")]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "its first line is invalid"),
        (b"\x89PNG\r\n", "its first line is invalid"),
        (b'{"tsx": "recording", "format": 2}\n', "format 2; this tsx reads format 1"),
        (file_head("m") + b"nonsense\n", "damaged at byte 48"),
        (file_head("m") + b'{"at": 1, "body": -5}\n', "damaged"),
        (file_head("m") + b'{"at": 1, "body": 2, "answer": 3}\n', "damaged"),
    ],
)
def test_an_invalid_recording_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "a.tsxrec"
    file.write_bytes(content)
    with pytest.raises(NotARecording, match=reason):
        list(read(file))
    file.unlink()
    with pytest.raises(NotARecording, match=r"contains no recording \(\*"):
        list(read(tmp_path))
