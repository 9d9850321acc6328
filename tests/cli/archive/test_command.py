"""`tsx archive` with the example's files: what it works out, what it says, and what it refuses."""

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
from tsx_cli.archive.model_file import NOT_SERVED
from tsx_cli.bench.report.archive_record import read_record
from tsx_cli.check.container import unpack_model
from tsx_cli.deploy.engine.facts import look_at
from tsx_runtime.worker.handler_api.loader import BUILTIN, ELSEWHERE

WHOLE = ("--model-file", DIGITS / "model.py", "--handler", DIGITS / "handler.py")


def manifest(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        model: dict[str, str] = json.loads(archive.read("MAR-INF/MANIFEST.json"))["model"]
        return model


def test_a_model_that_brings_its_network_needs_nothing_else(run: Run, tmp_path: Path) -> None:
    ended = run("archive", "--no-import", DIGITS / "digits.pt")
    assert ended.code == 0, ended.err
    assert (
        "digits.pt: TorchScript, 73.6 kB\nname digits, version 1.0\nhandler base_handler: tensors in, tensors out"
        in ended.out
    )
    assert f"{DIGITS}/index_to_name.json: found beside the model file and added" in ended.out
    assert "wrote digits.mar (" in ended.out
    assert manifest(tmp_path / "digits.mar") == {
        "modelName": "digits",
        "serializedFile": "digits.pt",
        "handler": "base_handler",
        "modelVersion": "1.0",
    }


def test_weights_need_the_network_and_say_so(run: Run, tmp_path: Path) -> None:
    ended = run("archive", DIGITS / "digits.pth")
    assert ended.code == 2
    assert (
        ended.err
        == f"Error: {DIGITS}/digits.pth contains weights without the model's class; add --model-file FILE.py, the file with "
        "the model's class\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("processes")
def test_every_option_of_torch_model_archiver_has_its_place(run: Run, tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("")
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    ended = run(
        *(
            "archive",
            DIGITS / "digits.pth",
            *WHOLE,
            "--name",
            "seven",
            "--version",
            "2.1",
            "--extra-files",
            "a.txt,b.txt",
        ),
        *(
            "--extra-files",
            DIGITS / "index_to_name.json",
            "-r",
            "requirements.txt",
            "-c",
            DIGITS / "model-config.yaml",
            "-o",
            "out",
        ),
    )
    assert ended.code == 0, ended.err
    assert manifest(tmp_path / "out" / "seven.mar") == {
        "modelName": "seven",
        "serializedFile": "digits.pth",
        "handler": "handler.py",
        "modelFile": "model.py",
        "modelVersion": "2.1",
        "requirementsFile": "requirements.txt",
        "configFile": "model-config.yaml",
    }
    members = zipfile.ZipFile(tmp_path / "out" / "seven.mar").namelist()
    assert {"a.txt", "b.txt", "index_to_name.json"} < set(members)


@pytest.mark.parametrize(
    ("form", "made"),
    [("zip-store", "digits.mar"), ("tgz", "digits.tar.gz"), ("no-archive", "digits")],
)
def test_every_form_is_written(run: Run, tmp_path: Path, form: str, made: str) -> None:
    assert run("archive", "--no-import", DIGITS / "digits.pt2", "--format", form).code == 0
    assert (tmp_path / made).exists()
    assert run("archive", "verify", made).code == 0


def test_an_archive_that_is_there_is_overwritten_only_by_force(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("archive", "--no-import", DIGITS / "digits.pt").code == 0
    ended = run("archive", "--no-import", DIGITS / "digits.pt")
    assert ended.code == 1
    assert "already exists" in ended.err
    assert "--force" in ended.err
    with monkeypatch.context() as patch:
        patch.setattr("tsx_cli.archive.packing.check_code", None)  # the model is not even imported
        named = run("archive", DIGITS / "digits.pt", "--version", "2")
    assert (named.code, "-o digits-2.mar" in named.err) == (1, True)
    assert run("archive", "--no-import", DIGITS / "digits.pt", "--force").code == 0


def test_the_names_of_the_classes_can_be_left_out(run: Run, tmp_path: Path) -> None:
    assert run("archive", "--no-import", DIGITS / "digits.pt", "--no-index-to-name").code == 0
    assert "index_to_name.json" not in zipfile.ZipFile(tmp_path / "digits.mar").namelist()


def test_samples_travel_in_the_archive(run: Run, tmp_path: Path) -> None:
    assert (
        run(
            "archive",
            "--no-import",
            DIGITS / "digits.pt",
            "--sample",
            DIGITS / "images",
            "--sample",
            DIGITS / "README.md",
        ).code
        == 0
    )
    members = zipfile.ZipFile(tmp_path / "digits.mar").namelist()
    assert {"samples/0.png", "samples/README.md"} < set(members)


@pytest.mark.usefixtures("processes")
def test_a_terminal_shows_how_far_the_packing_is(tmp_path: Path) -> None:
    seen, code = screen(["archive", "--no-import", DIGITS / "digits.pt"], tmp_path, {})
    assert code == 0, seen
    assert "wrote digits.mar" in seen
    assert re.search(r"━ [\d.]+/73\.8 kB", seen), seen


def test_several_files_become_several_archives(run: Run, tmp_path: Path) -> None:
    shutil.copy(DIGITS / "digits.pt", tmp_path / "one.pt")
    shutil.copy(DIGITS / "digits.pt2", tmp_path / "two.pt2")
    ended = run("archive", "--no-import", "one.pt", "two.pt2", "--json")
    assert [(each["archive"], each["name"]) for each in json.loads(ended.out)] == [
        ("one.mar", "one"),
        ("two.mar", "two"),
    ]
    assert (
        "2 files are given"
        in run("archive", "--no-import", "one.pt", "two.pt2", "--name", "x").err
    )
    assert (
        "would both be named digits"
        in run("archive", "--no-import", DIGITS / "digits.pt", DIGITS / "digits.pt2").err
    )


@pytest.mark.usefixtures("processes")
def test_a_model_without_a_file_needs_a_name_and_a_handler(run: Run, tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text("def handle(data, context):\n    return data\n")
    ended = run("archive", "--handler", "echo.py")
    assert ended.code == 2
    assert (
        "give --name and your own --handler"
        in ended.err
    )
    assert run("archive", "--name", "echo", "--handler", "echo.py:handle").code == 0
    assert manifest(tmp_path / "echo.mar")["handler"] == "echo.py:handle"
    assert (
        run("archive", "--name", "own", "--model-file", DIGITS / "model.py").code == 0
    )  # the class may load its weights itself
    assert manifest(tmp_path / "own.mar")["modelFile"] == "model.py"


ENTRY = "def handle(data, context):\n    return data\n"
CLASS = (
    "import torch\nclass Net(torch.nn.Module):\n    def __init__(self, width): super().__init__()\n"
)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("code", "said"),
    [
        (f"import near\n{ENTRY}", None),
        (
            "from ts.torch_handler.base_handler import BaseHandler\nclass Own(BaseHandler): pass",
            None,
        ),
        ("def handle(data:\n", "h.py is not valid Python, line 1: "),
        (
            f"import not_there\n{ENTRY}",
            "'not_there'. Install that module where tsx runs",
        ),
        (
            f"raise RuntimeError('no GPU')\n{ENTRY}",
            "RuntimeError: no GPU. --no-import",
        ),
        (
            f"open('vocab.txt')\n{ENTRY}",
            "'vocab.txt': add it with --extra-files",
        ),
        ("x = 1\n", "function handle(data, context) nor a class"),
        ("import os\nos.kill(os.getpid(), 9)\n", "ended its process by SIGKILL"),
    ],
)
def test_a_handler_is_compiled_and_imported_before_it_is_packed(
    run: Run, tmp_path: Path, code: str, said: str | None
) -> None:
    (tmp_path / "near.py").write_text("print('imported')\n")
    (tmp_path / "h.py").write_text(code)
    words = (
        "archive",
        "--name",
        "own",
        "--handler",
        "h.py",
        "--extra-files",
        "near.py",
        "--no-check",
    )
    ended = run(*words)
    assert (ended.code, (tmp_path / "own.mar").exists()) == (
        (0, True) if said is None else (1, False)
    ), ended
    assert (said or "") in ended.err
    assert ("imported h.py\n" in ended.out) is (said is None), (
        "what the handler prints comes on stderr"
    )
    assert run(*words, "--no-import", "--force").code == (
        1 if said and "valid Python" in said else 0
    )


@pytest.mark.usefixtures("processes")
def test_a_module_that_the_requirements_may_bring_is_only_noted(run: Run, tmp_path: Path) -> None:
    (tmp_path / "h.py").write_text(f"import not_there\n{ENTRY}")
    (tmp_path / "r.txt").write_text("not-there\n")
    ended = run("archive", "--name", "own", "--handler", "h.py", "-r", "r.txt")
    assert ended.code == 0
    assert "No module named 'not_there'" in ended.out
    assert "--set install_py_dep_per_model=true" in ended.out


@pytest.mark.usefixtures("processes")
def test_an_import_that_does_not_end_is_stopped(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "TIMEOUT", 0.2)
    (tmp_path / "h.py").write_text("import threading\nthreading.Event().wait()\n")
    ended = run("archive", "--name", "own", "--handler", "h.py")
    assert (ended.code, "has not ended after 0.2 s" in ended.out) == (
        0,
        True,
    )


@pytest.mark.usefixtures("processes")
def test_a_model_class_and_its_arguments_are_tried_as_well(run: Run, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(CLASS)
    (tmp_path / "config.yaml").write_text("init_args: {width: 3}\n")
    words = ("archive", "--name", "net", "--model-file", "net.py")
    assert "'width'. Set `init_args: {width: ...}`" in run(*words).err
    assert run(*words, "-c", "config.yaml").code == 0
    (tmp_path / "h.py").write_text(ENTRY)
    assert run(*words, "--handler", "h.py", "--force").code == 0, (
        "its own handler may make the class in a way of its own"
    )


@pytest.mark.usefixtures("processes")
def test_of_several_model_classes_one_is_chosen_by_the_weights_or_by_name(
    run: Run, tmp_path: Path
) -> None:
    torch.save(torch.nn.Linear(2, 1).state_dict(), tmp_path / "net.pth")
    block = "from torch import nn\nclass Block(nn.Module):\n    def __init__(self, size): super().__init__()\n"
    net = "class {}(nn.Linear):\n    def __init__(self): super().__init__(2, 1)\n"
    (tmp_path / "notebook.py").write_text(block + net.format("Net"))
    assert run("archive", "net.pth", "--model-file", "notebook.py").code == 0
    assert "modelClass" not in manifest(tmp_path / "net.mar")
    (tmp_path / "notebook.py").write_text(block + net.format("Net") + net.format("Twin"))
    ended = run("archive", "net.pth", "--model-file", "notebook.py", "--force")
    assert ended.code == 1
    assert (
        "(Net, Twin). Name one"
        in ended.err
    )
    assert run("archive", "net.pth", "--model-file", "notebook.py:Net", "--force").code == 0
    assert (
        manifest(tmp_path / "net.mar")["modelFile"],
        manifest(tmp_path / "net.mar")["modelClass"],
    ) == ("notebook.py", "Net")
    ended = run("archive", "net.pth", "--model-file", "notebook.py:Gone", "--force")
    assert (ended.code, "no class Gone; its classes: Block, Net, Twin" in ended.err) == (
        1,
        True,
    )


@pytest.mark.usefixtures("processes")
def test_a_model_file_called_as_a_command_is_written_with_a_dot(run: Run, tmp_path: Path) -> None:
    shutil.copy(DIGITS / "digits.pt", tmp_path / "inspect")
    assert run("archive", "./inspect").code == 0
    assert (tmp_path / "inspect.mar").exists()


@pytest.mark.parametrize("options", [(), ("--model-file", "net.py"), ("--handler", "base_handler")])
def test_code_alone_is_refused_with_the_options_that_take_code(
    run: Run, tmp_path: Path, options: tuple[str, ...]
) -> None:
    (tmp_path / "net.py").write_text("import torch\n")
    ended = run("archive", "net.py", *options)
    assert ended.code == 2
    assert "Python code, not a trained model" in ended.err
    assert "tsx archive WEIGHTS --model-file net.py" in ended.err
    assert "tsx archive --name net --handler net.py" in ended.err


def whole_model(path: Path) -> None:
    torch.save(torch.nn.Linear(1, 1), path)


def state_dict(path: Path) -> None:
    torch.save(torch.nn.Linear(1, 1).state_dict(), path)


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


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_model_is_refused_with_the_reason(
    run: Run, tmp_path: Path, name: str
) -> None:
    content, reason = BAD_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    for command in (["archive", name], ["serve", name]):
        ended = run(*command)
        assert ended.code == 1
        assert reason in ended.err or f"there is no file '{name}'" in ended.err
        assert "Traceback" not in ended.err


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
def test_one_of_several_files_of_weights_is_not_packed_alone(
    run: Run, tmp_path: Path, name: str, is_part: bool
) -> None:
    (tmp_path / name).write_text('{"weight_map": {}}') if name.endswith("json") else save_file(
        {"w": torch.ones(2)}, tmp_path / name
    )
    ended = run("archive", "--no-import", tmp_path / name, "--model-file", DIGITS / "model.py")
    assert ended.code == (2 if is_part else 0)
    assert (
        "name the directory" in ended.err
    ) == is_part


@pytest.mark.parametrize(
    "command", [("bench",), ("optimize",), ("batch", "in.jsonl", "-o", "out.jsonl")]
)
def test_commands_that_take_archives_say_how_to_pack_a_bare_model(
    run: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "in.jsonl").write_text("[1]\n")
    ended = run(command[0], DIGITS / "digits.pt", *command[1:])
    assert ended.code != 0
    assert (
        "Pack it with 'tsx archive digits.pt'"
        in ended.err
    )


def test_a_whole_pickled_model_is_refused_with_what_to_save_instead(
    run: Run, tmp_path: Path
) -> None:
    whole_model(tmp_path / "whole.pt")
    ended = run("archive", "whole.pt")
    assert ended.code == 2
    assert "pickled torch.nn.modules.linear.Linear" in ended.err
    assert "torch.save(model.state_dict(), FILE)" in ended.err
    assert "set `weightsOnly: false`" in ended.err


@pytest.mark.usefixtures("processes")
def test_a_whole_pickled_model_is_packed_where_its_file_is_trusted(
    run: Run, tmp_path: Path
) -> None:
    whole_model(tmp_path / "whole.pt")
    (tmp_path / "config.yaml").write_text("weightsOnly: false")
    ended = run("archive", "whole.pt", "-c", "config.yaml")
    assert (ended.code, (tmp_path / "whole.mar").is_file(), "does not load" in ended.out) == (
        0,
        True,
        False,
    ), ended


@pytest.mark.usefixtures("processes")
def test_a_handler_of_ones_own_may_load_anything(run: Run, tmp_path: Path) -> None:
    whole_model(tmp_path / "whole.pt")
    state_dict(tmp_path / "weights.pt")
    (tmp_path / "other.bin").write_bytes(b"own format")
    (tmp_path / "other.own").write_bytes(b"own format")
    for name in ("whole.pt", "weights.pt", "other.bin", "other.own"):
        ended = run("archive", name, "--handler", DIGITS / "handler.py", "--force", "--no-check")
        assert ended.code == 0, ended.err
        assert ("note: other.bin is not a model file" in ended.out) is (name == "other.bin")
        assert ended.out.count("note: ") == (name == "other.bin")


@pytest.mark.parametrize("name", [name for name in BAD_FILES if name != "foreign.pt"])
def test_no_handler_can_load_a_file_that_is_empty_or_cut_short(
    run: Run, tmp_path: Path, name: str
) -> None:
    content, reason = BAD_FILES[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    ended = run("archive", name, *WHOLE)
    assert ended.code == 1
    assert reason in ended.err
    assert sorted(path.name for path in tmp_path.iterdir()) == [name] * (content is not None)


def test_a_disk_that_is_full_is_reported_with_the_place_that_was_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("archive", "--no-import", DIGITS / "digits.pt")
    (tmp_path / "disk").mkdir()
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=7))
        ended = run("archive", "unpack", "digits.mar", "-o", "disk/new")
    reason = re.escape(f"Error: digits.mar cannot be unpacked into '{tmp_path}/disk': ")
    remedy = "; free some disk space there, or name another directory\n"
    assert ended.code == 1
    assert re.fullmatch(
        rf"{reason}there is 7 bytes free, and the archive needs [\d.]+ kB{remedy}", ended.err
    )
    assert list((tmp_path / "disk").iterdir()) == []
    ended = run("archive", "unpack", "digits.mar", "-o", "digits.mar/new")
    assert (
        ended.err
        == f"Error: digits.mar cannot be unpacked into '{tmp_path}/digits.mar': Not a directory{remedy}"
    )


def test_an_archive_cannot_lie_in_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, wrong in (("/dev/full", "/dev/full"), ("file", "file"), ("file/deeper", "file")):
        ended = run("archive", "--no-import", DIGITS / "digits.pt", "-o", place)
        assert ended.code == 1
        assert f"{place}/digits.mar cannot be written" in ended.err
        assert "is no directory" in ended.err
    assert (
        "cannot be written: File name too long"
        in run("archive", "--no-import", DIGITS / "digits.pt", "--name", "x" * 300).err
    )


def test_wrong_usage_is_reported_by_the_name_that_the_command_goes_by(run: Run) -> None:
    for words in (["--bogus"], ["x.pt", "--format", "rar"], ["pack", "--bogus"]):
        ended = run("archive", *words)
        assert ended.code == 2
        assert ended.err.startswith("Usage: tsx archive [OPTIONS]")
        assert "Try 'tsx archive -h' for help" in ended.err
    assert (
        "Invalid value for '--format': 'rar' is not one of"
        in run("archive", "x.pt", "--format", "rar").err
    )
    assert "Usage: tsx archive inspect" in run("archive", "inspect", "--bogus").err


def test_help_keeps_its_sentences_together(run: Run) -> None:
    assert (
        "Exit code 3: it loaded" in run("archive", "--help").out
    )


def test_a_handler_that_is_misspelt_names_the_nearest_one(run: Run) -> None:
    ended = run("archive", DIGITS / "digits.pt", "--handler", "image_classifer")
    assert ended.code == 1
    assert ended.err.endswith("Did you mean image_classifier?\n")
    assert run("archive", DIGITS / "digits.pt", "--handler", "nothing_near.py").err.endswith(
        "Check it.\n"
    )


def test_a_handler_of_torchserve_that_is_not_carried_is_packed_with_a_note(run: Run) -> None:
    ended = run("archive", DIGITS / "digits.pt", "--handler", "vllm_handler", "--no-check")
    assert ended.code == 0, ended.err
    assert (
        "TorchServe has vllm_handler"
        in ended.out
    )
    assert (
        "note: "
        not in run(
            "archive",
            DIGITS / "digits.pt",
            "--handler",
            "image_classifier",
            "--force",
            "--no-check",
        ).out
    )
    assert set(BUILTIN_HANDLERS) <= {*BUILTIN, *NOT_SERVED}
    assert tuple(ELSEWHERE) == NOT_SERVED


def test_a_network_beside_a_model_that_brings_its_own_is_refused(run: Run) -> None:
    ended = run("archive", "--no-import", DIGITS / "digits.pt", "--model-file", DIGITS / "model.py")
    assert ended.code == 2
    assert "remove --model-file" in ended.err


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("batchsize: 4", "did you mean batchSize?"),
        ("batch_size: 4", "did you mean batchSize?"),
        ("batchSize: many", "batchSize: 'many' is invalid: "),
        ("minWorkers: -1", "minWorkers: -1 is invalid: "),
        (
            "warmup: [{fil: a.png}]",
            "did you mean warmup[1].file?",
        ),
        ("colour: red\nbatchSize: 4", None),
    ],
)
def test_a_configuration_that_would_not_be_used_is_refused_to_its_author(
    run: Run, tmp_path: Path, config: str, said: str | None
) -> None:
    (tmp_path / "model-config.yaml").write_text(config)
    ended = run("archive", "--no-import", DIGITS / "digits.pt", "-c", "model-config.yaml")
    assert (ended.code, (tmp_path / "digits.mar").exists()) == (
        (0, True) if said is None else (1, False)
    ), ended
    assert (said or "") in ended.err
    assert "?." not in ended.err


def test_a_foreign_archive_with_such_a_configuration_is_only_noted(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "model-config.yaml").write_text("batchsize: 4\n")
    warnings: list[str] = []
    write_archive(
        ArchiveSpec("foreign", str(DIGITS / "handler.py"), config_file="model-config.yaml"),
        tmp_path,
        warn=warnings.append,
    )
    assert warnings == [
        "model-config.yaml: batchsize is not a known key; did you mean batchSize?"
    ], "torch-model-archiver's way"
    ended = run("archive", "inspect", "foreign.mar")
    assert (ended.code, "batchsize is not a known key" in ended.out) == (
        0,
        True,
    )


@pytest.mark.usefixtures("processes")
def test_inspect_shows_what_is_inside(run: Run) -> None:
    run("archive", DIGITS / "digits.pth", *WHOLE, "-c", DIGITS / "model-config.yaml")
    shown = run("archive", "inspect", "digits.mar").out
    for part in (
        "name digits",
        "kind weights",
        "handler handler.py",
        "batchSize 16",
        f"model.py {(DIGITS / 'model.py').stat().st_size} bytes",
    ):
        assert part in " ".join(shown.split())
    reported = json.loads(run("archive", "inspect", "digits.mar", "--json").out)
    assert (reported["kind"], reported["name"], reported["config"]["batchSize"]) == (
        "eager",
        "digits",
        16,
    )
    assert {"name", "size", "packed", "sha256"} == set(reported["members"][0])


@pytest.mark.usefixtures("processes")
def test_a_variable_that_is_no_setting_is_named_once(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TSX_MAX_ARCHIVE_FILS", "7")
    assert (
        run("archive", DIGITS / "digits.pt").err.count("TSX_MAX_ARCHIVE_FILS") == 0
    )  # packing has no use for it
    assert run("archive", "inspect", "digits.mar").err.count("TSX_MAX_ARCHIVE_FILS") == 1


def test_verify_says_which_member_is_damaged(run: Run, tmp_path: Path) -> None:
    run("archive", "--no-import", DIGITS / "digits.pt", "--format", "zip-store")
    assert run("archive", "verify", "digits.mar").out == "digits.mar is intact\n"
    content = bytearray((tmp_path / "digits.mar").read_bytes())
    content[content.index(b"digits.pt") + 40_000] ^= 1
    (tmp_path / "digits.mar").write_bytes(content)
    ended = run("archive", "verify", "digits.mar")
    assert ended.code == 1
    assert "FAULT: " in ended.out
    assert "digits.pt" in ended.out
    assert "digits.mar is damaged" in ended.err
    reported = json.loads(run("archive", "verify", "digits.mar", "--json").out)
    assert reported["intact"] is False


def test_verify_names_all_archives_that_are_not_intact(run: Run, tmp_path: Path) -> None:
    run("archive", "--no-import", DIGITS / "digits.pt")
    for name in ("first.mar", "second.mar"):
        (tmp_path / name).write_text("garbage")
    ended = run("archive", "verify", "first.mar", "digits.mar", "second.mar")
    assert (ended.code, ended.out) == (1, "digits.mar is intact\n")
    first, second = ended.err.splitlines()
    assert first.startswith("Error: first.mar is not a model archive")
    assert second.startswith("second.mar is not a model archive")


def test_unpack_makes_a_directory_that_is_a_model(run: Run, tmp_path: Path) -> None:
    run("archive", "--no-import", DIGITS / "digits.pt", "--name", "seven")
    assert run("archive", "unpack", "seven.mar").out == "unpacked seven.mar into seven\n"
    assert (tmp_path / "seven" / "digits.pt").read_bytes() == (DIGITS / "digits.pt").read_bytes()
    assert run("archive", "verify", "seven").code == 0
    assert run("archive", "unpack", "seven.mar", "-o", "deep/er").code == 0
    again = run("archive", "unpack", "seven.mar")
    assert again.code == 1
    assert (
        "'seven' already exists"
        in again.err
    )
    assert "is already unpacked" in run("archive", "unpack", "seven").err
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "command",
    [
        ["archive", "inspect"],
        ["archive", "verify"],
        ["archive", "unpack"],
        ["archive", "--check"],
        ["serve"],
    ],
)
@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("missing.mar", None, "missing.mar"),
        ("empty.mar", b"", "empty"),
        ("foreign.mar", b"GIF89a", "foreign.mar"),
        ("cut.mar", b"PK\x03\x04" + bytes(100), "cut"),
    ],
)
def test_a_file_that_is_no_archive_is_refused(
    run: Run, tmp_path: Path, command: list[str], name: str, content: bytes | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with socket.create_server(("127.0.0.1", 0)) as in_use:  # it is refused before a port is taken
        port = ["--port", in_use.getsockname()[1]] if command == ["serve"] else []
        ended = run(*command, name, *port)
    assert ended.code == 1
    assert reason in ended.err
    assert "Traceback" not in ended.err


def test_an_archive_is_not_packed_again(run: Run) -> None:
    run("archive", "--no-import", DIGITS / "digits.pt")
    ended = run("archive", "digits.mar")
    assert ended.code == 2
    assert (
        "'digits.mar' is already an archive"
        in ended.err
    )
    assert "remove --name" in run("archive", "digits.mar", "--check", "--name", "x").err


def test_a_directory_that_nothing_is_packed_of_says_what_is_missing(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").write_bytes(b"")
    ended = run("archive", tmp_path / "weights")
    assert ended.code == 2
    assert (
        "nor the MLmodel of MLflow"
        in ended.err
    )


def test_commands_read_archives_within_the_bounds_of_the_settings(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "constant.mar"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("handler.py", ENTRY)
        archive.writestr("weights.pt", bytes(70 << 20))
    readers = [look_at, read_record, lambda path: unpack_model(path, tmp_path)]
    for read in readers:
        read(path)
    assert run("archive", "verify", path).code == 0
    monkeypatch.setenv("TSX_MAX_DENSE_ARCHIVE_SIZE", "1000")
    for read in readers:
        with pytest.raises(
            ArchiveTooLarge, match="max_dense_archive_size"
        ):
            read(path)
    assert run("archive", "verify", path).code == 1
