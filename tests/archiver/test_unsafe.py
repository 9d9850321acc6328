"""Malicious archives: each is refused with its own error and leaves nothing in the cache."""

from __future__ import annotations

import gzip
import io
import json
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.archiver.conftest import HANDLER, MANIFEST, MakeTar, MakeZip, unpacked
from tsx_archiver import ArchiveError, Limits, inspect_archive, open_archive, verify_archive
from tsx_archiver.errors import (
    ArchiveTooLarge,
    CorruptMember,
    DuplicateMember,
    EmptyArchive,
    EncryptedMember,
    LinkMember,
    SpecialMember,
    TooManyMembers,
    TruncatedArchive,
    UnsafePath,
    UnsupportedCompression,
    WrongChecksum,
)
from tsx_archiver.limits import MIB
from tsx_archiver.names import safe_member_name

Refused = Callable[..., str]


@pytest.fixture
def refused(cache: Path) -> Refused:
    """Return a function that checks all three ways to open an archive.

    It returns the text of their error.
    """

    def check(path: Path, kind: type[ArchiveError], limits: Limits = Limits()) -> str:  # noqa: B008
        with pytest.raises(kind) as caught:
            open_archive(path, cache=cache, limits=limits)
        assert type(caught.value) is kind
        assert unpacked(cache) == []
        with pytest.raises(kind):
            inspect_archive(path, limits=limits)
        with pytest.raises(kind):
            verify_archive(path, limits)
        assert path.name in caught.value.message
        return caught.value.message

    return check


UNSAFE_NAMES = [
    "../x",
    "../tiny-evil/x",
    "a/../../x",
    "/etc/x",
    "//x",
    "a\\b",
    "..\\x",
    "C:/x",
    "c:x",
    "a\nb",
    "a\x7f",
    "a/" + "b" * 300,
    "d/" * 2100 + "x",
    "..",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSAFE_NAMES)
def test_a_member_outside_the_target_directory_is_refused(
    make_zip: MakeZip, make_tar: MakeTar, refused: Refused, name: str
) -> None:
    assert "is refused" in refused(make_zip((name, b"x")), UnsafePath)
    assert "is refused" in refused(make_tar((name, b"x")), UnsafePath)


def test_a_name_with_a_nul_byte_is_refused(make_zip: MakeZip, refused: Refused) -> None:
    path = make_zip(("handlerX.py", b"x"))
    path.write_bytes(path.read_bytes().replace(b"handlerX.py", b"handle\x00X.py"))
    assert "control characters" in refused(path, UnsafePath)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (stat.S_IFLNK, LinkMember),
        *(
            (kind, SpecialMember)
            for kind in (stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK)
        ),
    ],
)
def test_a_link_or_a_device_in_a_zip_is_refused(
    make_zip: MakeZip, refused: Refused, kind: int, error: type[ArchiveError]
) -> None:
    info = zipfile.ZipInfo("member")
    info.external_attr = (kind | 0o777) << 16
    refused(make_zip((info, b"/etc/passwd")), error)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        *((kind, LinkMember) for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE)),
        *((kind, SpecialMember) for kind in (tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE)),
    ],
)
def test_a_link_or_a_device_in_a_tar_is_refused(
    make_tar: MakeTar, refused: Refused, kind: bytes, error: type[ArchiveError]
) -> None:
    info = tarfile.TarInfo("tiny/member")
    info.type, info.linkname = kind, "../../etc/passwd"
    refused(make_tar((info, b"")), error)


