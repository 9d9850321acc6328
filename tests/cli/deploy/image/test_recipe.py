"""What an image is made of: its packages, its compiler, its name, and what a reader of the plan is
told.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.deploying import FACTS, HANDLER, LOCAL, a_spec
from tests.support.models import make_model
from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.engine.facts import look_at
from tsx_cli.deploy.image.recipe import Recipe, recipe, unpinned


def test_an_image_of_the_same_things_has_the_same_name() -> None:
    def tag(more: dict[str, Any] | None = None, target: str = "container", **other: Any) -> str:
        return recipe(a_spec(target, **(more or {})), replace(FACTS, **other), LOCAL).tag

    assert tag() == tag({"env": {"A": "b"}}) == tag(target="kubernetes")
    assert (
        len(
            {
                tag(),
                tag(sha256="cd" * 32),
                tag({"container": {"gpus": 1}}),
                tag(requirements="tqdm"),
                tag(target="sagemaker"),
            }
        )
        == 5
    )
    assert tag(target="lambda") != tag(
        {"lambda": {"architecture": "arm64"}}, target="lambda"
    )  # one cannot run where the other is wanted
    here, there = (
        recipe(a_spec("kubernetes"), FACTS, LOCAL._replace(machine=machine)).tag
        for machine in ("linux/amd64", "linux/arm64")
    )
    assert here != there
    assert (
        recipe(
            a_spec("container"), FACTS, LOCAL._replace(base="python:3.12-slim@sha256:" + "0" * 64)
        ).tag
        != tag()
    )
    assert tag(target="sagemaker") == tag(
        target="sagemaker", sha256="cd" * 32
    )  # SageMaker brings the model


def test_nothing_that_is_installed_after_torch_changes_it_and_what_pip_keeps_is_in_no_layer() -> (
    None
):
    local = LOCAL._replace(wheel=Path("tsx_serve-0.2.0-py3-none-any.whl"))
    facts = replace(FACTS, requirements="tqdm\n")
    text = recipe(a_spec("lambda", build={"extras": ["grpc"]}), facts, local).files["Dockerfile"]
    installs = [line for line in text.replace(" \\\n", " ").splitlines() if "pip install" in line]
    assert all(
        line.startswith("RUN --mount=type=cache,target=/root/.cache/pip ")
        and "no-cache" not in line
        for line in installs
    )
    free = [line for line in installs if "--require-hashes" not in line]
    assert 'echo "torch==${TORCH_VERSION}" > /opt/tsx/constraints.txt' in free[0]
    assert all("--constraint /opt/tsx/constraints.txt" in line for line in free[1:])
    assert free[2].endswith('"tsx-serve[grpc]==0.2.0"')  # so that pip keeps to its bounds as well
    stage = text[text.index("FROM runtime AS lambda\n") :]
    assert stage.index("pip install") < stage.index(
        "HOME=/tmp"
    )  # else the cache would be another directory
    hashed = replace(FACTS, requirements="tqdm==4.67.1 --hash=sha256:" + "0" * 64)
    assert (
        '"tsx-serve' not in recipe(a_spec("container"), hashed, local).files["Dockerfile"]
    )  # pip takes no other without a hash then


def test_requirements_that_leave_versions_open_are_named() -> None:
    text = "tqdm\nsix==1.*  # any\nnumpy==2.2.6 ; python_version > '3'\n-r more.txt\ntorchvision>=0.2 \\\n  --hash=sha256:00\na @ https://b/c.whl\n"
    assert unpinned(text) == ["tqdm", "six==1.*", "torchvision>=0.2"]
    notes = recipe(a_spec("container"), replace(FACTS, requirements=text), LOCAL).notes
    assert [note.partition(". ")[0] for note in notes] == [
        "the archive's requirements leave versions open: tqdm, six==1.*, torchvision>=0.2"
    ]


@pytest.mark.parametrize(
    ("config", "handler", "reason"),
    [
        ("pt2: {compile: {enable: true}}\n", HANDLER, "pt2 in model-config.yaml"),
        ("pt2: inductor\n", HANDLER, "pt2 in model-config.yaml"),
        ("pt2: {export: {aot_compile: true}}\n", HANDLER, "pt2 in model-config.yaml"),
        ("pt2: {compile: {enable: true, backend: cudagraphs}}\n", HANDLER, ""),
        ("pt2: {compile: {enable: false}}\n", HANDLER, ""),
        ("", "import torch\n\ndef load(model):\n    return torch.compile(model)\n", "handler.py"),
        ("", "import re\n\nWORD = re.compile('torch.compile')  # torch.compile(model)\n", ""),
        ("", HANDLER, ""),
    ],
)
def test_an_archive_that_compiles_gets_a_compiler_and_no_other(
    tmp_path: Path, config: str, handler: str, reason: str
) -> None:
    _, facts = look_at(make_model(tmp_path / "digits.mar", handler, config=config))
    assert facts.compiles == reason
    made = recipe(a_spec("container"), facts, LOCAL)
    assert ("g++" in made.files["Dockerfile"]) is bool(reason)
    note = f"the image gets g++ if its base has none, because {reason} compiles the model"
    assert list(made.notes) == ([note] if reason else [])
    assert recipe(a_spec("container", build={"packages": ["clang"]}), facts, LOCAL).notes == ()


def test_an_extra_that_has_no_locked_packages_is_refused() -> None:
    with pytest.raises(
        UsageError,
        match=r"'grcp' for images; did you mean 'grpc'\?",
    ):
        recipe(a_spec("container", build={"extras": ["grcp"]}), FACTS, LOCAL)


def test_gpus_decide_where_torch_comes_from() -> None:
    def index(made: Recipe) -> str:
        return next(
            line.partition("=")[2]
            for line in made.files["Dockerfile"].splitlines()
            if line.startswith("ARG TORCH_INDEX_URL")
        )

    assert (
        index(recipe(a_spec("container"), FACTS, LOCAL)) == "https://download.pytorch.org/whl/cpu"
    )
    assert index(recipe(a_spec("container", container={"gpus": 1}), FACTS, LOCAL)) == ""
    assert (
        index(
            recipe(a_spec("sagemaker", sagemaker={"instance_type": "ml.g5.xlarge"}), FACTS, LOCAL)
        )
        == ""
    )


def test_every_package_of_an_image_but_torch_is_checked_against_its_hash() -> None:
    made = recipe(
        a_spec("container", build={"extras": ["grpc", "otel", "torchserve"]}), FACTS, LOCAL
    ).files
    dockerfile = made["Dockerfile"]
    installed = {"locked-base.txt", "locked-grpc.txt", "locked-otel.txt"}
    assert "locked-torchserve.txt" not in made
    for name in installed:
        assert f"--requirement /tmp/locks/{name}" in dockerfile
        assert f"!{name}" in made[".dockerignore"]
        blocks = re.split(r"\n(?=[\w.-]+==)", made[name].partition("\n")[2].strip())
        assert blocks
        assert all("--hash=sha256:" in block for block in blocks)
    hashed = [line for line in dockerfile.splitlines() if "--requirement /tmp/lock" in line]
    assert all("--require-hashes" in line and "--no-deps" in line for line in hashed)
    assert (
        dockerfile.count("COPY --from=sbom /opt/tsx/sbom.cdx.json") == 2
    )  # each kind of image keeps the list of its packages
    assert dockerfile.count("COPY --from=lambda-sbom /opt/tsx/sbom.cdx.json") == 1
