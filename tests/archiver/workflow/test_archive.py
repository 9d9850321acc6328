"""Archives of workflows: the command that packs them, safe opening, and TorchServe's tools."""

from __future__ import annotations

import json
import subprocess
import zipfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tsx_archiver.errors import (
    ArchiveError,
    ArchiveTooLarge,
    DuplicateMember,
    EmptyArchive,
    ForeignFile,
    InvalidManifest,
    LinkMember,
    TruncatedArchive,
    UnsafePath,
    WrongChecksum,
)
from tsx_archiver.limits import Limits
from tsx_archiver.workflow import (
    InvalidSpec,
    WorkflowArchiveSpec,
    open_workflow,
    write_workflow_archive,
)
from tsx_archiver.workflow.command import main
from workflow_archiver.arg_parser import ArgParser
from workflow_archiver.workflow_archiver_error import WorkflowArchiverError
from workflow_archiver.workflow_packaging import generate_workflow_archive, package_workflow
from workflow_archiver.workflow_packaging_utils import (
    MANIFEST_FILE_NAME,
    WAR_INF,
    WorkflowExportUtils,
)

SPEC = "models:\n  m1: {url: m1.mar}\ndag:\n  pre: [m1]\n  m1: [post]\n"
HANDLER = "def pre(data, context):\n    return data\n\n\npost = pre\n"
FLAGS = ["--workflow-name", "flow", "--spec-file", "spec.yaml", "--handler", "handler.py"]
MANIFEST = {"workflow": {"workflowName": "flow", "specFile": "spec.yaml", "handler": "handler.py"}}


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "inputs"
    (directory / "extra").mkdir(parents=True)
    (directory / "spec.yaml").write_text(SPEC)
    (directory / "handler.py").write_text(HANDLER)
    (directory / "extra" / "labels.json").write_text("{}")
    monkeypatch.chdir(directory)
    return directory


def write_war(path: Path, **members: str | bytes) -> Path:
    """Write a .war of raw members, as another archiver or an attacker would.

    Empty members are left out.
    """
    manifest = {"WAR-INF/MANIFEST.json": json.dumps(MANIFEST)}
    files = {**manifest, "spec.yaml": SPEC, "handler.py": HANDLER, **members}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            if content:
                archive.writestr(name, content)
    return path


def test_the_command_packs_as_torchserves_does_and_adds_checksums(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*FLAGS, "--extra-files", "extra", "--export-path", "out"]) == 0
    assert capsys.readouterr() == ("", "")
    with zipfile.ZipFile(inputs / "out" / "flow.war") as archive:
        assert sorted(archive.namelist()) == [
            "WAR-INF/MANIFEST.json",
            "handler.py",
            "labels.json",
            "spec.yaml",
        ]
        manifest = json.loads(archive.read("WAR-INF/MANIFEST.json"))
    assert manifest["workflow"] == MANIFEST["workflow"]
    assert sorted(manifest["sha256"]) == ["handler.py", "labels.json", "spec.yaml"]
    assert {"createdOn", "archiverVersion"} <= set(manifest)


