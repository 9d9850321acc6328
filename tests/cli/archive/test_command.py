"""`tsx archive` with the example's files: defaults, options, reports and refusals."""

from __future__ import annotations

import json
import re
import shutil
import socket
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import DIGITS, Run
from tests.support.servers import screen
from tsx_archiver import BUILTIN_HANDLERS, ArchiveSpec, write_archive
from tsx_archiver.errors import ArchiveTooLarge
from tsx_cli.archive import importing
from tsx_cli.archive.model_file import UNSUPPORTED_HANDLERS
from tsx_cli.bench.report.archive_record import read_record
from tsx_cli.check.container import unpack_model
from tsx_cli.deploy.engine.facts import read_archive
from tsx_runtime.worker.handler_api.loader import REPLACEMENT_ADVICE, builtin_handlers

CODE_OPTIONS = ("--model-file", DIGITS / "model.py", "--handler", DIGITS / "handler.py")
ARCHIVE = f"archive {DIGITS}/digits.pt"
NO_IMPORT = f"{ARCHIVE} --no-import"


def manifest(path: str) -> dict[str, str]:
    """Return the model section of an archive's manifest."""
    with zipfile.ZipFile(path) as archive:
        model: dict[str, str] = json.loads(archive.read("MAR-INF/MANIFEST.json"))["model"]
        return model


def members(path: str) -> set[str]:
    return set(zipfile.ZipFile(path).namelist())


def test_a_model_with_its_network_needs_no_options(run: Run) -> None:
    result = run(NO_IMPORT)
    assert result.code == 0, result.err
    assert (
        "digits.pt: TorchScript, 73.6 kB\nname digits, version 1.0\nhandler base_handler: tensors in, tensors out"
        in result.out
    )
    assert f"{DIGITS}/index_to_name.json: found beside the model file and added" in result.out
    assert "wrote digits.mar (" in result.out
    assert manifest("digits.mar") == {
        "modelName": "digits",
        "serializedFile": "digits.pt",
        "handler": "base_handler",
        "modelVersion": "1.0",
    }


def test_weights_need_the_network_code(run: Run, tmp_path: Path) -> None:
    result = run("archive", DIGITS / "digits.pth")
    assert result.code == 2
    assert "weights without the model's class; add --model-file FILE.py" in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
def test_every_option_of_torch_model_archiver_has_an_effect(run: Run) -> None:
    for name in ("requirements.txt", "a.txt", "b.txt"):
        Path(name).touch()
    arguments = (
        "archive --name seven --version 2.1 -r requirements.txt -o out --extra-files a.txt,b.txt"
    )
    config = ("-c", DIGITS / "model-config.yaml")
    extra = ("--extra-files", DIGITS / "index_to_name.json")
    result = run(arguments, DIGITS / "digits.pth", *CODE_OPTIONS, *config, *extra)
    assert result.code == 0, result.err
    assert manifest("out/seven.mar") == {
        "modelName": "seven",
        "serializedFile": "digits.pth",
        "handler": "handler.py",
        "modelFile": "model.py",
        "modelVersion": "2.1",
        "requirementsFile": "requirements.txt",
        "configFile": "model-config.yaml",
    }
    assert {"a.txt", "b.txt", "index_to_name.json"} < members("out/seven.mar")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "path"),
    [("zip-store", "digits.mar"), ("tgz", "digits.tar.gz"), ("no-archive", "digits")],
)
def test_every_format_is_written(run: Run, form: str, path: str) -> None:
    assert run("archive --no-import", DIGITS / "digits.pt2", "--format", form).code == 0
    assert Path(path).exists()
    assert run("archive verify", path).code == 0


