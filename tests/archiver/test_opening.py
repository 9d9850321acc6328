from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.archiver.conftest import HANDLER, MakeTar, MakeZip
from tsx_archiver import (
    ArchiveNotFound,
    ArchiveSpec,
    InvalidConfig,
    default_model_name,
    inspect_archive,
    is_model_name,
    open_archive,
    verify_archive,
    write_archive,
)
from tsx_archiver.errors import (
    CannotOpen,
    EmptyArchive,
    ForeignFile,
    InvalidManifest,
    TruncatedArchive,
)


def check_refused(path: Path, cache: Path, kind: type[Exception], message: str) -> None:
    """Check that all three ways to open an archive raise exactly this error."""
    for use in (lambda path: open_archive(path, cache=cache), inspect_archive, verify_archive):
        with pytest.raises(kind, match=message) as caught:
            use(path)
        assert type(caught.value) is kind


def test_the_error_of_a_missing_file_names_it(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ArchiveNotFound, match=r"gone.mar does not exist. Check the path"):
        open_archive(tmp_path / "gone.mar", cache=cache)
    (tmp_path / "digits.mar").touch()
    with pytest.raises(ArchiveNotFound, match=r"digit\.mar .* 'digits\.mar'"):
        open_archive(tmp_path / "digit.mar", cache=cache)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("x" * 300 + ".mar", ArchiveNotFound, r"x\.\.\.' \(\d+ characters\) .* too long"),
        ("x.mar\0", ArchiveNotFound, r"x.mar\\x00' .* no file can"),
        ("x\ud800.mar", ArchiveNotFound, r"x\\ud800.mar' .* no file can"),
        ("file/x.mar", ArchiveNotFound, "file/x.mar does not exist"),
        ("circle.mar", CannotOpen, "circle.mar .* loop"),
    ],
)
def test_a_path_that_no_system_call_takes_is_reported(
    tmp_path: Path, cache: Path, name: str, kind: type[Exception], message: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "circle.mar").symlink_to("circle.mar")
    path = tmp_path / name
    check_refused(path, cache, kind, message)


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"", EmptyArchive, r"is empty \(0 bytes\)"),
        (b"P", TruncatedArchive, "truncated"),
        (b"\x1f", TruncatedArchive, "truncated"),
        (b"PK\x03\x04" + bytes(300), TruncatedArchive, "ends before its directory"),
        (b"PK\x05\x06" + bytes(18), EmptyArchive, "without files"),
        (b"\x1f\x8b\x08\x00", TruncatedArchive, "damaged or truncated"),
        (gzip.compress(b"hello", mtime=0), ForeignFile, "gzipped, but"),
        (gzip.compress(b"hello" * 500, mtime=0), ForeignFile, "gzipped, but"),
        (b"<!DOCTYPE html>", ForeignFile, "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", ForeignFile, "git lfs pull"),
        (b"\x80\x04K\x01.", ForeignFile, "tsx archive"),
        (b"just text", ForeignFile, "is not a model archive"),
        (b"\x7fELF" + bytes(100), ForeignFile, "is not a model archive"),
    ],
)
def test_files_that_are_not_archives_get_specific_errors(
    tmp_path: Path, cache: Path, content: bytes, kind: type[Exception], message: str
) -> None:
    path = tmp_path / "x.mar"
    path.write_bytes(content)
    check_refused(path, cache, kind, message)


def test_every_truncation_is_detected(spec: ArchiveSpec, tmp_path: Path, cache: Path) -> None:
    for format in ("default", "tgz"):
        archive = write_archive(spec, tmp_path / "whole", format=format)  # type: ignore[arg-type]  # each is a Format
        content = archive.read_bytes()
        path = tmp_path / f"cut-{archive.name}"
        for length in (
            10,
            len(content) // 3,
            len(content) // 2,
            len(content) - 25,
            len(content) - 1,
        ):
            path.write_bytes(content[:length])
            with pytest.raises((TruncatedArchive, CannotOpen)):
                open_archive(path, cache=cache)


def test_a_zip_of_another_kind_is_foreign(make_zip: MakeZip, cache: Path) -> None:
    with pytest.raises(ForeignFile, match=r"neither MAR-INF/MANIFEST.json nor a handler"):
        open_archive(
            make_zip(("[Content_Types].xml", b"x"), ("word/document.xml", b"x"), manifest=None),
            cache=cache,
        )


@pytest.mark.parametrize("name", ["tiny.mar", "tiny.model", "tiny.anything"])
def test_the_format_is_recognized_by_content_and_not_by_name(
    make_zip: MakeZip, make_tar: MakeTar, cache: Path, name: str
) -> None:
    for make in (make_zip, make_tar):
        with open_archive(make(name=name), cache=cache) as opened:
            assert (opened.directory / "handler.py").read_text() == HANDLER


