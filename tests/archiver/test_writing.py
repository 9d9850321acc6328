from __future__ import annotations

import array
import errno
import hashlib
import json
import os
import random
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest

from tests.archiver.conftest import contents, unpacked
from tsx_archiver import (
    ArchiveSpec,
    Format,
    InvalidConfig,
    open_archive,
    verify_archive,
    write_archive,
)
from tsx_archiver.errors import (
    CannotPack,
    CorruptMember,
    DuplicateInput,
    InputMissing,
    InvalidModelName,
    OutputExists,
)
from tsx_archiver.limits import MIB
from tsx_archiver.rewriting import rewrite_archive
from tsx_archiver.storage import copying
from tsx_archiver.writing import FORMATS

MEMBERS = [
    "config.yaml",
    "handler.py",
    "labels.json",
    "model.py",
    "requirements.txt",
    "sub/deep.txt",
    "weights.bin",
]


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_has_the_same_files_and_checksums(
    spec: ArchiveSpec, tmp_path: Path, cache: Path, format: Format
) -> None:
    path = write_archive(spec, tmp_path / "out", format=format)
    names = {"tgz": "tiny.tar.gz", "no-archive": "tiny"}
    assert path == tmp_path / "out" / names.get(format, "tiny.mar")
    with open_archive(path, cache=cache) as opened:
        files = contents(opened.directory)
        assert sorted(files) == ["MAR-INF/MANIFEST.json", *MEMBERS]
        assert files["weights.bin"] == Path("weights.bin").read_bytes()
        manifest = opened.manifest
        assert (manifest.model_name, manifest.version) == ("tiny", "2.1")
        assert (opened.config.batch_size, opened.problems) == (4, [])
        assert manifest.checksums == {
            name: hashlib.sha256(files[name]).hexdigest() for name in MEMBERS
        }
    assert verify_archive(path) == []


@pytest.mark.parametrize("format", ["default", "zip-store", "tgz"])
def test_the_same_inputs_give_the_same_bytes(
    spec: ArchiveSpec, tmp_path: Path, format: Format
) -> None:
    first = write_archive(spec, tmp_path / "one", format=format).read_bytes()
    for file in [path for path in Path.cwd().rglob("*") if path.is_file()]:
        os.utime(file, (1, 1))
        file.chmod(0o600)
    (Path("extra") / "__pycache__").mkdir()
    (Path("extra") / "__pycache__" / "x.pyc").write_bytes(os.urandom(8))
    assert write_archive(spec, tmp_path / "two", format=format).read_bytes() == first