def test_an_existing_archive_is_overwritten_only_by_force(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(NO_IMPORT).code == 0
    result = run(NO_IMPORT)
    assert result.code == 1
    assert "already exists" in result.err
    assert "--force" in result.err
    with monkeypatch.context() as patch:
        # None as the check proves that the model is not imported.
        patch.setattr("tsx_cli.archive.packing.check_code", None)
        with_version = run(f"{ARCHIVE} --version 2")
    assert (with_version.code, "-o digits-2.mar" in with_version.err) == (1, True)
    assert run(f"{NO_IMPORT} --force").code == 0


def test_the_class_names_can_be_omitted(run: Run) -> None:
    assert run(f"{NO_IMPORT} --no-index-to-name").code == 0
    assert "index_to_name.json" not in members("digits.mar")


def test_samples_are_packed_into_the_archive(run: Run) -> None:
    samples = f"--sample {DIGITS}/images --sample {DIGITS}/README.md"
    assert run(f"{NO_IMPORT} {samples}").code == 0
    assert {"samples/0.png", "samples/README.md"} < members("digits.mar")


@pytest.mark.usefixtures("processes")
def test_a_terminal_shows_the_progress_of_packing(tmp_path: Path) -> None:
    output, code = screen(["archive", "--no-import", DIGITS / "digits.pt"], tmp_path, {})
    assert code == 0, output
    assert "wrote digits.mar" in output
    assert re.search(r"━ [\d.]+/73\.8 kB", output), output


@pytest.mark.slow
def test_several_files_become_several_archives(run: Run) -> None:
    shutil.copy(DIGITS / "digits.pt", "one.pt")
    shutil.copy(DIGITS / "digits.pt2", "two.pt2")
    arguments = "archive --no-import one.pt two.pt2"
    inspection = json.loads(run(f"{arguments} --json").out)
    assert [(archive["archive"], archive["name"]) for archive in inspection] == [
        ("one.mar", "one"),
        ("two.mar", "two"),
    ]
    assert "2 models are given" in run(f"{arguments} --name x").err
    assert "would both be named digits" in run(NO_IMPORT, DIGITS / "digits.pt2").err


@pytest.mark.usefixtures("processes")
def test_an_archive_without_weights_needs_a_name_and_a_handler(run: Run) -> None:
    Path("echo.py").write_text("def handle(data, context):\n    return data\n")
    result = run("archive --handler echo.py")
    assert result.code == 2
    assert "give --name and your own --handler" in result.err
    assert run("archive --name echo --handler echo.py:handle").code == 0
    assert manifest("echo.mar")["handler"] == "echo.py:handle"
    # The class may load its weights itself.
    assert run("archive --name own --model-file", DIGITS / "model.py").code == 0
    assert manifest("own.mar")["modelFile"] == "model.py"


ENTRY = "def handle(data, context):\n    return data\n"
CLASS = (
    "import torch\nclass Net(torch.nn.Module):\n    def __init__(self, width): super().__init__()\n"
)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("code", "error"),
    [
        (f"import near\n{ENTRY}", ""),
        (
            "from ts.torch_handler.base_handler import BaseHandler\nclass Own(BaseHandler): pass",
            "",
        ),
        ("def handle(data:\n", "h.py is not valid Python, line 1: "),
        (f"import not_there\n{ENTRY}", "'not_there'. Install that module where tsx runs"),
        (f"raise RuntimeError('no GPU')\n{ENTRY}", "RuntimeError: no GPU. --no-import"),
        (f"open('vocab.txt')\n{ENTRY}", "'vocab.txt': add it with --extra-files"),
        ("x = 1\n", "function handle(data, context) nor a class"),
        ("import os\nos.kill(os.getpid(), 9)\n", "ended its process by SIGKILL"),
    ],
)
def test_a_handler_is_compiled_and_imported_before_packing(run: Run, code: str, error: str) -> None:
    Path("near.py").write_text("print('imported')\n")
    Path("h.py").write_text(code)
    arguments = "archive --name own --handler h.py --extra-files near.py --no-check"
    result = run(arguments)
    assert result.code == bool(error), result
    assert Path("own.mar").exists() is not bool(error)
    assert error in result.err
    # The output of the handler comes on stderr.
    assert ("imported h.py\n" in result.out) is (not error)
    assert run(f"{arguments} --no-import --force").code == ("valid Python" in error)


@pytest.mark.usefixtures("processes")
def test_a_module_that_requirements_may_install_gets_only_a_note(run: Run) -> None:
    Path("h.py").write_text(f"import not_there\n{ENTRY}")
    Path("r.txt").write_text("not-there\n")
    result = run("archive --name own --handler h.py -r r.txt")
    assert result.code == 0
    assert "No module named 'not_there'" in result.out
    assert "--set install_py_dep_per_model=true" in result.out