def test_an_archive_without_a_manifest_is_named_after_its_file(
    make_zip: MakeZip, cache: Path, tmp_path: Path
) -> None:
    path = make_zip(
        ("handler.py", b""),
        ("model-config.yaml", b"batchSize: 2"),
        manifest=None,
        name="resnet-18 v1.mar",
    )
    with open_archive(path, cache=cache) as opened:
        assert (opened.manifest.model_name, opened.manifest.version, opened.manifest.handler) == (
            "resnet_18_v1",
            "1.0",
            "",
        )
        assert (opened.manifest.data, opened.config.batch_size) == ({}, 2)
    with open_archive(path, cache=cache, name="given") as opened:
        assert opened.manifest.model_name == "given"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a/b/x.mar", "x"),
        ("x-y.tar.gz", "x-y"),
        ("x.MODEL", "x"),
        ("my net.pt2", "my_net"),
        ("net-0.5.pt2", "net-0.5"),
        ("ü.mar", "model"),
        ("-dash.pth", "dash"),
        ("__x.mar", "x"),
    ],
)
def test_a_default_name_keeps_the_characters_allowed_in_model_names(path: str, name: str) -> None:
    assert default_model_name(Path(path)) == name


@given(st.text(min_size=1, max_size=40))
def test_a_default_name_is_a_valid_model_name(path: str) -> None:
    assert is_model_name(default_model_name(path))


def test_an_archive_may_have_one_top_directory(
    make_zip: MakeZip, make_tar: MakeTar, cache: Path
) -> None:
    manifest = json.dumps({"model": {"modelName": "inner", "handler": "h.py"}}).encode()
    members = [
        ("top/MAR-INF/MANIFEST.json", manifest),
        ("top/h.py", b""),
        (".DS_Store", b""),
        ("__MACOSX/top/h.py", b""),
    ]
    for path in (make_zip(*members, manifest=None), make_tar(*members, manifest=None)):
        with open_archive(path, cache=cache) as opened:
            assert (
                opened.manifest.model_name,
                opened.directory.name,
                (opened.directory / "h.py").exists(),
            ) == ("inner", "top", True)
        assert sorted(
            member.name
            for member in inspect_archive(path).members
            if member.name.startswith(("MAR", "h"))
        ) == [
            "MAR-INF/MANIFEST.json",
            "h.py",
        ]


