"""Forms that are written into an archive and removed from it again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from tsx_archiver import (
    ArchiveSpec,
    Format,
    inspect_archive,
    open_archive,
    read_member,
    verify_archive,
    write_archive,
)
from tsx_archiver.metadata.forms import FORMS_FILE, FormRecord, parse_forms
from tsx_cli.bench.report.write_back import check_writable
from tsx_cli.common.failure import CliError
from tsx_cli.optimize.builder import BuiltForm
from tsx_cli.optimize.results import FormResult, GuardVerdict
from tsx_cli.optimize.write_back import (
    digest_of,
    keep_forms,
    measured_of,
    remove_forms,
    source_digests,
)
from tsx_runtime.settings.schema import Settings

DIGITS = Path(__file__).parents[3] / "examples" / "digits"
VERDICT = GuardVerdict(
    passed=True,
    metric="top1",
    limit="top1>=-0.5%",
    value=1,
    reference=1,
    loss=0,
    loss_bound=0.004,
    rows=700,
    text="it is as accurate",
)


def archive_in(directory: Path, form: Format = "default", **more: Any) -> Path:
    fields = {
        "model_file": DIGITS / "model.py",
        "serialized_file": DIGITS / "digits.pth",
        "config_file": DIGITS / "model-config.yaml",
        **more,
    }
    spec = ArchiveSpec("digits", str(DIGITS / "handler.py"), **fields)
    return write_archive(spec, directory, format=form)


def make_form(root: Path, name: str, content: bytes = b"graph") -> BuiltForm:
    directory = root / name
    (directory / "more").mkdir(parents=True)
    (directory / "model.onnx").write_bytes(content)
    (directory / "more" / "weights.bin").write_bytes(content * 2)
    result = FormResult(name=name, label=name.upper(), state="kept", guard=VERDICT, speedup=2.5)
    record = FormRecord(name, {"device": "cpu"}, {"a": 1}, {"b": 2}, measured_of(result))
    return BuiltForm(record, directory)


def keep(path: Path, cache: Path, *forms: BuiltForm) -> str:
    """Keep forms that were built from the current archive."""
    return keep_forms(path, digest(path, cache), forms, Settings(cache_dir=cache))


def form_files(path: Path) -> set[str]:
    return {name for name in members(path) if name.startswith("tsx-forms/")}


def files_of(name: str) -> set[str]:
    return {f"tsx-forms/{name}/model.onnx", f"tsx-forms/{name}/more/weights.bin"}


def members(path: Path) -> dict[str, str | None]:
    return {member.name: member.sha256 for member in inspect_archive(path).members}


def digest(path: Path, cache: Path) -> str:
    with open_archive(path, cache=cache) as archive:
        return digest_of(archive)


@pytest.mark.parametrize("form", ["default", "tgz", "no-archive"])
def test_forms_are_added_to_the_archive_and_removed_without_a_trace(
    tmp_path: Path, form: Format
) -> None:
    path = archive_in(tmp_path, form)
    members_before, cache = members(path), tmp_path / "cache"
    forms = [make_form(tmp_path / "built", name) for name in ("openvino-int8", "onnx")]
    assert keep(path, cache, *forms) == f"{path} now runs as openvino-int8, else as onnx"
    assert not [finding for finding in verify_archive(path) if finding.is_fault]
    record = parse_forms(read_member(path, FORMS_FILE, most=1 << 20) or b"")
    assert [form.name for form in record.forms] == ["openvino-int8", "onnx"]
    assert record.forms[0] == forms[0].record
    assert record.forms[0].measured["guard"]["limit"] == "top1>=-0.5%"
    assert record.made_of == {
        name: hashlib.sha256((DIGITS / name).read_bytes()).hexdigest()
        for name in ("digits.pth", "model.py", "handler.py")
    }
    now = members(path)
    assert read_member(path, "tsx-forms/onnx/more/weights.bin", most=100) == b"graphgraph"
    changed = ("model-config.yaml", "MAR-INF/MANIFEST.json")
    assert {name: now[name] for name in members_before if name not in changed} == {
        name: members_before[name] for name in members_before if name not in changed
    }
    assert inspect_archive(path).config.forms == ("openvino-int8", "onnx")
    config = read_member(path, "model-config.yaml", most=4096) or b""
    assert config.startswith(b"# What the server reads about this model")
    assert "no forms any more" in remove_forms(path, Settings(cache_dir=cache))
    assert members(path) == members_before
    assert remove_forms(path, Settings(cache_dir=cache)) == f"{path} has no forms"


def test_links_in_a_forms_directory_are_not_packed(tmp_path: Path) -> None:
    path, cache, secret = archive_in(tmp_path), tmp_path / "cache", tmp_path / "id_rsa"
    secret.write_text("a key")
    form = make_form(tmp_path / "built", "onnx")
    (form.directory / "more" / "link.bin").symlink_to(secret)
    keep(path, cache, form)
    assert form_files(path) == files_of("onnx")


def test_forms_of_an_earlier_run_are_removed(tmp_path: Path) -> None:
    path, cache = archive_in(tmp_path, config_file=None), tmp_path / "cache"
    keep(path, cache, *(make_form(tmp_path / "first", name) for name in ("onnx", "bf16")))
    keep(path, cache, make_form(tmp_path / "second", "bf16", b"better"))
    assert form_files(path) == files_of("bf16")
    assert read_member(path, "tsx-forms/bf16/model.onnx", most=100) == b"better"
    assert inspect_archive(path).config.forms == ("bf16",)
    remove_forms(path, Settings(cache_dir=cache))
    with open_archive(path, cache=cache) as archive:
        assert archive.config.forms is None
        assert archive.problems == []


def test_a_directory_with_changed_weights_is_refused(tmp_path: Path) -> None:
    path, cache = archive_in(tmp_path, "no-archive"), tmp_path / "cache"
    form, digest_before = make_form(tmp_path / "built", "onnx"), digest(path, cache)
    (path / "digits.pth").write_bytes(b"trained again")
    with pytest.raises(CliError, match="it has changed since"):
        keep_forms(path, digest_before, [form], Settings(cache_dir=cache))


def test_the_record_of_forms_covers_all_code_and_weights(tmp_path: Path) -> None:
    more = tmp_path / "blocks.py", tmp_path / "adapter.safetensors", tmp_path / "labels.txt"
    for file in more:
        file.write_bytes(b"x = 1")
    path, cache = archive_in(tmp_path, extra_files=[str(file) for file in more]), tmp_path / "cache"
    with open_archive(path, cache=cache) as archive:
        assert sorted(source_digests(archive)) == [
            "adapter.safetensors",
            "blocks.py",
            "digits.pth",
            "handler.py",
            "model.py",
        ]


def test_a_changed_archive_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    path, form = archive_in(tmp_path), make_form(tmp_path / "built", "onnx")
    original, settings = path.read_bytes(), Settings(cache_dir=tmp_path / "cache")
    with pytest.raises(CliError, match="it has changed since"):
        keep_forms(path, "0" * 64, [form], settings)
    assert path.read_bytes() == original


def test_a_read_only_archive_is_refused_before_building() -> None:
    with pytest.raises(CliError, match="--keep: /proc/version cannot be written"):
        check_writable(Path("/proc/version"), "--keep", "give --keep none")