def test_an_existing_archive_is_replaced_only_with_force(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(FLAGS) == 0
    assert main(FLAGS) == 1
    output = capsys.readouterr().err
    assert (
        output
        == "ERROR - flow.war already exists.\nPlease specify --force/-f option to overwrite the workflow archive output file.\n"
    )
    assert main([*FLAGS, "-f"]) == 0
    assert capsys.readouterr().err == "WARNING - Overwriting flow.war ...\n"


def test_the_same_inputs_give_the_same_bytes(inputs: Path) -> None:
    assert main([*FLAGS, "--export-path", "a"]) == main([*FLAGS, "--export-path", "b"]) == 0
    assert (inputs / "a" / "flow.war").read_bytes() == (inputs / "b" / "flow.war").read_bytes()


def test_a_function_missing_from_the_handler_gets_a_warning(
    inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (inputs / "handler.py").write_text("def pre(data, context):\n    return data\n")
    assert main(FLAGS) == 0
    assert "the node post of the dag is neither" in capsys.readouterr().err
    (inputs / "handler.py").write_text("from elsewhere import *\n")
    assert main([*FLAGS, "-f"]) == 0
    assert "neither" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"--workflow-name": "a flow"}, "Workflow name contains special characters."),
        ({"--spec-file": "none.yaml"}, "none.yaml does not exist"),
        ({"--handler": "none.py"}, "none.py does not exist"),
        ({"--spec-file": "cycle.yaml"}, "its dag has a cycle:"),
        ({"--handler": "broken.py"}, "broken.py is not valid Python"),
        ({"--extra-files": "nowhere"}, "nowhere does not exist"),
    ],
)
def test_a_workflow_that_the_server_would_refuse_is_not_packed(
    change: dict[str, str], reason: str, inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (inputs / "cycle.yaml").write_text("dag: {pre: [post], post: [pre]}")
    (inputs / "broken.py").write_text("def pre(:\n")
    flags = dict(zip(FLAGS[::2], FLAGS[1::2], strict=True)) | change
    assert main([argument for pair in flags.items() for argument in pair]) == 1
    assert reason in capsys.readouterr().err
    assert not list(inputs.glob("*.war"))


def test_the_import_shim_packs_and_raises_its_own_error(
    inputs: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = Namespace(
        workflow_name="flow",
        spec_file="spec.yaml",
        handler="handler.py",
        export_path="",
        force=False,
        extra_files=None,
    )
    manifest = WorkflowExportUtils.generate_manifest_json(arguments)
    assert json.loads(manifest)["workflow"] == MANIFEST["workflow"]
    package_workflow(arguments, manifest)
    with open_workflow(inputs / "flow.war", cache=cache) as opened:
        assert opened.manifest.workflow_name == "flow"
    with pytest.raises(WorkflowArchiverError):
        package_workflow(arguments, manifest)
    with pytest.raises(SystemExit):
        generate_workflow_archive()
    assert "--workflow-name" in capsys.readouterr().err


def test_scripts_parse_their_own_flags_and_find_the_manifest(inputs: Path) -> None:
    assert ArgParser.workflow_archiver_args_parser().parse_args(FLAGS).workflow_name == "flow"
    assert main(FLAGS) == 0
    assert f"{WAR_INF}/{MANIFEST_FILE_NAME}" in zipfile.ZipFile("flow.war").namelist()


def test_an_unpacked_archive_is_kept_while_it_is_open(inputs: Path, cache: Path) -> None:
    spec = WorkflowArchiveSpec("flow", "spec.yaml", "handler.py", ["extra"])
    path = write_workflow_archive(spec, inputs, warn=pytest.fail)
    with open_workflow(path, cache=cache) as opened:
        assert (opened.manifest.workflow_name, opened.handler, opened.problems) == (
            "flow",
            "handler.py",
            [],
        )
        assert opened.spec.functions == ("pre", "post")
        assert (opened.directory / "labels.json").read_text() == "{}"
        assert opened.directory.is_relative_to(cache)


def test_a_directory_is_used_in_place(tmp_path: Path) -> None:
    with zipfile.ZipFile(write_war(tmp_path / "flow.war")) as archive:
        archive.extractall(tmp_path / "flow")
    with open_workflow(tmp_path / "flow") as opened:
        assert opened.directory == tmp_path / "flow"
        assert opened.handler == "handler.py"


def write_link(path: Path) -> None:
    with zipfile.ZipFile(write_war(path), "a") as archive:
        info = zipfile.ZipInfo("evil")
        info.create_system, info.external_attr = 3, 0o120777 << 16
        archive.writestr(info, "/etc/passwd")


def write_truncated(path: Path) -> None:
    path.write_bytes(write_war(path).read_bytes()[:-30])


def workflow(**fields: object) -> str:
    """Return the manifest with changed fields."""
    return json.dumps({"workflow": MANIFEST["workflow"] | fields})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (write_link, LinkMember),
        (write_truncated, TruncatedArchive),
        (b"junk", ForeignFile),
        (b"", EmptyArchive),
        ({"../evil.py": "x"}, UnsafePath),
        ({"/etc/evil.py": "x"}, UnsafePath),
        ({"SPEC.YAML": "dag: {}"}, DuplicateMember),
        ({"zeros": bytes(2000)}, ArchiveTooLarge),
        ({"spec.yaml": ""}, InvalidManifest),
        ({"handler.py": ""}, InvalidManifest),
        ({"spec.yaml": "dag: []"}, InvalidSpec),
        ("", ForeignFile),
        ("{", InvalidManifest),
        ("[]", InvalidManifest),
        ("{}", InvalidManifest),
        (workflow(workflowName="../x"), InvalidManifest),
        (workflow(workflowName=None), InvalidManifest),
        (workflow(specFile="../../etc/passwd"), InvalidManifest),
        (workflow(specFile=3), InvalidManifest),
        (workflow(specFile=None), InvalidManifest),
        (workflow(handler="/etc/x.py"), InvalidManifest),
        (json.dumps(MANIFEST | {"sha256": 3}), InvalidManifest),
        (json.dumps(MANIFEST | {"sha256": {"spec.yaml": "0"}}), WrongChecksum),
    ],
)
def test_an_unsafe_archive_is_refused_and_leaves_nothing(
    content: Any, kind: type[ArchiveError], tmp_path: Path, cache: Path
) -> None:
    """The content is given as the file, as its manifest or as its members."""
    path = tmp_path / "flow.war"
    if callable(content):
        content(path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        members = {"WAR-INF/MANIFEST.json": content} if isinstance(content, str) else content
        write_war(path, **members)
    with pytest.raises(kind) as caught:
        open_workflow(path, cache=cache, limits=Limits(total=1500))
    assert type(caught.value) is kind
    assert "flow.war" in caught.value.message or "spec.yaml" in caught.value.message
    assert list((cache / "archives" / "partial").iterdir()) == []
    assert not (tmp_path / "evil.py").exists()


def test_archives_of_torchserves_archiver_open(peer_bin: Path, inputs: Path, cache: Path) -> None:
    subprocess.run(
        [peer_bin / "torch-workflow-archiver", *FLAGS, "--extra-files", "extra/labels.json"],
        check=True,
        timeout=60,
    )
    with open_workflow(inputs / "flow.war", cache=cache) as opened:
        assert opened.spec.leaves == ("post",)
        assert (opened.directory / "labels.json").exists()
