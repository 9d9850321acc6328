"""The files of `tsx init`; test_check.py shows that they pass `tsx archive --check`."""

from __future__ import annotations

import ast
import json
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import Run
from tsx_archiver.inspecting import manifest_of, read_member
from tsx_cli.init.command import class_name
from tsx_runtime.worker.exceptions import InvalidInput
from tsx_runtime.worker.handlers import base

FILES = {
    "README.md",
    "handler.py",
    "model-config.yaml",
    "model.py",
    "samples/first.json",
    "samples/second.json",
}


def written_files(directory: Path) -> set[str]:
    return {
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    }


def test_all_files_are_written_and_listed(run: Run, tmp_path: Path) -> None:
    result = run("init my-model.v2 --handler")
    assert result.code == 0, result.err
    assert written_files(tmp_path / "my-model.v2") == FILES
    assert result.out.splitlines()[-1] == "my-model.v2/README.md has the next steps"
    for name in ("model.py", "handler.py"):
        assert "MyModelV2" in ast.dump(ast.parse((tmp_path / "my-model.v2" / name).read_text()))
    config = yaml.safe_load((tmp_path / "my-model.v2" / "model-config.yaml").read_text())
    assert config["batchSize"] == 16
    # With `batchPolicy: wait`, a single request would wait for the whole delay.
    assert "maxBatchDelay" not in config


@pytest.mark.parametrize("name", ["resnet", "my-model.v2", "2d_net"])
def test_the_default_is_one_python_file_that_passes_the_check(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert run("init", name).code == 0
    assert written_files(tmp_path / name) == {"README.md", "app.py"}
    readme = (tmp_path / name / "README.md").read_text()
    lines = [line.partition("#")[0] for line in readme.splitlines() if line.startswith("    ")]
    _, _, predict, archive = map(shlex.split, lines)
    monkeypatch.chdir(tmp_path / name)
    packed = run(*archive[1:])
    assert packed.code == 0, packed.err
    checked = run("archive", f"{predict[2]}.mar", "--check")
    assert checked.code == 0, checked.err
    assert manifest_of(Path(f"{predict[2]}.mar")).handler == "python_file"
    example = read_member(Path(f"{predict[2]}.mar"), "samples/example.json", most=1000)
    assert json.loads(example or b"") == {"row": [5.1, 3.5, 1.4, 0.2]}


@pytest.mark.parametrize(
    "body",
    [None, b"", "hello", b'{"row"', [], {"rows": 1}, {"row": [1, 2]}, {"row": [1, 2, 3, "4"]}],
)
def test_the_handler_refuses_an_invalid_body(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: object
) -> None:
    assert run("init m --handler").code == 0
    # A worker resolves these names in the same way; later tests need the real `ts`.
    for name in ("ts", "ts.torch_handler", "ts.torch_handler.base_handler"):
        monkeypatch.setitem(sys.modules, name, base)
    handler = runpy.run_path(str(tmp_path / "m" / "handler.py"))["MHandler"]()
    with pytest.raises(InvalidInput, match="JSON body"):
        handler.preprocess([{"body": body}])
    handler.device = "cpu"
    row = {"row": [1, 2.5, 3, 4]}
    assert handler.preprocess([{"body": row}, {"data": row}]).tolist() == [row["row"]] * 2


@pytest.mark.parametrize("name", ["resnet", "net-0.5.v2", "2d_net", "x.mar"])
def test_the_commands_in_the_readme_use_the_archive_they_write(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert run("init", name, "--handler").code == 0
    readme = (tmp_path / name / "README.md").read_text()
    lines = [line.partition("#")[0] for line in readme.splitlines() if line.startswith("    ")]
    change, _, archive, serve, predict = map(shlex.split, lines)
    assert change[0] == "cd"
    monkeypatch.chdir(change[1])
    runpy.run_path("model.py", run_name="__main__")
    # The last argument is --check, which is left out here.
    packed = run(*archive[1:-1], "--no-import")
    assert packed.code == 0, packed.err
    assert manifest_of(Path(serve[2])).model_name == predict[2] == name


def test_no_file_is_overwritten_without_force(run: Run, tmp_path: Path) -> None:
    directory = tmp_path / "here"
    directory.mkdir()
    (directory / "handler.py").write_text("mine")
    result = run("init m --handler --output here")
    assert result.code == 1
    assert "here/handler.py would be overwritten" in result.err
    assert written_files(directory) == {"handler.py"}
    (directory / "model.py").symlink_to(tmp_path / "elsewhere")
    assert run("init m --handler --output here --force").code == 0
    assert not (tmp_path / "elsewhere").exists()
    assert written_files(directory) == FILES


@pytest.mark.parametrize("name", ["../x", "_x", "a b", "é", ""])
def test_an_invalid_archive_name_is_refused(run: Run, tmp_path: Path, name: str) -> None:
    assert run("init", name).code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [("resnet", "Resnet"), ("my-model.v2", "MyModelV2"), ("2d_net", "Model2dNet")],
)
def test_a_class_is_named_after_the_model(name: str, expected: str) -> None:
    assert class_name(name) == expected