@pytest.mark.usefixtures("processes")
def test_a_hanging_import_is_stopped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "TIMEOUT_S", 0.2)
    Path("h.py").write_text("import threading\nthreading.Event().wait()\n")
    result = run("archive --name own --handler h.py")
    assert (result.code, "has not ended after 0.2 s" in result.out) == (0, True)


@pytest.mark.usefixtures("processes")
def test_a_model_class_is_constructed_with_its_arguments(run: Run) -> None:
    Path("net.py").write_text(CLASS)
    Path("config.yaml").write_text("init_args: {width: 3}\n")
    arguments = "archive --name net --model-file net.py"
    assert "'width'. Set `init_args: {width: ...}`" in run(arguments).err
    assert run(f"{arguments} -c config.yaml").code == 0
    Path("h.py").write_text(ENTRY)
    # The model's own handler may construct the class in another way.
    assert run(f"{arguments} --handler h.py --force").code == 0


@pytest.mark.usefixtures("processes")
def test_the_model_class_is_chosen_by_weights_or_by_name(run: Run) -> None:
    torch.save(torch.nn.Linear(2, 1).state_dict(), "net.pth")
    block = "from torch import nn\nclass Block(nn.Module):\n    def __init__(self, size): super().__init__()\n"
    net = "class {}(nn.Linear):\n    def __init__(self): super().__init__(2, 1)\n"
    arguments = "archive net.pth --force --model-file notebook.py"
    Path("notebook.py").write_text(block + net.format("Net"))
    assert run(arguments).code == 0
    assert "modelClass" not in manifest("net.mar")
    Path("notebook.py").write_text(block + net.format("Net") + net.format("Twin"))
    result = run(arguments)
    assert (result.code, "(Net, Twin). Name one" in result.err) == (1, True)
    assert run(f"{arguments}:Net").code == 0
    assert manifest("net.mar")["modelFile"] == "notebook.py"
    assert manifest("net.mar")["modelClass"] == "Net"
    result = run(f"{arguments}:Gone")
    assert result.code == 1
    assert "no class Gone; its classes: Block, Net, Twin" in result.err


@pytest.mark.usefixtures("processes")
def test_a_model_file_with_the_name_of_a_command_is_written_with_a_dot(run: Run) -> None:
    shutil.copy(DIGITS / "digits.pt", "inspect")
    assert run("archive ./inspect").code == 0
    assert Path("inspect.mar").exists()


@pytest.mark.parametrize("options", ["", "--model-file net.py", "--handler base_handler"])
def test_only_code_is_refused_with_the_options_that_take_code(run: Run, options: str) -> None:
    Path("net.py").write_text("import torch\n")
    result = run(f"archive net.py {options}")
    assert result.code == 2
    assert "Python code, not a trained model" in result.err
    assert "tsx archive WEIGHTS --model-file net.py" in result.err
    assert "tsx archive --name net --handler net.py" in result.err


def save_model(path: str) -> None:
    """Save a whole pickled model."""
    torch.save(torch.nn.Linear(1, 1), path)


BAD_FILES = {
    "missing.pt": (None, "missing.pt cannot be read (No such file or directory)"),
    "empty.pt": (b"", "empty.pt is empty"),
    "foreign.pt": (b"GIF89a" + bytes(64), "foreign.pt is not a model file"),
    "page.pt": (b"<!DOCTYPE html><p>404</p>", "page.pt is a web page"),
    "cut.pt": (
        (DIGITS / "digits.pt").read_bytes()[:20_000],
        "cut.pt begins as a zip file, as torch writes them, but is truncated",
    ),
}


