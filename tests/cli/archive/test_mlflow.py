"""`tsx archive` of MLflow models, without MLflow installed."""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Run
from tsx_cli.archive.mlflow import default_name

SIGNATURE = '[{"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": [-1, 3]}}]'
INDEX, PINNED = (
    "--extra-index-url https://example.org",
    "scikit_learn[x]==1.5 ; python_version > '3'",
)
MLMODEL = f"""
flavors:
  python_function: {{loader_module: mlflow.pytorch}}
  pytorch: {{model_data: data, code: null}}
mlflow_version: 3.17.2
run_id: abc
signature: {{inputs: '{SIGNATURE}'}}
"""
REQUIREMENTS = (
    f"# pinned\n{INDEX}\n-c constraints.txt\nmlflow==3.17.2\ntorch==2.10\nNumPy>=1\n{PINNED}\n"
)
COLUMNS = (
    'flavors: {python_function: {}}\nsignature: {inputs: \'[{"type": "double", "name": "a"}]\'}\n'
)


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    """Write a model's directory as MLflow does."""
    (tmp_path / "net" / "data").mkdir(parents=True)
    torch.save(torch.nn.Linear(3, 2), tmp_path / "net" / "data" / "model.pth")
    (tmp_path / "net" / "MLmodel").write_text(MLMODEL)
    (tmp_path / "net" / "requirements.txt").write_text(REQUIREMENTS)
    (tmp_path / "net" / "serving_input_example.json").write_text('{"inputs": [[1, 2, 3]]}')
    return tmp_path / "net"


@pytest.mark.usefixtures("processes")
def test_a_directory_becomes_an_archive_that_passes_its_check(
    run: Run, model_directory: Path, tmp_path: Path
) -> None:
    result = run("archive net --version 7 --check")
    assert result.code == 0, result.err
    assert (
        "net: MLflow model, flavour pytorch\nname net, version 7\nhandler mlflow_pytorch\n"
        in result.out
    )
    assert "data/model.pth is a pickle" in result.out
    assert f"requirements: {PINNED}; a server" in result.out
    assert "1 sample got the same answers" in result.out
    with zipfile.ZipFile(tmp_path / "net.mar") as archive:
        manifest = json.loads(archive.read("MAR-INF/MANIFEST.json"))
        assert archive.read("requirements.txt").decode().splitlines() == [INDEX, PINNED]
        files = [
            path.relative_to(model_directory).as_posix()
            for path in model_directory.rglob("*")
            if path.is_file()
        ]
        members = [name for name in archive.namelist() if name.startswith("mlflow_model/")]
        assert {f"mlflow_model/{name}" for name in files} == set(members)
    inspection = run("archive inspect net.mar").out
    assert re.search(r"kind +MLflow model\n", inspection)
    assert re.search(r"mlflow +.*'run_id': 'abc'", inspection)
    assert manifest["mlflow"] == {
        "name": "net",
        "source": "net",
        "flavor": "pytorch",
        "run_id": "abc",
        "mlflow_version": "3.17.2",
    }


def test_options_override_the_files_of_the_model(run: Run, model_directory: Path) -> None:
    Path("own.txt").write_text("einops\n")
    Path("extra.txt").write_text("x")
    Path("row.json").write_text('{"inputs": [[0, 0, 0]]}')
    files = "-r own.txt --extra-files extra.txt --sample row.json"
    result = run(f"archive net --name other --handler mlflow_pyfunc {files}")
    assert result.code == 0, result.err
    with zipfile.ZipFile("other.mar") as archive:
        manifest = json.loads(archive.read("MAR-INF/MANIFEST.json"))
        members = set(archive.namelist())
    assert manifest["model"]["handler"] == "mlflow_pyfunc"
    assert {"own.txt", "extra.txt", "samples/row.json"} < members
    assert not {"requirements.txt", "samples/serving_input_example.json"} & members


def test_a_model_without_an_example_gets_one_from_its_signature(run: Run) -> None:
    Path("table").mkdir()
    Path("table/MLmodel").write_text(COLUMNS)
    assert run("archive table").code == 0
    with zipfile.ZipFile("table.mar") as archive:
        example = json.loads(archive.read("samples/example.json"))
    assert example == {"dataframe_split": {"columns": ["a"], "data": [[0.0]]}}


def test_a_model_of_an_unknown_flavor_is_refused_before_writing(
    run: Run, model_directory: Path, tmp_path: Path
) -> None:
    (model_directory / "MLmodel").write_text("flavors: {spacy: {}}")
    result = run("archive net")
    assert (result.code, (tmp_path / "net.mar").exists()) == (1, False)
    assert "flavours spacy, without python_function" in result.err


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("models:/iris/3", "iris"),
        ("models:/iris@champion", "iris"),
        ("models:/main.flowers.iris/1", "main.flowers.iris"),
        ("models:/two words/1", "two_words"),
        ("models:/m-123", "m-123"),
        ("runs:/abc/nets/iris", "iris"),
        ("dir/iris", "iris"),
    ],
)
def test_an_archive_is_named_after_the_model(source: str, name: str) -> None:
    assert default_name(Path(source)) == name


def test_two_models_with_one_name_are_not_packed_together(run: Run) -> None:
    result = run("archive models:/iris/1 models:/iris/2")
    assert result.code == 2
    assert "would both be named iris" in result.err


def test_the_error_without_mlflow_names_the_extra(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow.artifacts", None)
    result = run("archive models:/iris/1")
    assert (result.code, "pip install 'tsx-serve[mlflow]'" in result.err) == (2, True)


@pytest.mark.slow
def test_an_unreadable_artifact_store_is_reported_with_a_remedy(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_client(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'boto3'")

    monkeypatch.setattr("mlflow.artifacts.download_artifacts", without_client)
    result = run("archive runs:/abc/net --tracking-uri http://127.0.0.1:1")
    assert (result.code, "No module named 'boto3'" in result.err) == (1, True)
    # tsx serve has no option for the server.
    assert "MLFLOW_TRACKING_URI" in result.err


def test_a_local_directory_needs_no_tracking_server(run: Run, model_directory: Path) -> None:
    result = run("archive net --tracking-uri http://127.0.0.1:1")
    assert (result.code, "remove it for a file or a directory" in result.err) == (2, True)
