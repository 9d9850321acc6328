"""The recipe of an image: its packages, its compiler, its name, and the notes in a plan."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.deploying import FACTS, HANDLER, LOCAL, a_spec
from tests.support.models import make_model
from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.engine.facts import Facts, read_archive
from tsx_cli.deploy.image.recipe import recipe, unpinned_requirements


def test_images_have_equal_names_only_with_equal_content() -> None:
    def tag(
        target: str = "container", facts: Facts = FACTS, local: Any = LOCAL, **more: Any
    ) -> str:
        return recipe(a_spec(target, **more), facts, local).tag

    other_model = replace(FACTS, sha256="cd" * 32)
    assert tag() == tag(env={"A": "b"}) == tag("kubernetes")
    tags = {
        tag(),
        tag(facts=other_model),
        tag(container={"gpus": 1}),
        tag(facts=replace(FACTS, requirements="tqdm")),
        tag("sagemaker"),
        tag(local=LOCAL._replace(base="python:3.12-slim@sha256:" + "0" * 64)),
    }
    assert len(tags) == 6
    # Another architecture needs another image.
    assert tag("lambda") != tag("lambda", **{"lambda": {"architecture": "arm64"}})
    machines = [LOCAL._replace(machine=name) for name in ("linux/amd64", "linux/arm64")]
    assert len({tag("kubernetes", local=local) for local in machines}) == 2
    # SageMaker provides the model, so it is not part of the image.
    assert tag("sagemaker") == tag("sagemaker", facts=other_model)


def test_packages_keep_torch_and_layers_contain_no_pip_cache() -> None:
    local = LOCAL._replace(wheel=Path("tsx_serve-0.2.0-py3-none-any.whl"))
    facts = replace(FACTS, requirements="tqdm\n")
    text = recipe(a_spec("lambda", build={"extras": ["grpc"]}), facts, local).files["Dockerfile"]
    installs = [line for line in text.replace(" \\\n", " ").splitlines() if "pip install" in line]
    for line in installs:
        assert line.startswith("RUN --mount=type=cache,target=/root/.cache/pip ")
        assert "no-cache" not in line
    free = [line for line in installs if "--require-hashes" not in line]
    assert 'echo "torch==${TORCH_VERSION}" > /opt/tsx/constraints.txt' in free[0]
    assert all("--constraint /opt/tsx/constraints.txt" in line for line in free[1:])
    # pip also respects the version limits of tsx.
    assert free[2].endswith('"tsx-serve[grpc]==0.2.0"')
    stage = text[text.index("FROM runtime AS lambda\n") :]
    # Changing HOME moves pip's cache, so pip runs before.
    assert stage.index("pip install") < stage.index("HOME=/tmp")
    hashed = replace(FACTS, requirements="tqdm==4.67.1 --hash=sha256:" + "0" * 64)
    # With hashes, pip refuses packages without a hash.
    assert '"tsx-serve' not in recipe(a_spec("container"), hashed, local).files["Dockerfile"]


def test_requirements_without_an_exact_version_get_a_note() -> None:
    text = "tqdm\nsix==1.*  # any\nnumpy==2.2.6 ; python_version > '3'\n-r more.txt\ntorchvision>=0.2 \\\n  --hash=sha256:00\na @ https://b/c.whl\n"
    assert unpinned_requirements(text) == ["tqdm", "six==1.*", "torchvision>=0.2"]
    (note,) = recipe(a_spec("container"), replace(FACTS, requirements=text), LOCAL).notes
    assert "leave versions open: tqdm, six==1.*, torchvision>=0.2. " in note


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
def test_only_a_compiling_archive_gets_a_compiler(
    tmp_path: Path, config: str, handler: str, reason: str
) -> None:
    _, facts = read_archive(make_model(tmp_path / "digits.mar", handler, config=config))
    assert facts.compiling_part == reason
    image = recipe(a_spec("container"), facts, LOCAL)
    assert ("g++" in image.files["Dockerfile"]) is bool(reason)
    note = f"the image gets g++ if its base has none, because {reason} compiles the model"
    assert list(image.notes) == ([note] if reason else [])
    assert recipe(a_spec("container", build={"packages": ["clang"]}), facts, LOCAL).notes == ()


def test_an_extra_without_locked_packages_is_refused() -> None:
    with pytest.raises(UsageError, match=r"'grcp' for images; did you mean 'grpc'\?"):
        recipe(a_spec("container", build={"extras": ["grcp"]}), FACTS, LOCAL)


def test_gpus_decide_the_package_index_of_torch() -> None:
    def index(target: str, **more: Any) -> str:
        dockerfile = recipe(a_spec(target, **more), FACTS, LOCAL).files["Dockerfile"]
        (url,) = re.findall(r"^ARG TORCH_INDEX_URL=(.*)$", dockerfile, re.MULTILINE)
        return str(url)

    assert index("container") == "https://download.pytorch.org/whl/cpu"
    assert index("container", container={"gpus": 1}) == ""
    assert index("sagemaker", sagemaker={"instance_type": "ml.g5.xlarge"}) == ""


def test_all_packages_except_torch_are_checked_against_hashes() -> None:
    spec = a_spec("container", build={"extras": ["grpc", "otel", "torchserve"]})
    files = recipe(spec, FACTS, LOCAL).files
    dockerfile = files["Dockerfile"]
    installed = {"locked-base.txt", "locked-grpc.txt", "locked-otel.txt"}
    assert "locked-torchserve.txt" not in files
    for name in installed:
        assert f"--requirement /tmp/locks/{name}" in dockerfile
        assert f"!{name}" in files[".dockerignore"]
        blocks = re.split(r"\n(?=[\w.-]+==)", files[name].partition("\n")[2].strip())
        assert blocks
        assert all("--hash=sha256:" in block for block in blocks)
    hashed = [line for line in dockerfile.splitlines() if "--requirement /tmp/lock" in line]
    assert all("--require-hashes" in line and "--no-deps" in line for line in hashed)
    # Each image contains the list of its packages.
    assert dockerfile.count("COPY --from=sbom /opt/tsx/sbom.cdx.json") == 2
    assert dockerfile.count("COPY --from=lambda-sbom /opt/tsx/sbom.cdx.json") == 1
