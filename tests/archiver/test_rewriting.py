"""Rewriting archives: files are added or removed, others are unchanged, and failures do nothing."""

from __future__ import annotations

import filecmp
import os
import tarfile
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.archiver.conftest import MakeTar, MakeZip, contents
from tsx_archiver import (
    ArchiveSpec,
    Format,
    inspect_archive,
    open_archive,
    rewrite_archive,
    verify_archive,
    write_archive,
)
from tsx_archiver.errors import ArchiveError, CannotPack, WrongChecksum

CONFIG = b"batchSize: 16\n"
NOTES = b'{"measured": true}' * 50


@pytest.mark.parametrize("form", ["default", "zip-store", "tgz"])
def test_a_rewritten_archive_equals_one_packed_with_the_new_files(
    spec: ArchiveSpec, tmp_path: Path, form: Format
) -> None:
    rewritten = write_archive(spec, tmp_path / "old", format=form)
    rewrite_archive(rewritten, {"config.yaml": CONFIG, "notes.json": NOTES})
    Path("config.yaml").write_bytes(CONFIG)
    packed = write_archive(
        replace(spec, contents={"notes.json": NOTES}), tmp_path / "new", format=form
    )
    assert rewritten.read_bytes() == packed.read_bytes()
    assert not verify_archive(rewritten)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=10)
@given(
    st.dictionaries(
        st.sampled_from(["a", "extra/more", "zz"]), st.binary(max_size=2000), max_size=3
    )
)
def test_rewriting_twice_with_the_same_files_changes_nothing(
    spec: ArchiveSpec, tmp_path: Path, contents: dict[str, bytes]
) -> None:
    path = write_archive(spec, tmp_path / "one.mar", force=True)
    members_before = {member.name for member in inspect_archive(path).members}
    rewrite_archive(path, contents)
    first_content = path.read_bytes()
    rewrite_archive(path, contents)
    assert path.read_bytes() == first_content
    assert {
        member.name for member in inspect_archive(path).members
    } == members_before | contents.keys()
    assert not [finding for finding in verify_archive(path) if finding.is_fault]


def test_an_unpacked_archive_is_changed_in_place(spec: ArchiveSpec, tmp_path: Path) -> None:
    directory = write_archive(spec, tmp_path, format="no-archive")
    rewrite_archive(directory, {"config.yaml": CONFIG, "notes/more.json": NOTES})
    assert (directory / "config.yaml").read_bytes() == CONFIG
    assert (directory / "notes" / "more.json").read_bytes() == NOTES
    assert not verify_archive(directory)
    assert not [path for path in directory.rglob("*") if path.name.endswith(".partial")]


def test_an_archive_of_torchserve_keeps_its_manifest_and_gets_digests(
    make_zip: MakeZip,
) -> None:
    stored = zipfile.ZipInfo("stored.bin")
    path = make_zip(
        (stored, b"s" * 5000),
        ("deflated.txt", b"d" * 5000),
        manifest={"mine": 1, "model": {"modelName": "tiny", "handler": "handler.py"}},
    )
    rewrite_archive(path, {"model-config.yaml": CONFIG}, model={"configFile": "model-config.yaml"})
    inspection = inspect_archive(path)
    assert inspection.manifest.data["mine"] == 1
    assert inspection.config.batch_size == 16
    assert all(
        member.sha256 for member in inspection.members if member.name != "MAR-INF/MANIFEST.json"
    )
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("stored.bin").compress_type == zipfile.ZIP_STORED
        assert archive.getinfo("deflated.txt").compress_type == zipfile.ZIP_DEFLATED