def test_a_sparse_member_is_refused(make_tar: MakeTar, refused: Refused) -> None:
    info = tarfile.TarInfo("tiny/sparse")
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "tiny/sparse",
        "GNU.sparse.realsize": "1000000",
    }
    assert "is sparse" in refused(
        make_tar((info, b"1\n0\n1\n".ljust(512, b"\0") + b"x")), SpecialMember
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a.py", "a.py"),
        ("a.py", "A.PY"),
        ("sub/a", "SUB/a"),
        ("caf\u00e9", "cafe\u0301"),
        ("./a", "a"),
        ("a", "a/b"),
        ("A", "a/b"),
        ("a/b", "a//b"),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_with_the_same_path_are_refused(
    make_zip: MakeZip, make_tar: MakeTar, refused: Refused, first: str, second: str
) -> None:
    refused(make_zip((first, b"1"), (second, b"2")), DuplicateMember)
    refused(make_tar((f"tiny/{first}", b"1"), (f"tiny/{second}", b"2")), DuplicateMember)


def test_a_decompression_bomb_is_refused(
    make_zip: MakeZip, make_tar: MakeTar, refused: Refused
) -> None:
    zeros = bytes(2 * MIB)
    for path in (make_zip(("zeros", zeros)), make_tar(("tiny/zeros", zeros))):
        text = refused(path, ArchiveTooLarge, Limits(ratio_floor=MIB))
        assert "more than 1.0 MB" in text
        assert "max_dense_archive_size" in text
        for limits in (Limits(ratio_floor=3 * MIB), Limits(ratio_floor=MIB, ratio=2000)):
            with open_archive(path, cache=path.parent / "roomy", limits=limits) as opened:
                assert (opened.directory / "zeros").stat().st_size == len(zeros)


def test_many_small_decompression_bombs_are_refused(make_zip: MakeZip, refused: Refused) -> None:
    path = make_zip(*((f"zeros-{number}", bytes(MIB)) for number in range(4)))
    assert "member 'zeros-2' unpacks from 3.1 kB to 3.1 MB" in refused(
        path, ArchiveTooLarge, Limits(ratio_floor=5 * MIB // 2)
    )


def test_an_archive_above_the_total_size_is_refused(
    make_zip: MakeZip, make_tar: MakeTar, refused: Refused
) -> None:
    for path in (make_zip(("x", b"x" * 5000)), make_tar(("tiny/x", b"x" * 5000))):
        assert "would unpack to more than" in refused(path, ArchiveTooLarge, Limits(total=5000))


def test_more_members_than_allowed_are_refused(
    make_zip: MakeZip, make_tar: MakeTar, refused: Refused
) -> None:
    members = [str(number) for number in range(50)]
    refused(make_zip(*((name, b"") for name in members)), TooManyMembers, Limits(members=50))
    refused(
        make_tar(*((f"tiny/{name}", b"") for name in members)), TooManyMembers, Limits(members=50)
    )


def test_a_huge_zip_directory_is_refused_before_it_is_read(
    make_zip: MakeZip, refused: Refused
) -> None:
    names = [f"{number:0200}" for number in range(100)]
    assert "has a directory of" in refused(
        make_zip(*((name, b"") for name in names)), TooManyMembers, Limits(members=40)
    )


def patched(path: Path, name: bytes, offset: int, value: bytes) -> Path:
    """Change the directory entry of `name`; offsets are those of the zip specification, 4.3.12."""
    content = bytearray(path.read_bytes())
    position = content.rindex(b"PK\x01\x02", 0, content.rindex(name))
    content[position + offset : position + offset + len(value)] = value
    path.write_bytes(content)
    return path


def test_an_encrypted_member_is_refused(make_zip: MakeZip, refused: Refused) -> None:
    assert "encrypted" in refused(
        patched(make_zip(("secret", b"x")), b"secret", 8, b"\x01\x00"), EncryptedMember
    )


@pytest.mark.parametrize(
    ("method", "message"), [(12, "bzip2"), (14, "lzma"), (93, "zstd"), (77, "method 77")]
)
def test_a_compression_that_torchserve_lacks_is_refused(
    make_zip: MakeZip, refused: Refused, method: int, message: str
) -> None:
    assert message in refused(
        patched(make_zip(("odd", b"x")), b"odd", 10, struct.pack("<H", method)),
        UnsupportedCompression,
    )


def test_members_that_share_bytes_are_refused(make_zip: MakeZip, refused: Refused) -> None:
    path = make_zip(("one", bytes(range(250))), ("two", bytes(range(250))))
    with zipfile.ZipFile(path) as archive:
        offset = archive.getinfo("one").header_offset
    assert "overlap" in refused(patched(path, b"two", 42, struct.pack("<I", offset)), CorruptMember)


@pytest.mark.parametrize("size", [0, 1, 99_999])
def test_a_wrong_size_is_detected_during_unpacking_and_cleaned_up(
    make_zip: MakeZip, cache: Path, size: int
) -> None:
    path = patched(make_zip(("liar", b"x" * 1000)), b"liar", 24, struct.pack("<I", size))
    with pytest.raises(CorruptMember, match="liar"):
        open_archive(path, cache=cache)
    assert unpacked(cache) == []
    assert verify_archive(path)[0].is_fault


def test_damaged_bytes_are_detected(make_zip: MakeZip, cache: Path) -> None:
    info = zipfile.ZipInfo("data")
    path = make_zip((info, b"precious bytes"))
    path.write_bytes(path.read_bytes().replace(b"precious", b"previous"))
    with pytest.raises(CorruptMember, match="data"):
        open_archive(path, cache=cache)
    first = verify_archive(path)[0]
    assert first.is_fault
    assert "data" in first.text


def test_an_undecodable_name_in_a_members_header_is_damage(make_zip: MakeZip, cache: Path) -> None:
    path = make_zip(("last", b"x"))
    content = bytearray(path.read_bytes())
    # The first occurrence is the header before the member's bytes, whose flag says UTF-8.
    position = content.index(b"last")
    content[position - 23], content[position] = 0x08, 0xFF
    path.write_bytes(content)
    with pytest.raises(CorruptMember, match="'last' cannot be read"):
        open_archive(path, cache=cache)


def test_a_wrong_sha256_is_detected_and_cleaned_up(
    make_zip: MakeZip, make_tar: MakeTar, cache: Path
) -> None:
    manifest = {**MANIFEST, "sha256": {"data": "0" * 64}}
    for path in (
        make_zip(("data", b"x"), manifest=manifest),
        make_tar(("tiny/data", b"x"), manifest=manifest),
    ):
        with pytest.raises(WrongChecksum, match="the sha-256 of 'data' is 2d711642b726b044"):
            open_archive(path, cache=cache)
        assert unpacked(cache) == []
        findings = verify_archive(path)
        assert (findings[0].is_fault, findings[0].member) == (True, "data")
        assert [finding.member for finding in findings[1:]] == ["handler.py"], (
            "it has no sha-256, which is no fault"
        )


def test_a_missing_member_is_detected_by_its_checksum(make_zip: MakeZip, cache: Path) -> None:
    path = make_zip(manifest={**MANIFEST, "sha256": {"gone": "0" * 64}})
    with pytest.raises(WrongChecksum, match="'gone', which is missing"):
        open_archive(path, cache=cache)
    assert "'gone' is missing" in verify_archive(path)[0].text


def test_a_huge_tar_header_is_not_read_into_memory(tmp_path: Path, refused: Refused) -> None:
    info = tarfile.TarInfo("././@PaxHeader")
    info.type, info.size = tarfile.XHDTYPE, 50 * MIB
    path = tmp_path / "bomb.tar.gz"
    with gzip.open(path, "wb", 1) as packed:
        packed.write(info.tobuf() + bytes(50 * MIB + 1024))
    assert "holds a header of" in refused(path, ArchiveTooLarge)


@pytest.mark.slow
def test_zeros_after_the_end_of_a_tar_are_counted(make_tar: MakeTar, refused: Refused) -> None:
    path = make_tar()
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + bytes(80 * MIB), 1))
    assert "as zip bombs do" in refused(path, ArchiveTooLarge)