def test_a_tar_of_the_current_directory_opens(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "m" / "sub").mkdir(parents=True)
    (tmp_path / "m" / "handler.py").write_text(HANDLER)
    (tmp_path / "m" / "sub" / "a.txt").write_text("a")
    with tarfile.open(tmp_path / "m.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "m", ".")
    with open_archive(tmp_path / "m.tar.gz", cache=cache) as opened:
        assert (opened.directory / "sub" / "a.txt").read_text() == "a"


def test_empty_directories_of_an_archive_are_created(make_zip: MakeZip, cache: Path) -> None:
    with open_archive(make_zip(("empty/", b"")), cache=cache) as opened:
        assert (opened.directory / "empty").is_dir()


class TestDirectories:
    @pytest.fixture
    def model(self, spec: ArchiveSpec, tmp_path: Path) -> Path:
        return write_archive(spec, tmp_path, format="no-archive")

    def test_a_directory_is_used_in_place(self, model: Path, cache: Path) -> None:
        with open_archive(model, cache=cache) as opened:
            assert (opened.directory, opened.digest, opened.problems) == (model, None, [])
        assert not cache.exists()

    def test_a_directory_may_contain_the_models_directory(self, model: Path, cache: Path) -> None:
        parent = model.parent / "outer"
        parent.mkdir()
        model.rename(parent / "tiny")
        with open_archive(parent, cache=cache) as opened:
            assert opened.directory == parent / "tiny"
        assert inspect_archive(parent).manifest.model_name == "tiny"

    def test_a_relative_path_becomes_absolute(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(model.parent)
        assert open_archive(Path("tiny")).directory == model

    def test_an_empty_and_a_foreign_directory_get_different_errors(self, tmp_path: Path) -> None:
        (tmp_path / "none").mkdir()
        with pytest.raises(EmptyArchive, match="contains no files"):
            open_archive(tmp_path / "none")
        (tmp_path / "none" / "letter.txt").touch()
        with pytest.raises(ForeignFile, match="is not a model archive"):
            open_archive(tmp_path / "none")

    def test_verify_reports_a_changed_file(self, model: Path) -> None:
        assert verify_archive(model) == []
        (model / "handler.py").write_text("changed")
        (model / "new.txt").write_text("new")
        (model / "labels.json").unlink()
        assert [(finding.is_fault, finding.member) for finding in verify_archive(model)] == [
            (True, "handler.py"),
            (True, "labels.json"),
            (False, "new.txt"),
        ]


def test_missing_files_of_the_manifest_are_problems(make_zip: MakeZip, cache: Path) -> None:
    model = {
        "modelName": "m",
        "handler": "gone.py:f",
        "serializedFile": "w.pt",
        "modelFile": "handler.py",
        "configFile": "c.yaml",
    }
    path = make_zip(manifest={"model": model})
    missing = [
        f"the manifest names {name}, which the archive does not contain"
        for name in ("handler gone.py", "serializedFile w.pt", "configFile c.yaml")
    ]
    with open_archive(path, cache=cache) as opened:
        assert opened.problems == missing
    assert inspect_archive(path).problems == missing
    assert [finding.text for finding in verify_archive(path) if finding.is_fault] == missing


def test_a_questionable_configuration_is_a_problem_and_a_broken_one_an_error(
    make_zip: MakeZip, cache: Path
) -> None:
    manifest = {"model": {"modelName": "m", "handler": "handler.py", "configFile": "c.yaml"}}
    path = make_zip(("c.yaml", b"batchsize: 4\nmaxWorkers: many\n"), manifest=manifest)
    with open_archive(path, cache=cache) as opened:
        assert [text.split()[1].rstrip(":") for text in opened.problems] == [
            "batchsize",
            "maxWorkers",
        ]
        assert opened.config.raw == {"batchsize": 4, "maxWorkers": "many"}
    path = make_zip(("c.yaml", b"a: !!python/name:os.system"), manifest=manifest)
    with pytest.raises(InvalidConfig, match=r"^c.yaml of m cannot be read as YAML"):
        open_archive(path, cache=cache)
    assert [finding.is_fault for finding in verify_archive(path)][:1] == [True]


def test_a_manifest_path_outside_the_archive_is_refused_before_unpacking(
    make_zip: MakeZip, make_tar: MakeTar, cache: Path
) -> None:
    manifest = {
        "model": {"modelName": "m", "handler": "handler.py", "serializedFile": "../../etc/passwd"}
    }
    for path in (make_zip(manifest=manifest), make_tar(manifest=manifest)):
        with pytest.raises(InvalidManifest, match="serializedFile") as caught:
            open_archive(path, cache=cache)
        assert caught.value.message.startswith(str(path))
        assert list((cache / "archives" / "entries").iterdir()) == []


def test_inspect_returns_sizes_checksums_and_the_model_kind(
    spec: ArchiveSpec, tmp_path: Path
) -> None:
    for format in ("default", "tgz", "no-archive"):
        info = inspect_archive(write_archive(spec, tmp_path / format, format=format))  # type: ignore[arg-type]  # each is a Format
        assert info.form == {"default": "mar", "tgz": "tar.gz", "no-archive": "directory"}[format]
        assert [member.size for member in info.members if member.name == "weights.bin"] == [10240]
        assert all(
            member.sha256 for member in info.members if member.name != "MAR-INF/MANIFEST.json"
        )
        assert info.model is not None
        assert info.model.kind == "unknown"
        assert info.model.problem is not None
        assert info.size > 0


def test_a_path_that_is_not_a_regular_file_is_refused(tmp_path: Path, cache: Path) -> None:
    os.mkfifo(tmp_path / "pipe.mar")
    with pytest.raises(ForeignFile, match="is not a regular file"):
        open_archive(tmp_path / "pipe.mar", cache=cache)


def test_bytes_after_the_end_of_a_tar_are_ignored(make_tar: MakeTar, cache: Path) -> None:
    path = make_tar()
    raw = io.BytesIO(gzip.decompress(path.read_bytes()) + bytes(4096))
    path.write_bytes(gzip.compress(raw.getvalue()))
    with open_archive(path, cache=cache) as opened:
        assert opened.manifest.model_name == "tiny"


def test_progress_is_reported_in_bytes(make_zip: MakeZip, cache: Path) -> None:
    path = make_zip(("weights.bin", os.urandom(3 << 20)))
    progress_steps: list[tuple[str, int, int]] = []
    open_archive(path, cache=cache, progress=lambda *step: progress_steps.append(step)).close()
    size = path.stat().st_size
    assert [step for step in progress_steps if step[0] == "reading"][-1] == ("reading", size, size)
    unpacked = [unpacked_bytes for step, unpacked_bytes, _ in progress_steps if step == "unpacking"]
    assert unpacked == sorted(unpacked)
    assert len(unpacked) > 3
    assert progress_steps[-1][1] == progress_steps[-1][2] > 3 << 20
    first_count = len(progress_steps)
    open_archive(path, cache=cache, progress=lambda *step: progress_steps.append(step)).close()
    assert not [
        step for step in progress_steps[first_count:] if step[0] == "unpacking"
    ]  # the archive is already in the cache