def test_the_top_directory_of_an_archive_is_kept(
    make_tar: MakeTar, make_zip: MakeZip, cache: Path
) -> None:
    packed = make_tar(("tiny/data.bin", b"data"))
    rewrite_archive(packed, {"notes.json": NOTES})
    with tarfile.open(packed) as tar:
        assert set(tar.getnames()) == {
            f"tiny/{name}"
            for name in ("handler.py", "data.bin", "notes.json", "MAR-INF/MANIFEST.json")
        }
    zipped = make_zip(
        ("top/MAR-INF/MANIFEST.json", b'{"model": {"handler": "h.py"}}'),
        ("top/h.py", b"pass"),
        manifest=None,
    )
    rewrite_archive(zipped, {"notes.json": NOTES})
    with zipfile.ZipFile(zipped) as archive:
        assert set(archive.namelist()) == {
            "top/h.py",
            "top/notes.json",
            "top/MAR-INF/MANIFEST.json",
        }
    with open_archive(zipped, cache=cache) as opened:
        assert (opened.directory / "notes.json").read_bytes() == NOTES


def test_no_manifest_is_added_to_an_archive_without_one(make_zip: MakeZip) -> None:
    path = make_zip(("model.py", b"pass"), manifest=None)
    rewrite_archive(path, {"model-config.yaml": CONFIG}, model={"configFile": "model-config.yaml"})
    assert inspect_archive(path).config.batch_size == 16
    assert zipfile.ZipFile(path).namelist() == ["model-config.yaml", "model.py"]


@pytest.mark.parametrize("form", ["default", "zip-store", "tgz", "no-archive"])
def test_added_files_can_be_removed_by_name_or_directory(
    spec: ArchiveSpec, tmp_path: Path, form: Format
) -> None:
    path = write_archive(spec, tmp_path / "one", format=form)
    unchanged_archive = write_archive(spec, tmp_path / "other", format=form)
    rewrite_archive(
        path,
        {"notes.json": NOTES, "forms/a/weights.bin": NOTES, "forms/b": NOTES, "formsless": NOTES},
    )
    rewrite_archive(path, {}, remove=["notes.json", "forms", "formsless", "not-there"])
    assert not verify_archive(path)
    if form == "no-archive":
        assert contents(path) == contents(unchanged_archive)
        assert not (path / "forms").exists()
    else:
        assert path.read_bytes() == unchanged_archive.read_bytes()


@pytest.mark.parametrize("form", ["default", "tgz", "no-archive"])
def test_a_new_file_may_replace_a_removed_directory(
    spec: ArchiveSpec, tmp_path: Path, cache: Path, form: Format
) -> None:
    path = write_archive(spec, tmp_path / "one", format=form)
    rewrite_archive(path, {"forms/old/graph.onnx": b"old", "forms/both": b"old"})
    rewrite_archive(path, {"forms/new/graph.onnx": b"new", "forms/both": b"new"}, remove=["forms/"])
    with open_archive(path, cache=cache) as opened:
        forms = opened.directory / "forms"
        assert contents(forms) == {"new/graph.onnx": b"new", "both": b"new"}
        assert not (forms / "old").exists()
    assert not verify_archive(path)


def test_a_new_file_may_have_the_name_of_a_removed_directory(make_zip: MakeZip) -> None:
    path = make_zip(("forms/", b""), ("forms/old", b"old"))
    rewrite_archive(path, {"forms": b"new"}, remove=["forms"])
    assert sorted(zipfile.ZipFile(path).namelist()) == [
        "MAR-INF/MANIFEST.json",
        "forms",
        "handler.py",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["default", "tgz", "no-archive"])
def test_a_file_is_added_in_constant_memory(
    spec: ArchiveSpec, tmp_path: Path, form: Format
) -> None:
    large = tmp_path / "weights.safetensors"
    large.write_bytes(os.urandom(32 << 20))
    text = tmp_path / "labels.txt"
    text.write_bytes(NOTES * 100)
    by_path, by_bytes = (
        write_archive(spec, tmp_path / name, format=form) for name in ("one", "two")
    )
    rewrite_archive(
        by_bytes, {"forms/a.safetensors": large.read_bytes(), "labels.txt": text.read_bytes()}
    )
    tracemalloc.start()
    rewrite_archive(by_path, {"forms/a.safetensors": large, "labels.txt": text})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 24 << 20
    assert not verify_archive(by_path)
    if form != "no-archive":
        assert filecmp.cmp(by_path, by_bytes, shallow=False)
    else:
        assert filecmp.cmp(by_path / "forms" / "a.safetensors", large, shallow=False)


