"""The kind of model at a path, which one function decides for all commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tsx_cli.archive.source import SourceKind, classify


@pytest.fixture
def directories(tmp_path: Path) -> Path:
    """Write a directory of each kind, in the working directory."""
    for name, file, text in (
        ("films", "config.json", '{"architectures": ["BertModel"], "model_type": "bert"}'),
        ("style", "adapter_config.json", "{}"),
        ("iris", "MLmodel", "flavors: {pytorch: {}}"),
        ("code", "handler.py", ""),
        ("unpacked/inner/MAR-INF", "MANIFEST.json", "{}"),
        ("flow/WAR-INF", "MANIFEST.json", "{}"),
    ):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / file).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("films", "Hugging Face"),
        ("style", "Hugging Face"),
        ("hf:org/name@main", "Hugging Face"),
        ("iris", "MLflow"),
        ("models:/iris@champion", "MLflow"),
        ("runs:/1/model", "MLflow"),
        ("code", "directory"),
        ("unpacked", "archive"),
        ("flow", "workflow"),
        ("f.war", "workflow"),
        ("m.mar", "archive"),
        ("m.tar.gz", "archive"),
        ("m.onnx", "file"),
    ],
)
def test_each_kind_is_recognized_by_content_or_name(
    directories: Path, monkeypatch: pytest.MonkeyPatch, path: str, kind: SourceKind
) -> None:
    monkeypatch.chdir(directories)
    assert classify(Path(path)) == kind


@pytest.mark.slow
@pytest.mark.parametrize("command", ["bench {}", "optimize {}", "batch {} in.jsonl -o out.jsonl"])
@pytest.mark.parametrize(
    ("path", "kind"), [("films", "Hugging Face"), ("iris", "MLflow"), ("models:/iris/1", "MLflow")]
)
def test_commands_that_take_archives_explain_how_to_pack_a_model(
    run: Run, directories: Path, command: str, path: str, kind: str
) -> None:
    (directories / "in.jsonl").write_text("[1]\n")
    result = run(command.format(path))
    assert result.code == 2
    assert f"'{path}' is a model of {kind}, and an archive is needed here" in result.err
    assert f"tsx archive {path}" in result.err