def write_bad_file(name: str) -> str:
    """Write one of the bad files, and return the reason of its refusal."""
    content, reason = BAD_FILES[name]
    if content is not None:
        Path(name).write_bytes(content)
    return reason


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_not_a_model_is_refused_with_the_reason(run: Run, name: str) -> None:
    reason = write_bad_file(name)
    for command in ("archive", "serve"):
        result = run(command, name)
        assert result.code == 1
        assert reason in result.err or f"there is no file '{name}'" in result.err
        assert "Traceback" not in result.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "is_part"),
    [
        ("model.safetensors.index.json", True),
        ("model-00001-of-00002.safetensors", True),
        ("pytorch_model-00002-of-00002.bin", True),
        ("pytorch_model.bin.index.json", True),
        ("model-00001-of-00001.safetensors", False),
    ],
)
def test_one_shard_of_the_weights_is_not_packed(run: Run, name: str, is_part: bool) -> None:
    if name.endswith("json"):
        Path(name).write_text('{"weight_map": {}}')
    else:
        save_file({"w": torch.ones(2)}, name)
    result = run("archive --no-import", name, "--model-file", DIGITS / "model.py")
    assert result.code == (2 if is_part else 0)
    assert ("name the directory" in result.err) == is_part


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "options"),
    [("bench", ""), ("optimize", ""), ("batch", "in.jsonl -o out.jsonl")],
)
def test_commands_that_take_archives_explain_how_to_pack_a_model_file(
    run: Run, command: str, options: str
) -> None:
    Path("in.jsonl").write_text("[1]\n")
    result = run(f"{command} {DIGITS}/digits.pt {options}")
    assert result.code != 0
    assert "Pack it with 'tsx archive digits.pt'" in result.err


def test_a_pickled_model_is_refused_with_the_call_that_saves_weights(run: Run) -> None:
    save_model("whole.pt")
    result = run("archive whole.pt")
    assert result.code == 2
    assert "pickled torch.nn.modules.linear.Linear" in result.err
    assert "torch.save(model.state_dict(), FILE)" in result.err
    assert "set `weightsOnly: false`" in result.err


@pytest.mark.usefixtures("processes")
def test_a_pickled_model_is_packed_if_it_is_trusted(run: Run) -> None:
    save_model("whole.pt")
    Path("config.yaml").write_text("weightsOnly: false")
    result = run("archive whole.pt -c config.yaml")
    assert result.code == 0, result
    assert Path("whole.mar").is_file()
    assert "does not load" not in result.out


@pytest.mark.usefixtures("processes")
def test_a_custom_handler_may_load_any_file(run: Run) -> None:
    save_model("whole.pt")
    torch.save(torch.nn.Linear(1, 1).state_dict(), "weights.pt")
    for name in ("other.bin", "other.own"):
        Path(name).write_bytes(b"own format")
    for name in ("whole.pt", "weights.pt", "other.bin", "other.own"):
        result = run(f"archive {name} --handler {DIGITS}/handler.py --force --no-check")
        assert result.code == 0, result.err
        assert ("note: other.bin is not a model file" in result.out) is (name == "other.bin")
        assert result.out.count("note: ") == (name == "other.bin")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BAD_FILES if name != "foreign.pt"])
def test_an_empty_or_truncated_file_is_refused_for_any_handler(
    run: Run, tmp_path: Path, name: str
) -> None:
    reason = write_bad_file(name)
    files_before = list(tmp_path.iterdir())
    result = run("archive", name, *CODE_OPTIONS)
    assert result.code == 1
    assert reason in result.err
    assert list(tmp_path.iterdir()) == files_before


def test_the_error_of_a_full_disk_names_the_given_directory(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(NO_IMPORT)
    (tmp_path / "disk").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=7))
        result = run("archive unpack digits.mar -o disk/new")
    assert result.code == 1
    assert f"cannot be unpacked into '{tmp_path}/disk': there is 7 bytes free" in result.err
    assert "free some disk space there" in result.err
    assert list((tmp_path / "disk").iterdir()) == []
    result = run("archive unpack digits.mar -o digits.mar/new")
    assert f"cannot be unpacked into '{tmp_path}/digits.mar': Not a directory" in result.err


def test_an_archive_is_written_only_into_a_directory(run: Run) -> None:
    Path("file").touch()
    for path in ("/dev/full", "file", "file/deeper"):
        result = run(f"{NO_IMPORT} -o {path}")
        assert result.code == 1
        assert f"{path}/digits.mar cannot be written" in result.err
        assert "is no directory" in result.err
    result = run(NO_IMPORT, "--name", "x" * 300)
    assert "cannot be written: File name too long" in result.err