@pytest.mark.parametrize("form", ["default", "no-archive"])
def test_a_path_that_is_not_a_file_leaves_the_archive_unchanged(
    spec: ArchiveSpec, tmp_path: Path, form: Format
) -> None:
    path = write_archive(spec, tmp_path / "one", format=form)
    members_before = {member.name: member.sha256 for member in inspect_archive(path).members}
    with pytest.raises(ArchiveError, match="regular file"):
        rewrite_archive(path, {"forms/a": NOTES, "forms/b": tmp_path}, remove=["handler.py"])
    assert {
        member.name: member.sha256 for member in inspect_archive(path).members
    } == members_before


@pytest.mark.parametrize("name", ["MAR-INF", "MAR-INF/MANIFEST.json", "../outside", ".", ""])
def test_required_or_invalid_names_are_not_removed(make_zip: MakeZip, name: str) -> None:
    path = make_zip()
    original = path.read_bytes()
    with pytest.raises(CannotPack):
        rewrite_archive(path, {}, remove=[name])
    assert path.read_bytes() == original


@pytest.mark.parametrize("names", [("handler.py/inside",), ("new", "NEW"), ("new", "new/inside")])
def test_colliding_new_names_are_refused(make_zip: MakeZip, names: tuple[str, ...]) -> None:
    path = make_zip()
    original = path.read_bytes()
    with pytest.raises(CannotPack, match="Rename one of them"):
        rewrite_archive(path, dict.fromkeys(names, b"x"))
    assert path.read_bytes() == original


def test_rewriting_keeps_links_and_file_permissions(spec: ArchiveSpec, tmp_path: Path) -> None:
    path = write_archive(spec, tmp_path / "store")
    path.chmod(0o640)
    link = tmp_path / "link.mar"
    link.symlink_to(path)
    rewrite_archive(link, {"notes.json": NOTES})
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert "notes.json" in {member.name for member in inspect_archive(path).members}


def test_a_damaged_archive_is_unchanged(spec: ArchiveSpec, tmp_path: Path) -> None:
    path = write_archive(spec, tmp_path, format="tgz")
    with tarfile.open(path) as tar:
        members = [(info, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]  # they are files
    with tarfile.open(path, "w:gz") as tar:
        for info, content in members:
            file = tmp_path / "content"
            file.write_bytes(content.replace(b"zero", b"one!"))
            tar.addfile(info, file.open("rb"))
    original = path.read_bytes()
    with pytest.raises(WrongChecksum):
        rewrite_archive(path, {"notes.json": NOTES})
    assert path.read_bytes() == original
    assert [file.name for file in tmp_path.iterdir() if file.name.endswith(".partial")] == []


@pytest.mark.parametrize(
    "name", ["../outside", "/absolute", "MAR-INF/MANIFEST.json", "Handler.py", "extra", "a\\b", ""]
)
def test_invalid_member_names_are_refused(make_zip: MakeZip, name: str) -> None:
    path = make_zip(("extra/file.txt", b"x"))
    original = path.read_bytes()
    with pytest.raises(CannotPack):
        rewrite_archive(path, {name: b"x"})
    assert path.read_bytes() == original


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere"
)
def test_a_directory_that_cannot_be_written_is_an_error(spec: ArchiveSpec, tmp_path: Path) -> None:
    path = write_archive(spec, tmp_path / "store")
    path.parent.chmod(0o500)
    try:
        with pytest.raises(CannotPack, match="cannot be written"):
            rewrite_archive(path, {"notes.json": NOTES})
    finally:
        path.parent.chmod(0o700)
