"""`--emit kustomize`: overlays that fit their base and build the objects of `--emit kubernetes`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deploying import FACTS, LOCAL, a_spec
from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.emit.render import EmittedFiles, emit
from tsx_cli.deploy.engine.facts import tags_of
from tsx_cli.deploy.kubernetes.resources import manifests
from tsx_cli.deploy.spec import DeploySpec

KEDA = {"prometheus": "http://prometheus.monitoring:9090", "rate_target": 20}
CASES: dict[str, dict[str, Any]] = {
    "plain": {"image": "registry.example.com:5000/digits:1"},
    "digest": {
        "image": "digits@sha256:" + "0" * 64,
        "kubernetes": {"replicas": 3, "most_replicas": 3},
    },
    "keda": {
        "image": "digits",
        "kubernetes": {
            "keda": KEDA,
            "gateway": "public",
            "hostnames": "a.example.com",
            "allow_from": "shop",
        },
    },
}


def spec(case: str) -> DeploySpec:
    kubernetes = {"namespace": "models", **CASES[case].get("kubernetes", {})}
    return a_spec("kubernetes", **{**CASES[case], "kubernetes": kubernetes})


def container_of(objects: dict[tuple[str, str], Any]) -> Any:
    return objects["Deployment", "digits"]["spec"]["template"]["spec"]["containers"][0]


def key(manifest: dict[str, Any]) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


@pytest.mark.parametrize("case", CASES)
def test_an_overlay_refers_to_objects_of_the_base(case: str) -> None:
    files = {
        name: yaml.safe_load(text)
        for name, text in emit("kustomize", spec(case), FACTS, LOCAL).files.items()
    }
    base = {
        key(files[f"base/{name}"]): files[f"base/{name}"]
        for name in files["base/kustomization.yaml"]["resources"]
    }
    assert len(base) + 1 == sum(name.startswith("base/") for name in files)
    image_name = container_of(base)["image"]
    for environment, namespace in (("staging", "models-staging"), ("production", "models")):
        overlay = files[f"overlays/{environment}/kustomization.yaml"]
        assert (overlay["namespace"], overlay["resources"]) == (namespace, ["../../base"])
        (image,) = overlay["images"]
        tag = f":{image['newTag']}" if "newTag" in image else f"@{image['digest']}"
        assert image_name == image["name"] + tag or case == "keda"
        for entry in overlay["patches"]:
            patch = files[f"overlays/{environment}/{entry['path']}"]
            assert patch["spec"].keys() <= base[key(patch)]["spec"].keys()
            # The base has no namespace, so a patch needs none.
            assert "namespace" not in base[key(patch)]["metadata"]


def test_both_environments_may_share_one_gateway() -> None:
    """Their hosts differ, since a Gateway sends all requests for a host to the older route."""

    def emitted(**kubernetes: Any) -> EmittedFiles:
        spec = a_spec("kubernetes", image="a", kubernetes=kubernetes)
        return emit("kustomize", spec, FACTS, LOCAL)

    overlays = emitted(gateway="web/public", hostnames="a.example.com,*.b.example.com")
    hosts = {
        name: yaml.safe_load(overlays.files[f"overlays/{name}/route.yaml"])["spec"]["hostnames"]
        for name in ("staging", "production")
    }
    assert hosts["production"] == ["a.example.com", "*.b.example.com"]
    assert hosts["staging"] == ["staging.a.example.com", "*.staging.b.example.com"]
    assert overlays.notes == []
    assert "kubernetes.hostnames" in str(emitted(gateway="web/public").notes)
    # Each namespace has a Gateway of this name.
    assert "kubernetes.hostnames" not in str(emitted(gateway="public").notes)


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="needs kubectl, which has kustomize in it"
)
@pytest.mark.parametrize("case", CASES)
def test_kustomize_builds_the_objects_of_the_specification(case: str, tmp_path: Path) -> None:
    for name, text in emit("kustomize", spec(case), FACTS, LOCAL).files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    built = {}
    for environment in ("staging", "production"):
        arguments = ("kubectl", "kustomize", tmp_path / "overlays" / environment)
        finished = subprocess.run(
            arguments, capture_output=True, text=True, timeout=60, check=False
        )
        assert finished.returncode == 0, finished.stderr
        documents = yaml.safe_load_all(finished.stdout)
        built[environment] = {key(manifest): manifest for manifest in documents}
    objects = manifests(spec(case), str(spec(case).image), tags_of(spec(case), FACTS))
    expected = {key(manifest): manifest for manifest in objects}
    if case == "keda":
        container_of(expected)["image"] = "digits:latest"
        scaled = built["staging"]["ScaledObject", "digits"]["spec"]
        query = scaled["triggers"][0]["metadata"]["query"]
        assert query == 'sum(tsx_requests_waiting{namespace="models-staging",service="digits"})'
        route = built["staging"]["HTTPRoute", "digits"]["spec"]
        assert route["parentRefs"] == [{"name": "public", "namespace": "models-staging"}]
    assert built["production"] == expected
    for manifest in built["staging"].values():
        assert manifest["metadata"]["namespace"] == "models-staging"
    small = built["staging"].get(
        ("HorizontalPodAutoscaler", "digits"), built["staging"]["Deployment", "digits"]
    )["spec"]
    assert case == "keda" or small.get("minReplicas", small.get("replicas")) == 1


@pytest.mark.parametrize("kind", ["helm", "kustomize"])
def test_an_inference_service_is_only_emitted_as_plain_manifests(kind: str) -> None:
    kserve = {"kserve": True, "storage": "s3://a/b"}
    with pytest.raises(UsageError, match="use --emit kubernetes"):
        emit(kind, a_spec("kubernetes", image="a", kubernetes=kserve), FACTS, LOCAL)


@pytest.mark.parametrize("kind", ["kubernetes", "helm", "kustomize"])
def test_files_have_no_canary(kind: str) -> None:
    spec = a_spec("kubernetes", image="a", canary={}, kubernetes={"gateway": "edge"})
    with pytest.raises(UsageError, match="files cannot watch one"):
        emit(kind, spec, FACTS, LOCAL)