def test_a_tar_with_a_broken_header_in_its_middle_is_refused(
    make_tar: MakeTar, refused: Refused
) -> None:
    path = make_tar(("tiny/last", b"x"))
    content = bytearray(gzip.decompress(path.read_bytes()))
    position = content.index(b"tiny/last")
    content[position : position + 4] = b"yyyy"  # breaks the header's checksum
    path.write_bytes(gzip.compress(content))
    assert "a member's header is invalid" in refused(path, TruncatedArchive)


def test_an_archive_of_only_directories_is_refused(
    make_zip: MakeZip, make_tar: MakeTar, refused: Refused
) -> None:
    directory = tarfile.TarInfo("sub")
    directory.type = tarfile.DIRTYPE
    for path in (
        make_zip(("sub/", b""), manifest=None),
        make_tar((directory, b""), manifest=None),
        make_zip(manifest=None),
    ):
        assert "without files" in refused(path, EmptyArchive)


PARTS = st.sampled_from(
    ["..", ".", "", "a", "B", "b", "...", "C:", "\\", "\x00", "é", "e\u0301", "MAR-INF"]
)


@given(st.lists(PARTS, max_size=6).map("/".join))
def test_no_accepted_name_leads_outside_the_target(name: str) -> None:
    try:
        safe = safe_member_name(name, "x.mar")
    except UnsafePath:
        return
    target = Path("/target")
    destination = target / safe
    assert destination == target or target in destination.parents
    assert ".." not in destination.parts


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.lists(st.lists(PARTS, min_size=1, max_size=4).map("/".join).filter(bool), max_size=4),
    damage=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=3),
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_no_archive_writes_outside_the_target(
    tmp_path: Path, names: list[str], damage: list[tuple[int, int]]
) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(MANIFEST))
        archive.writestr("handler.py", HANDLER)
        for name in names:
            info = zipfile.ZipInfo("x")
            info.filename = name  # ZipInfo() would cut the name at a NUL
            archive.writestr(info, "x")
    raw = bytearray(content.getvalue())
    for position, value in damage:
        raw[position % len(raw)] = value
    room = tmp_path / "room"
    room.mkdir(exist_ok=True)
    path = room / "any.mar"
    path.write_bytes(raw)
    try:
        with open_archive(path, cache=room / "cache") as opened:
            assert (room / "cache") in opened.directory.parents
    except ArchiveError:
        pass
    assert {entry.name for entry in tmp_path.iterdir()} == {"room"}
    assert {entry.name for entry in room.iterdir()} <= {"any.mar", "cache"}
    assert list((room / "cache" / "archives" / "partial").glob("*")) == []