def test_usage_errors_name_the_command(run: Run) -> None:
    for arguments in ("--bogus", "x.pt --format rar", "pack --bogus"):
        result = run(f"archive {arguments}")
        assert result.code == 2
        assert result.err.startswith("Usage: tsx archive [OPTIONS]")
        assert "Try 'tsx archive -h' for help" in result.err
    assert "Invalid value for '--format': 'rar'" in run("archive x.pt --format rar").err
    assert "Usage: tsx archive inspect" in run("archive inspect --bogus").err


def test_help_does_not_split_sentences(run: Run) -> None:
    assert "Exit code 3: it loaded" in run("archive --help").out


def test_a_misspelled_handler_is_reported_with_the_nearest_one(run: Run) -> None:
    result = run(f"{ARCHIVE} --handler image_classifer")
    assert result.code == 1
    assert result.err.endswith("Did you mean image_classifier?\n")
    assert run(f"{ARCHIVE} --handler nothing_near.py").err.endswith("Check it.\n")


def test_a_handler_of_torchserve_that_tsx_lacks_is_packed_with_a_note(run: Run) -> None:
    result = run(f"{ARCHIVE} --handler vllm_handler --no-check")
    assert result.code == 0, result.err
    assert "TorchServe has vllm_handler" in result.out
    result = run(f"{ARCHIVE} --handler image_classifier --force --no-check")
    assert "note: " not in result.out
    assert set(BUILTIN_HANDLERS) <= {*builtin_handlers(), *UNSUPPORTED_HANDLERS}
    assert tuple(REPLACEMENT_ADVICE) == UNSUPPORTED_HANDLERS


def test_network_code_for_a_model_that_has_its_own_is_refused(run: Run) -> None:
    result = run(NO_IMPORT, "--model-file", DIGITS / "model.py")
    assert result.code == 2
    assert "remove --model-file" in result.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "error"),
    [
        ("batchsize: 4", "did you mean batchSize?"),
        ("batch_size: 4", "did you mean batchSize?"),
        ("batchSize: many", "batchSize: 'many' is invalid: "),
        ("minWorkers: -1", "minWorkers: -1 is invalid: "),
        ("warmup: [{fil: a.png}]", "did you mean warmup[1].file?"),
        ("colour: red\nbatchSize: 4", ""),
    ],
)
def test_an_ineffective_configuration_is_refused_during_packing(
    run: Run, config: str, error: str
) -> None:
    Path("model-config.yaml").write_text(config)
    result = run(f"{NO_IMPORT} -c model-config.yaml")
    assert result.code == bool(error), result
    assert Path("digits.mar").exists() is not bool(error)
    assert error in result.err
    assert "?." not in result.err


def test_an_ineffective_configuration_in_a_foreign_archive_gets_only_a_note(run: Run) -> None:
    Path("model-config.yaml").write_text("batchsize: 4\n")
    warnings: list[str] = []
    handler = str(DIGITS / "handler.py")
    spec = ArchiveSpec("foreign", handler, config_file="model-config.yaml")
    # torch-model-archiver would also pack this file.
    write_archive(spec, Path(), warn=warnings.append)
    assert warnings == ["model-config.yaml: batchsize is not a known key; did you mean batchSize?"]
    result = run("archive inspect foreign.mar")
    assert (result.code, "batchsize is not a known key" in result.out) == (0, True)


@pytest.mark.usefixtures("processes")
def test_inspect_shows_the_content_of_an_archive(run: Run) -> None:
    run("archive", DIGITS / "digits.pth", *CODE_OPTIONS, "-c", DIGITS / "model-config.yaml")
    output = " ".join(run("archive inspect digits.mar").out.split())
    for part in (
        "name digits",
        "kind weights",
        "handler handler.py",
        "batchSize 16",
        f"model.py {(DIGITS / 'model.py').stat().st_size} bytes",
    ):
        assert part in output
    inspection = json.loads(run("archive inspect digits.mar --json").out)
    assert (inspection["kind"], inspection["name"]) == ("eager", "digits")
    assert inspection["config"]["batchSize"] == 16
    assert {"name", "size", "packed", "sha256"} == set(inspection["members"][0])


