"""The command and the import shim, compared with TorchServe's own where it is installed."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

import model_archiver
from model_archiver import ModelArchiver, ModelArchiverConfig
from model_archiver.arg_parser import ArgParser
from model_archiver.manifest_components.manifest import Manifest, RuntimeType
from model_archiver.manifest_components.model import Model
from model_archiver.model_archiver_error import ModelArchiverError
from model_archiver.model_packaging import generate_model_archive, package_model
from model_archiver.model_packaging_utils import (
    MANIFEST_FILE_NAME,
    MAR_INF,
    ModelExportUtils,
    archiving_options,
    model_handlers,
)
from tests.support.torchserve_names import installed_names, names
from tsx_archiver import ArchiveSpec, open_archive, write_archive
from tsx_archiver.progress import progress_bar
from tsx_archiver.torch_model_archiver import main

REQUIRED = ["--model-name", "tiny", "--version", "1.0", "--handler", "handler.py"]


def manifest_of(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        return dict(json.loads(archive.read("MAR-INF/MANIFEST.json")))


def test_the_defaults_write_into_the_current_directory(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(REQUIRED) == 0
    manifest = manifest_of(inputs / "tiny.mar")
    assert manifest["runtime"] == "python"
    assert manifest["model"] == {
        "modelName": "tiny",
        "handler": "handler.py",
        "modelVersion": "1.0",
    }
    assert capsys.readouterr() == ("", "")


def test_every_flag_is_accepted(inputs: Path, cache: Path) -> None:
    flags = "--serialized-file weights.bin --model-file model.py --extra-files extra,config.yaml --runtime python3 --export-path new/out"
    flags += " --archive-format tgz -f -r requirements.txt -c config.yaml"
    assert main([*REQUIRED, *flags.split()]) == 0
    with open_archive(inputs / "new" / "out" / "tiny.tar.gz", cache=cache) as opened:
        assert opened.manifest.data["model"] == {
            "modelName": "tiny",
            "serializedFile": "weights.bin",
            "handler": "handler.py",
            "modelFile": "model.py",
            "modelVersion": "1.0",
            "requirementsFile": "requirements.txt",
            "configFile": "config.yaml",
        }
        assert opened.manifest.runtime == "python3"
        assert (opened.directory / "sub" / "deep.txt").exists()


def test_an_existing_archive_is_replaced_only_with_force(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(REQUIRED) == 0
    assert main(REQUIRED) == 1
    assert capsys.readouterr().err == (
        "ERROR - tiny.mar already exists.\nPlease specify --force/-f option to overwrite the model archive output file.\n"
    )
    assert main([*REQUIRED, "--force"]) == 0
    assert capsys.readouterr().err == "WARNING - Overwriting tiny.mar ...\n"


def test_an_error_is_one_line_and_no_traceback(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*REQUIRED, "--serialized-file", "gone.pt"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ERROR - The serialized file gone.pt")


def test_a_questionable_configuration_is_packed_with_a_warning(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (inputs / "config.yaml").write_text("batchsize: 3\n")
    assert main([*REQUIRED, "-c", "config.yaml"]) == 0
    assert capsys.readouterr().err.startswith("WARNING - config.yaml: batchsize ")


@pytest.mark.parametrize("missing", ["--model-name", "--version", "--handler"])
def test_required_flags_are_required(
    inputs: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    position = REQUIRED.index(missing)
    with pytest.raises(SystemExit) as exit_info:
        main(REQUIRED[:position] + REQUIRED[position + 2 :])
    assert exit_info.value.code == 2
    assert missing in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "value"), [("--runtime", "ruby"), ("--archive-format", "rar")])
def test_choices_are_checked(
    inputs: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    with pytest.raises(SystemExit):
        main([*REQUIRED, flag, value])
    assert f"invalid choice: '{value}'" in capsys.readouterr().err


def test_a_progress_bar_is_written_to_stderr_of_a_terminal(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar("Packing", shown=True) as progress:
        write_archive(
            ArchiveSpec("tiny", "handler.py", serialized_file="weights.bin"),
            inputs,
            progress=progress,
        )
    output = capsys.readouterr()
    assert output.out == ""
    with progress_bar("Packing", shown=False) as progress:
        assert progress is None


class TestShim:
    def test_scripts_pack_with_a_config(self, inputs: Path) -> None:
        config = ModelArchiverConfig(
            model_name="tiny",
            handler="handler.py",
            version="1.0",
            export_path=str(inputs),
            extra_files="extra",
        )
        ModelArchiver.generate_model_archive(config)
        assert "labels.json" in zipfile.ZipFile("tiny.mar").namelist()
        with pytest.raises(ModelArchiverError, match="already exists"):
            ModelArchiver.generate_model_archive(config)

    def test_a_missing_file_raises_the_same_error_as_the_original(self, inputs: Path) -> None:
        with pytest.raises(FileNotFoundError):
            ModelArchiver.generate_model_archive(ModelArchiverConfig("tiny", "nosuch", "1.0"))

    def test_older_scripts_pack_with_parsed_arguments_and_a_manifest(self, inputs: Path) -> None:
        arguments = Namespace(
            model_name="tiny",
            handler="handler.py",
            version="1.0",
            serialized_file="weights.bin",
            export_path=".",
            force=False,
        )
        manifest = ModelExportUtils.generate_manifest_json(arguments)
        assert json.loads(manifest)["model"]["serializedFile"] == "weights.bin"
        package_model(arguments, manifest=json.dumps({**json.loads(manifest), "license": "MIT"}))
        assert manifest_of(Path("tiny.mar"))["license"] == "MIT"

    def test_the_entry_point_exits_with_the_commands_code(
        self, inputs: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.argv", ["torch-model-archiver", *REQUIRED])
        with pytest.raises(SystemExit) as exit_info:
            generate_model_archive()
        assert exit_info.value.code == 0
        generate_model_archive(ModelArchiverConfig("other", "handler.py", "1.0"))
        assert Path("other.mar").exists()

    def test_scripts_parse_their_own_flags_and_write_a_manifest(self, inputs: Path) -> None:
        flags = ArgParser.export_model_args_parser().parse_args(
            [*REQUIRED, "--serialized-file", "new/weights.bin"]
        )
        model = Model(
            flags.model_name,
            flags.serialized_file,
            flags.handler,
            model_version=flags.version,
            config_file="a/config.yaml",
        )
        manifest = Manifest(RuntimeType.PYTHON.value, model)
        written_manifest = json.loads(str(manifest))
        assert written_manifest == manifest.manifest_dict
        assert (written_manifest["runtime"], set(written_manifest)) == (
            "python",
            {"createdOn", "runtime", "model", "archiverVersion"},
        )
        assert (
            written_manifest["model"]
            == model.model_dict
            == json.loads(str(model))
            == {
                "modelName": "tiny",
                "serializedFile": "weights.bin",
                "handler": "handler.py",
                "modelVersion": "1.0",
                "configFile": "config.yaml",
            }
        )
        with pytest.raises(ValueError, match="rust"):
            Manifest("rust", model)

    def test_constants_match_the_format(self, inputs: Path) -> None:
        assert main(REQUIRED) == 0
        assert (
            f"{MAR_INF}/{MANIFEST_FILE_NAME}"
            in zipfile.ZipFile(f"tiny{archiving_options['default']}").namelist()
        )
        assert (model_handlers["image_classifier"], model_archiver.__version__) == (
            "vision",
            "0.12.0",
        )


def test_the_list_of_names_matches_torchserves(peer_bin: Path) -> None:
    installed = installed_names(next(peer_bin.parent.glob("lib/python*/site-packages")))
    packages = {module.partition(".")[0] for module in installed}
    assert installed == {
        module: expected_names
        for module, expected_names in names().items()
        if module.partition(".")[0] in packages
    }


FILES = ["--serialized-file", "weights.bin", "--model-file", "model.py"]
CASES = {
    "handler only": [],
    "all files": [*FILES, "--extra-files", "extra", "-r", "requirements.txt", "-c", "config.yaml"],
    "patterns": ["--extra-files", "extra/*,*.txt"],
    "directory and file": ["--extra-files", "extra/,model.py,./handler.py"],
    "builtin": ["--handler", "image_classifier"],
    "no suffix, with function": ["--handler", "handler:handle"],
    "stored": ["--archive-format", "zip-store"],
    "tgz": ["--archive-format", "tgz", "--extra-files", "extra"],
    "python3": ["--runtime", "python3"],
}


def contents(path: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the members by name, and the manifest without dates, versions and checksums."""
    files = {}
    if path.name.endswith(".mar"):
        with zipfile.ZipFile(path) as archive:
            files = {
                name: archive.read(name) for name in archive.namelist() if not name.endswith("/")
            }
    else:
        with tarfile.open(fileobj=io.BytesIO(path.read_bytes())) as archive:
            for info in archive:
                stream = archive.extractfile(info)
                if stream is not None:
                    files[info.name.partition("/")[2]] = stream.read()
    manifest = json.loads(files.pop("MAR-INF/MANIFEST.json"))
    for key in ("createdOn", "archiverVersion", "sha256"):
        manifest.pop(key, None)
    return files, manifest


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES)
def test_the_archives_match_torchserves_archiver(
    inputs: Path, tmp_path: Path, cache: Path, peer_bin: Path, flags: list[str]
) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    assert main([*REQUIRED, *flags, "--export-path", str(tmp_path / "ours")]) == 0
    command = [
        peer_bin / "torch-model-archiver",
        *REQUIRED,
        *flags,
        "--export-path",
        tmp_path / "theirs",
    ]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    (own_archive,), (torchserve_archive,) = (
        (tmp_path / "ours").iterdir(),
        (tmp_path / "theirs").iterdir(),
    )
    assert own_archive.name == torchserve_archive.name
    assert contents(own_archive) == contents(torchserve_archive)
    with open_archive(torchserve_archive, cache=cache) as opened:
        assert opened.problems == []
        assert opened.manifest.data["archiverVersion"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--serialized-file", "gone"],
        ["--handler", "nosuch"],
        ["--extra-files", "gone"],
        ["--model-name", "../x"],
        ["--runtime", "ruby"],
        ["--archive-format", "rar"],
    ],
)
def test_both_refuse_with_the_same_exit_code(
    inputs: Path, peer_bin: Path, flags: list[str]
) -> None:
    torchserve_result = subprocess.run(
        [peer_bin / "torch-model-archiver", *REQUIRED, *flags],
        timeout=60,
        capture_output=True,
        check=False,
    )
    try:
        own_code = main([*REQUIRED, *flags])
    except SystemExit as exit_info:
        own_code = int(str(exit_info.code))
    assert own_code == torchserve_result.returncode != 0


def test_a_class_of_the_model_file_is_named_like_a_function_of_the_handler(inputs: Path) -> None:
    assert main([*REQUIRED, "--model-file", "./model.py:Tiny"]) == 0
    model = manifest_of(inputs / "tiny.mar")["model"]
    assert (model["modelFile"], model["modelClass"]) == ("model.py", "Tiny")
