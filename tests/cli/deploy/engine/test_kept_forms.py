"""Forms kept in an archive: their effect on the image, and images for AWS's Neuron."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.deploying import FACTS, HANDLER, a_spec
from tests.support.models import make_model
from tsx_archiver import ArchiveSpec, write_archive
from tsx_archiver.metadata.forms import FORMS_FILE, FormIndex, FormRecord
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.deploy.engine.facts import Facts, read_archive
from tsx_cli.deploy.image.recipe import NEURON_BASE, Local, recipe
from tsx_cli.deploy.preflight.preflight import model_profile
from tsx_cli.deploy.spec import DeploySpec
from tsx_cli.deploy.targets import find_target

LOCAL = Local("3.12", "2.13.0+cpu", "0.1.0", machine="linux/amd64")
CPU = {"device": "cpu", "machine": "x86_64"}
INT8 = FormRecord("onnx-int8", {**CPU, "cpu": ["avx512_vnni"], "extras": ["onnx"]})
ENGINE = FormRecord(
    "tensorrt",
    {
        "device": "cuda",
        "machine": "x86_64",
        "torch": "2.13",
        "gpu": "NVIDIA L4, compute capability 8.9",
        "extras": ["tensorrt"],
    },
)
NEURON = FormRecord("neuron-bf16", {**CPU, "torch": "2.9", "packages": {"torch_neuronx": "2.9"}})
INF2 = {"sagemaker": {"instance_type": "ml.inf2.xlarge"}}
PODS = {
    "repository": "host/digits",
    "kubernetes": {"gpus": 1, "gpu_resource": "aws.amazon.com/neuron"},
}


def facts(*forms: FormRecord) -> Facts:
    return replace(FACTS, forms=forms)


def spec(target: str = "container", **more: Any) -> DeploySpec:
    return a_spec(target, **more)


def archive(directory: Path, config: str, forms: bytes) -> Path:
    """Make an archive with forms."""
    path = make_model(directory / "digits.mar", HANDLER, config=config)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr(FORMS_FILE, forms)
    return path


def test_the_forms_that_a_server_tries_are_read_from_the_archive(tmp_path: Path) -> None:
    compiled = FormRecord("compile-bf16", {**CPU, "torch": "2.13", "compiles": True})
    forms = FormIndex((INT8, compiled, ENGINE)).content()
    config = "forms: [compile-bf16, onnx-int8, reference]\n"
    _, facts = read_archive(archive(tmp_path, config, forms))
    assert [form.name for form in facts.forms] == ["compile-bf16", "onnx-int8"]
    assert facts.compiling_part == "the form compile-bf16"
    _, facts = read_archive(archive(tmp_path, "", forms))
    assert facts.forms == ()
    with pytest.raises(CliError, match=r"tsx-forms\.json cannot be read"):
        read_archive(archive(tmp_path, "forms: onnx-int8\n", b"{}"))


def test_an_image_gets_the_extras_of_a_hugging_face_model() -> None:
    model = replace(facts(), extras=("transformers", "peft"))
    image = recipe(spec(build={"extras": ["peft"]}), model, LOCAL)
    assert "[peft,transformers]" in image.files["Dockerfile"]
    assert "transformers==" in image.files["locked-transformers.txt"]
    assert "the image gets the extra transformers" in str(image.notes)


def test_an_image_gets_the_extra_of_a_model_of_tables(tmp_path: Path) -> None:
    (tmp_path / "trees.txt").write_text("tree\n")
    table_spec = ArchiveSpec("trees", "tabular", serialized_file=tmp_path / "trees.txt")
    _, model = read_archive(write_archive(table_spec, tmp_path))
    image = recipe(spec(), replace(facts(), extras=model.extras), LOCAL)
    for package in ("lightgbm", "skops", "xgboost"):
        assert f"{package}==" in image.files["locked-tabular.txt"]


@pytest.mark.parametrize(("key", "package"), [("mcp", "mcp"), ("monitor", "scipy")])
def test_an_image_gets_the_extra_that_a_key_of_the_model_needs(
    tmp_path: Path, key: str, package: str
) -> None:
    _, model = read_archive(archive(tmp_path, f"{key}: true\n", b"{}"))
    image = recipe(spec(), replace(facts(), extras=model.extras), LOCAL)
    assert f"{package}==" in image.files[f"locked-{key}.txt"]


def test_an_image_gets_the_extras_of_its_forms_with_a_note() -> None:
    image = recipe(spec(build={"extras": ["grpc"]}), facts(INT8, ENGINE), LOCAL)
    assert '"tsx-serve[grpc,onnx]==' in image.files["Dockerfile"]
    assert "locked-onnx.txt" in image.files
    assert image.notes == (
        "the image gets the extra onnx of tsx-serve, which the form onnx-int8 needs",
        "the form onnx-int8 is used only on machines with avx512_vnni",
        "the form tensorrt is not used: it runs on GPUs, and the image is for CPUs",
    )
    gpu = recipe(spec(container={"gpus": 1}), facts(INT8, ENGINE), LOCAL)
    assert '"tsx-serve[tensorrt]==' in gpu.files["Dockerfile"]
    assert "L4, compute capability 8.9" in str(gpu.notes)


@pytest.mark.parametrize(
    ("target", "more", "reason"),
    [
        ("container", {"build": {"torch": "2.12.1"}}, "torch 2.13, and the image has torch 2.12"),
        (
            "lambda",
            {"lambda": {"architecture": "arm64"}},
            "linux/amd64, and the image is for linux/arm64",
        ),
    ],
)
def test_a_form_for_another_torch_or_machine_gets_a_note(
    target: str, more: dict[str, Any], reason: str
) -> None:
    form = FormRecord("aotinductor", {**CPU, "torch": "2.13", "extras": ["onnx"]})
    image = recipe(spec(target, **more), facts(form), LOCAL)
    assert "aotinductor is not used" in str(image.notes)
    assert reason in str(image.notes)
    assert "locked-onnx.txt" not in image.files


@pytest.mark.parametrize("extras", [["x] && curl"], [["onnx"]], "onnx", 3, None])
def test_invalid_extras_of_an_archive_are_ignored(extras: Any) -> None:
    form = FormRecord("onnx", {**CPU, "extras": extras})
    assert recipe(spec(), facts(form), LOCAL).files == recipe(spec(), facts(), LOCAL).files


@pytest.mark.parametrize(("target", "more"), [("sagemaker", INF2), ("kubernetes", PODS)])
def test_an_image_for_neuron_has_awss_base_and_keeps_its_torch(
    target: str, more: dict[str, Any]
) -> None:
    image = recipe(spec(target, **more), replace(facts(NEURON), requirements="tqdm\n"), LOCAL)
    text = image.files["Dockerfile"]
    assert f"ARG BASE_IMAGE={NEURON_BASE}\n" in text
    assert "python3 -m venv --system-site-packages /opt/tsx" in text
    assert 'pip install --no-deps "tsx-serve==' in text
    index = "--extra-index-url https://pip.repos.neuron.amazonaws.com"
    assert f"{index} --requirement /tmp/requirements.txt\n" in text
    assert "TORCH" not in text.partition("FROM runtime AS sbom")[0].partition("ARG BASE_IMAGE")[2]
    assert any("CVE-2026-24747" in note for note in image.notes)


@pytest.mark.parametrize(
    ("forms", "build", "reason"),
    [
        ((INT8,), {}, "it has no form neuron or neuron-bf16"),
        (
            (replace(NEURON, bound={**NEURON.bound, "torch": "2.8"}),),
            {},
            "neuron-bf16: it was built with torch 2.8",
        ),
        ((NEURON,), {"torch": "2.13.0"}, "has the torch of its base"),
    ],
)
def test_a_form_or_torch_that_does_not_fit_neuron_is_refused(
    forms: tuple[FormRecord, ...], build: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        recipe(spec("sagemaker", build=build, **INF2), facts(*forms), LOCAL)


def test_an_image_for_cpus_has_no_form_for_neuron() -> None:
    (note,) = recipe(spec(), facts(NEURON), LOCAL).notes
    assert note.startswith("the form neuron-bf16 is not used: it runs on AWS's Neuron")


def test_the_preflight_knows_neuron_machines_and_forms(tmp_path: Path) -> None:
    path = archive(tmp_path, "forms: neuron-bf16\n", FormIndex((NEURON,)).content())
    inspection, _ = read_archive(path)
    assert model_profile(inspection, None).has_neuron_form
    for target, more in (("sagemaker", INF2), ("kubernetes", PODS)):
        assert find_target(target).profile(spec(target, **more)).device == "neuron"