def test_the_date_is_constant_or_taken_from_source_date_epoch(
    spec: ArchiveSpec, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    with open_archive(write_archive(spec, tmp_path), cache=cache) as opened:
        assert opened.manifest.data["createdOn"] == "01/01/1980 00:00:00"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    with open_archive(write_archive(spec, tmp_path, force=True), cache=cache) as opened:
        assert opened.manifest.data["createdOn"] == "14/11/2023 22:13:20"


def test_weights_and_incompressible_data_are_stored(spec: ArchiveSpec, tmp_path: Path) -> None:
    random_source = random.Random(1)
    weights = array.array("f", (random_source.gauss(0, 1) for _ in range(50_000))).tobytes()
    assert len(zlib.compress(weights)) < 0.95 * len(weights)
    Path("extra/table.dat").write_bytes(weights)
    Path("weights.bin").write_bytes(bytes(300_000))
    Path("extra/labels.json").write_text(json.dumps(list(range(5000))))
    with zipfile.ZipFile(write_archive(spec, tmp_path)) as archive:
        assert (
            archive.getinfo("weights.bin").compress_type
            == archive.getinfo("table.dat").compress_type
            == zipfile.ZIP_STORED
        )
        assert archive.getinfo("labels.json").compress_type == zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(write_archive(spec, tmp_path, force=True, format="zip-store")) as archive:
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Count the bytes of `copy_file_range`, which fails with the error that a test sets."""
    copies, kernel_copy = SimpleNamespace(copied=0, error=None), os.copy_file_range

    def copy(*arguments: int) -> int:
        if copies.error is not None:
            raise OSError(copies.error, "refused")
        count = kernel_copy(*arguments)
        copies.copied += count
        return count

    monkeypatch.setattr(os, "copy_file_range", copy)
    return copies


SIZE = 9 * MIB + 17  # more than one piece


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "copy_file_range"), reason="the kernel copies on Linux only")
@pytest.mark.parametrize("format", ["default", "no-archive"])
@pytest.mark.parametrize("error", [None, errno.ENOSYS])
def test_large_stored_members_are_copied_by_the_kernel_or_the_process(
    spec: ArchiveSpec,
    tmp_path: Path,
    cache: Path,
    kernel: SimpleNamespace,
    format: Format,
    error: int | None,
) -> None:
    content = random.Random(3).randbytes(SIZE)
    Path("weights.bin").write_bytes(content)
    kernel.error = error
    path = write_archive(spec, tmp_path / "out", format=format)
    assert kernel.copied == (0 if error else SIZE)
    with open_archive(path, cache=cache) as opened:
        assert (opened.directory / "weights.bin").read_bytes() == content
        assert opened.manifest.checksums["weights.bin"] == hashlib.sha256(content).hexdigest()
    if format == "default":
        assert kernel.copied == (0 if error else 2 * SIZE)
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            at = archive.getinfo("weights.bin").header_offset
        assert path.read_bytes().index(content[:64], at) % 4096 == 0, (
            "where a file system can share its blocks"
        )
        rewrite_archive(path, {"note.txt": b"x"})
        assert kernel.copied == (0 if error else 3 * SIZE)
    assert verify_archive(path) == []


def test_large_members_give_the_same_bytes_with_and_without_the_kernel(
    spec: ArchiveSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("weights.bin").write_bytes(random.Random(4).randbytes(SIZE))
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 8 * MIB)  # headers of members above 4 GB
    first = write_archive(spec, tmp_path / "one").read_bytes()
    monkeypatch.setattr(copying, "_CAN_COPY", False)
    path = write_archive(spec, tmp_path / "two")
    assert path.read_bytes() == first
    assert first.index(Path("weights.bin").read_bytes()[:64]) % 4096 == 0
    assert verify_archive(path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [lambda file: file.truncate(SIZE - MIB), lambda file: file.seek(0, 2) and file.write(b"x")],
)
def test_a_large_file_that_changes_while_it_is_packed_is_reported(
    spec: ArchiveSpec, tmp_path: Path, change: Callable[[BinaryIO], object]
) -> None:
    Path("weights.bin").write_bytes(random.Random(5).randbytes(SIZE))

    def progress(name: str, done: int, total: int) -> None:
        if name == "weights.bin":
            with Path(name).open("r+b") as file:
                change(file)

    with pytest.raises(CannotPack, match=r"weights\.bin changed while it was packed"):
        write_archive(spec, tmp_path / "out", progress=progress)


@pytest.mark.parametrize("offset", [100, SIZE - 100])
def test_damage_in_a_large_stored_member_is_detected(
    spec: ArchiveSpec, tmp_path: Path, cache: Path, offset: int
) -> None:
    content = random.Random(6).randbytes(SIZE)
    Path("weights.bin").write_bytes(content)
    path = write_archive(spec, tmp_path / "out")
    stored_bytes = bytearray(path.read_bytes())
    stored_bytes[stored_bytes.index(content[:64]) + offset] ^= 1
    path.write_bytes(stored_bytes)
    with pytest.raises(CorruptMember, match=r"'weights\.bin' is damaged"):
        open_archive(path, cache=cache)
    assert unpacked(cache) == []


@pytest.mark.nightly
@pytest.mark.parametrize("format", ["default", "tgz"])
@pytest.mark.parametrize("prefix", [b"", random.Random(2).randbytes(200_000)])
def test_a_packed_file_of_zeros_is_not_refused_as_a_bomb(
    spec: ArchiveSpec, tmp_path: Path, cache: Path, format: Format, prefix: bytes
) -> None:
    with Path("weights.bin").open("wb") as file:
        file.write(prefix)
        file.truncate(80 * MIB)
    with open_archive(write_archive(spec, tmp_path, format=format), cache=cache) as opened:
        assert (opened.directory / "weights.bin").stat().st_size == 80 * MIB


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(
    sys.platform != "linux", reason="reads the peak of a process's memory from /proc"
)
def test_packing_takes_constant_memory(inputs: Path) -> None:
    with Path("weights.bin").open("wb") as file:
        for _ in range(300):
            file.write(os.urandom(MIB // 4))
    code = (
        "from tsx_archiver import *\n"
        "write_archive(ArchiveSpec('big', 'handler.py', serialized_file='weights.bin'), 'out')\n"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(result.stdout) < 60_000, (
        "kilobytes, of which Python itself has half, for a file of 75 megabytes"
    )


def test_progress_counts_up_to_all_bytes(spec: ArchiveSpec, tmp_path: Path) -> None:
    progress_calls: list[tuple[str, int, int]] = []
    write_archive(spec, tmp_path, progress=lambda *report: progress_calls.append(report))
    assert {name for name, _, _ in progress_calls} == set(MEMBERS)
    counts = [done for _, done, _ in progress_calls]
    assert counts == sorted(counts)
    assert (
        counts[-1]
        == progress_calls[-1][2]
        == sum(path.stat().st_size for path in map(find, MEMBERS))
    )


def find(name: str) -> Path:
    return Path(name) if Path(name).exists() else Path("extra") / name


def test_an_existing_archive_is_replaced_only_with_force(spec: ArchiveSpec, tmp_path: Path) -> None:
    for format in FORMATS:
        path = write_archive(spec, tmp_path / format, format=format)
        with pytest.raises(OutputExists, match=path.name):
            write_archive(spec, tmp_path / format, format=format)
        changed = replace(spec, version="9")
        write_archive(changed, tmp_path / format, format=format, force=True)
        with open_archive(path, cache=tmp_path / "cache") as opened:
            assert opened.manifest.version == "9"
        assert list((tmp_path / format).iterdir()) == [path], "nothing partial is left"


def test_a_failure_leaves_the_old_archive_and_nothing_else(
    spec: ArchiveSpec, tmp_path: Path
) -> None:
    for format in FORMATS:
        path = write_archive(spec, tmp_path / format, format=format)
        original = path.read_bytes() if path.is_file() else contents(path)

        def fail(member: str, done: int, total: int) -> None:
            if member == "model.py":
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_archive(spec, tmp_path / format, format=format, force=True, progress=fail)
        assert list((tmp_path / format).iterdir()) == [path]
        assert (path.read_bytes() if path.is_file() else contents(path)) == original


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("format", FORMATS)
def test_a_file_that_changes_during_packing_is_detected(
    spec: ArchiveSpec, tmp_path: Path, format: Format, by: int
) -> None:
    def change(member: str, done: int, total: int) -> None:
        if member == "model.py":
            os.truncate("weights.bin", 10240 + by)

    with pytest.raises(CannotPack, match=r"weights.bin changed while it was packed"):
        write_archive(spec, tmp_path / "out", format=format, progress=change)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_destination_with_the_formats_suffix_is_the_archive_path(
    spec: ArchiveSpec, tmp_path: Path
) -> None:
    assert write_archive(spec, tmp_path / "deep" / "other.mar") == tmp_path / "deep" / "other.mar"
    assert write_archive(spec, tmp_path / "other.tgz", format="tgz") == tmp_path / "other.tgz"
    assert write_archive(spec, tmp_path / "other.tgz.d", format="tgz").name == "tiny.tar.gz"


def test_the_archive_has_the_default_file_permissions(spec: ArchiveSpec, tmp_path: Path) -> None:
    path = write_archive(spec, tmp_path)
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_tar_has_the_models_name_as_its_top_directory(spec: ArchiveSpec, tmp_path: Path) -> None:
    with tarfile.open(write_archive(spec, tmp_path, format="tgz")) as archive:
        assert {info.name.split("/")[0] for info in archive} == {"tiny"}
        assert {(info.mtime, info.uid, info.uname, info.mode) for info in archive.getmembers()} == {
            (0, 0, "", 0o644)
        }


class TestExtraFiles:
    def names(self, spec: ArchiveSpec, tmp_path: Path) -> list[str]:
        with zipfile.ZipFile(write_archive(spec, tmp_path, force=True)) as archive:
            return sorted(set(archive.namelist()) - {"handler.py", "MAR-INF/MANIFEST.json"})

    @pytest.fixture
    def plain_spec(self, inputs: Path) -> ArchiveSpec:
        return ArchiveSpec("tiny", "handler.py")

    def test_lists_patterns_and_directories_are_packed_as_in_torchserve(
        self, plain_spec: ArchiveSpec, tmp_path: Path
    ) -> None:
        for extra, names in [
            ("extra/labels.json,model.py", ["labels.json", "model.py"]),
            ("extra", ["labels.json", "sub/deep.txt"]),
            ("extra/", ["labels.json", "sub/deep.txt"]),
            ("extra/*", ["deep.txt", "labels.json"]),
            ("*.txt,,", ["requirements.txt"]),
            ([Path("extra/sub"), "model.py"], ["deep.txt", "model.py"]),
        ]:
            assert self.names(replace(plain_spec, extra_files=extra), tmp_path) == names, extra

    def test_a_file_that_is_given_twice_is_packed_once(
        self, plain_spec: ArchiveSpec, tmp_path: Path
    ) -> None:
        assert self.names(
            replace(plain_spec, extra_files="handler.py,./handler.py,model.py"), tmp_path
        ) == ["model.py"]

    @pytest.mark.parametrize("name", ["labels.json", "Labels.JSON"])
    def test_the_error_of_two_files_with_one_name_names_both(
        self, plain_spec: ArchiveSpec, tmp_path: Path, name: str
    ) -> None:
        Path("more").mkdir()
        (Path("more") / name).write_text("other")
        with pytest.raises(DuplicateInput, match=rf"extra/labels.json and more/{name} "):
            write_archive(replace(plain_spec, extra_files="extra,more"), tmp_path)

    def test_a_file_with_the_name_of_a_directory_is_refused(
        self, plain_spec: ArchiveSpec, tmp_path: Path
    ) -> None:
        Path("more").mkdir()
        Path("more/sub").write_text("a file")
        with pytest.raises(DuplicateInput, match=r"more/sub .* extra/sub/deep.txt "):
            write_archive(replace(plain_spec, extra_files="extra,more"), tmp_path)

    def test_the_path_of_the_manifest_is_reserved(
        self, plain_spec: ArchiveSpec, tmp_path: Path
    ) -> None:
        Path("extra/MAR-INF").mkdir()
        Path("extra/MAR-INF/MANIFEST.json").write_text("{}")
        with pytest.raises(DuplicateInput, match=r"the archive's own MAR-INF/MANIFEST.json"):
            write_archive(replace(plain_spec, extra_files="extra"), tmp_path)

    def test_links_are_followed_unless_they_are_circular(
        self, plain_spec: ArchiveSpec, tmp_path: Path
    ) -> None:
        Path("extra/link.json").symlink_to("labels.json")
        assert "link.json" in self.names(replace(plain_spec, extra_files="extra"), tmp_path)
        Path("extra/sub/loop").symlink_to("..")
        with pytest.raises(CannotPack, match="is a link to one of its parent"):
            write_archive(replace(plain_spec, extra_files="extra"), tmp_path, force=True)

    def test_a_path_that_is_not_a_file_is_refused(
        self, plain_spec: ArchiveSpec, tmp_path: Path
    ) -> None:
        os.mkfifo("extra/pipe")
        with pytest.raises(CannotPack, match="pipe is not a regular file"):
            write_archive(replace(plain_spec, extra_files="extra"), tmp_path)
        os.remove("extra/pipe")  # noqa: PTH107 - the same as its maker
        Path("extra/gone").symlink_to("nowhere")
        with pytest.raises(InputMissing, match=r"is a broken link\."):
            write_archive(replace(plain_spec, extra_files="extra"), tmp_path)

    def test_in_memory_contents_are_packed(self, plain_spec: ArchiveSpec, tmp_path: Path) -> None:
        assert self.names(replace(plain_spec, contents={"samples/a.txt": b"hello"}), tmp_path) == [
            "samples/a.txt"
        ]
        with pytest.raises(DuplicateInput, match=r"contents model.py"):
            write_archive(
                replace(plain_spec, model_file="model.py", contents={"model.py": b"other"}),
                tmp_path,
            )
        with pytest.raises(CannotPack, match="cannot be a name"):
            write_archive(replace(plain_spec, contents={"../x": b""}), tmp_path)


class TestHandlers:
    @pytest.mark.parametrize(
        ("handler", "manifest"),
        [
            ("handler.py", "handler.py"),
            ("handler", "handler"),
            ("handler.py:handle", "handler.py:handle"),
            ("./handler:handle", "handler:handle"),
            ("image_classifier", "image_classifier"),
        ],
    )
    def test_a_handler_is_a_file_or_built_in(
        self, inputs: Path, tmp_path: Path, handler: str, manifest: str
    ) -> None:
        with zipfile.ZipFile(write_archive(ArchiveSpec("tiny", handler), tmp_path)) as archive:
            assert ("handler.py" in archive.namelist()) == handler.lstrip("./").startswith(
                "handler"
            )
            assert json.loads(archive.read("MAR-INF/MANIFEST.json"))["model"]["handler"] == manifest

    def test_the_cpp_backend_has_its_own_libraries_and_handlers(
        self, inputs: Path, tmp_path: Path
    ) -> None:
        Path("libfast.so").write_bytes(b"\x7fELF")
        for handler, packed in (("libfast:Fast", True), ("TorchScriptHandler", False)):
            spec = ArchiveSpec("tiny", handler, runtime="LSP")
            with zipfile.ZipFile(write_archive(spec, tmp_path, force=True)) as archive:
                assert ("libfast.so" in archive.namelist()) is packed
                manifest = json.loads(archive.read("MAR-INF/MANIFEST.json"))
                assert manifest["model"]["handler"] == handler
        with pytest.raises(InputMissing, match="TorchScriptHandler"):
            write_archive(ArchiveSpec("other", "TorchScriptHandler"), tmp_path)

    def test_a_missing_handler_is_an_error_with_its_name(
        self, inputs: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(InputMissing, match=r"nosuch\.py .* nor one of base_handler"):
            write_archive(ArchiveSpec("tiny", "nosuch"), tmp_path)


@pytest.mark.parametrize("name", ["", "../x", "a b", "a/b", "-x", ".x", "ü"])
def test_a_model_name_with_special_characters_is_refused(
    inputs: Path, tmp_path: Path, name: str
) -> None:
    with pytest.raises(InvalidModelName, match="Model name contains special characters"):
        write_archive(ArchiveSpec(name, "handler.py"), tmp_path)


@pytest.mark.parametrize("version", ["", "1/2", "..", "a\n"])
def test_a_version_that_is_invalid_in_a_url_is_refused(
    inputs: Path, tmp_path: Path, version: str
) -> None:
    with pytest.raises(CannotPack, match="version"):
        write_archive(ArchiveSpec("tiny", "handler.py", version=version), tmp_path)


@pytest.mark.parametrize(
    "field", ["serialized_file", "model_file", "requirements_file", "config_file", "extra_files"]
)
def test_the_error_of_a_missing_input_names_it_and_nothing_is_written(
    inputs: Path, tmp_path: Path, field: str
) -> None:
    with pytest.raises(InputMissing, match=r"gone.xyz does not exist"):
        write_archive(
            replace(ArchiveSpec("tiny", "handler.py"), **{field: "gone.xyz"}), tmp_path / "out"
        )
    assert not (tmp_path / "out").exists()


def test_the_error_of_a_directory_in_place_of_a_file_names_it(inputs: Path, tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="The serialized file extra is a directory"):
        write_archive(ArchiveSpec("tiny", "handler.py", serialized_file="extra"), tmp_path)


def test_the_configuration_is_checked_during_packing(spec: ArchiveSpec, tmp_path: Path) -> None:
    Path("config.yaml").write_text("batch_size: 8\nmaxBatchDelay: soon\n")
    with pytest.raises(InvalidConfig, match=r"batchSize\?; maxBatchDelay: 'soon'"):
        write_archive(spec, tmp_path)
    warnings: list[str] = []
    write_archive(spec, tmp_path, warn=warnings.append)
    assert [text.split(": ")[1].split()[0] for text in warnings] == ["batch_size", "maxBatchDelay"]
    for broken in ("a: [1", "- just\n- a list\n"):
        Path("config.yaml").write_text(broken)
        with pytest.raises(InvalidConfig, match=r"config.yaml"):
            write_archive(spec, tmp_path, force=True, warn=warnings.append)


def test_a_pattern_without_a_match_gets_a_warning_or_an_error(
    spec: ArchiveSpec, tmp_path: Path
) -> None:
    spec_without_match = replace(spec, extra_files="*.nothing")
    with pytest.raises(InputMissing, match=r"did not match any file: \*.nothing"):
        write_archive(spec_without_match, tmp_path)
    warnings: list[str] = []
    write_archive(spec_without_match, tmp_path, warn=warnings.append)
    assert warnings == ["Given wildcard pattern did not match any file: *.nothing"]


def test_fields_of_an_older_manifest_are_kept(
    spec: ArchiveSpec, tmp_path: Path, cache: Path
) -> None:
    old = {
        "license": "MIT",
        "sha256": {"gone": "0"},
        "model": {"modelName": "other", "sourceVocab": "v.pt", "extensions": "e"},
    }
    with open_archive(
        write_archive(replace(spec, extra_manifest=old), tmp_path), cache=cache
    ) as opened:
        assert opened.manifest.data["license"] == "MIT"
        assert (opened.manifest.model_name, opened.manifest.extensions) == ("tiny", "e")
        assert opened.manifest.data["model"]["sourceVocab"] == "v.pt"
        assert "gone" not in opened.manifest.checksums


def test_the_error_of_an_unwritable_destination_names_it(spec: ArchiveSpec, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotPack, match="cannot be written"):
        write_archive(spec, tmp_path / "file" / "below")
    (tmp_path / "tiny.mar").mkdir()
    with pytest.raises(CannotPack, match="is a directory"):
        write_archive(spec, tmp_path, force=True)