@pytest.mark.usefixtures("processes")
def test_a_variable_that_is_not_a_setting_is_reported_once(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSX_MAX_ARCHIVE_FILS", "7")
    # Packing reads no settings, so only the second command reports the variable.
    assert run(ARCHIVE).err.count("TSX_MAX_ARCHIVE_FILS") == 0
    assert run("archive inspect digits.mar").err.count("TSX_MAX_ARCHIVE_FILS") == 1


def test_verify_names_the_damaged_member(run: Run) -> None:
    run(f"{NO_IMPORT} --format zip-store")
    assert run("archive verify digits.mar").out == "digits.mar is intact\n"
    content = bytearray(Path("digits.mar").read_bytes())
    content[content.index(b"digits.pt") + 40_000] ^= 1
    Path("digits.mar").write_bytes(content)
    result = run("archive verify digits.mar")
    assert result.code == 1
    assert "FAULT: " in result.out
    assert "digits.pt" in result.out
    assert "digits.mar is damaged" in result.err
    assert json.loads(run("archive verify digits.mar --json").out)["intact"] is False


def test_verify_names_all_damaged_archives(run: Run) -> None:
    run(NO_IMPORT)
    for name in ("first.mar", "second.mar"):
        Path(name).write_text("garbage")
    result = run("archive verify first.mar digits.mar second.mar")
    assert (result.code, result.out) == (1, "digits.mar is intact\n")
    first, second = result.err.splitlines()
    assert first.startswith("Error: first.mar is not a model archive")
    assert second.startswith("second.mar is not a model archive")


def test_unpack_writes_a_valid_model_directory(run: Run, tmp_path: Path) -> None:
    run(f"{NO_IMPORT} --name seven")
    assert run("archive unpack seven.mar").out == "unpacked seven.mar into seven\n"
    assert Path("seven/digits.pt").read_bytes() == (DIGITS / "digits.pt").read_bytes()
    assert run("archive verify seven").code == 0
    assert run("archive unpack seven.mar -o deep/er").code == 0
    second_result = run("archive unpack seven.mar")
    assert second_result.code == 1
    assert "'seven' already exists" in second_result.err
    assert "is already unpacked" in run("archive unpack seven").err
    assert not list(tmp_path.glob(".*"))


INVALID_ARCHIVES = {
    "missing.mar": None,
    "empty.mar": b"",
    "foreign.mar": b"GIF89a",
    "cut.mar": b"PK\x03\x04" + bytes(100),
}


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("archive inspect", name) for name in INVALID_ARCHIVES),
        ("archive verify", "cut.mar"),
        ("archive unpack", "empty.mar"),
        ("archive --check", "foreign.mar"),
        *(("serve", name) for name in INVALID_ARCHIVES),
    ],
)
def test_an_invalid_archive_is_refused(run: Run, command: str, name: str) -> None:
    content = INVALID_ARCHIVES[name]
    if content is not None:
        Path(name).write_bytes(content)
    # The server refuses the file before it binds the port.
    with socket.create_server(("127.0.0.1", 0)) as port_socket:
        port = ("--port", port_socket.getsockname()[1]) if command == "serve" else ()
        result = run(f"{command} {name}", *port)
    assert result.code == 1
    assert name.removesuffix(".mar") in result.err
    assert "Traceback" not in result.err


def test_an_archive_is_not_packed_again(run: Run) -> None:
    run(NO_IMPORT)
    result = run("archive digits.mar")
    assert result.code == 2
    assert "'digits.mar' is already an archive" in result.err
    assert "remove --name" in run("archive digits.mar --check --name x").err


def test_a_directory_that_is_not_a_model_is_refused_with_its_missing_files(run: Run) -> None:
    Path("weights").mkdir()
    Path("weights/model.safetensors").touch()
    result = run("archive weights")
    assert result.code == 2
    assert "nor the MLmodel of MLflow" in result.err


@pytest.mark.slow
def test_commands_enforce_the_archive_limits_of_the_settings(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "constant.mar"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("handler.py", ENTRY)
        archive.writestr("weights.pt", bytes(70 << 20))
    readers = [read_archive, read_record, lambda path: unpack_model(path, tmp_path)]
    for read in readers:
        read(path)
    assert run("archive verify", path).code == 0
    monkeypatch.setenv("TSX_MAX_DENSE_ARCHIVE_SIZE", "1000")
    for read in readers:
        with pytest.raises(ArchiveTooLarge, match="max_dense_archive_size"):
            read(path)
    assert run("archive verify", path).code == 1
