"""`--emit kustomize`: overlays that refer to what the base has, and build to the objects of `--emit
kubernetes`.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.deploying import FACTS, LOCAL, a_spec
from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.emit.render import emit
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
    own = {"namespace": "models", **CASES[case].get("kubernetes", {})}
    return a_spec("kubernetes", **{**CASES[case], "kubernetes": own})


def key(manifest: dict[str, Any]) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


@pytest.mark.parametrize("case", CASES)
def test_an_overlay_refers_to_what_is_there(case: str) -> None:
    files = {
        name: yaml.safe_load(text)
        for name, text in emit("kustomize", spec(case), FACTS, LOCAL).files.items()
    }
    base = {
        key(files[f"base/{name}"]): files[f"base/{name}"]
        for name in files["base/kustomization.yaml"]["resources"]
    }
    assert len(base) + 1 == sum(name.startswith("base/") for name in files)
    container = base["Deployment", "digits"]["spec"]["template"]["spec"]["containers"][0]
    for environment, namespace in (("staging", "models-staging"), ("production", "models")):
        overlay = files[f"overlays/{environment}/kustomization.yaml"]
        assert (overlay["namespace"], overlay["resources"]) == (namespace, ["../../base"])
        (image,) = overlay["images"]
        assert (
            container["image"]
            == image["name"]
            + (f":{image['newTag']}" if "newTag" in image else f"@{image['digest']}")
            or case == "keda"
        )
        for patch in (
            files[f"overlays/{environment}/{each['path']}"] for each in overlay["patches"]
        ):
            assert patch["spec"].keys() <= base[key(patch)]["spec"].keys()
            assert (
                "namespace" not in base[key(patch)]["metadata"]
            )  # else a patch would have to name it too


def test_both_environments_may_stand_behind_one_gateway() -> None:
    """Of two routes with the same host, the Gateway would send all requests to the older."""
    own = {"gateway": "web/public", "hostnames": "a.example.com,*.b.example.com"}
    made = emit("kustomize", a_spec("kubernetes", image="a", kubernetes=own), FACTS, LOCAL)
    hosts = {
        name: yaml.safe_load(made.files[f"overlays/{name}/route.yaml"])["spec"]["hostnames"]
        for name in ("staging", "production")
    }
    assert hosts["production"] == ["a.example.com", "*.b.example.com"]
    assert hosts["staging"] == ["staging.a.example.com", "*.staging.b.example.com"]
    assert made.notes == []
    for gateway, warned in (
        ("web/public", True),
        ("public", False),
    ):  # the second is another one in each namespace
        one = a_spec("kubernetes", image="a", kubernetes={"gateway": gateway})
        assert [
            "kubernetes.hostnames" in note for note in emit("kustomize", one, FACTS, LOCAL).notes
        ] == [True] * warned


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
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
        words = ("kubectl", "kustomize", tmp_path / "overlays" / environment)
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        built[environment] = {key(each): each for each in yaml.safe_load_all(done.stdout)}
    wanted = {
        key(each): each
        for each in manifests(spec(case), str(spec(case).image), tags_of(spec(case), FACTS))
    }
    if case == "keda":
        wanted["Deployment", "digits"]["spec"]["template"]["spec"]["containers"][0]["image"] = (
            "digits:latest"
        )
        query = built["staging"]["ScaledObject", "digits"]["spec"]["triggers"][0]["metadata"][
            "query"
        ]
        assert query == 'sum(tsx_requests_waiting{namespace="models-staging",service="digits"})'
        assert built["staging"]["HTTPRoute", "digits"]["spec"]["parentRefs"] == [
            {"name": "public", "namespace": "models-staging"}
        ]
    assert built["production"] == wanted
    assert {each["metadata"]["namespace"] for each in built["staging"].values()} == {
        "models-staging"
    }
    small = built["staging"].get(
        ("HorizontalPodAutoscaler", "digits"), built["staging"]["Deployment", "digits"]
    )["spec"]
    assert case == "keda" or small.get("minReplicas", small.get("replicas")) == 1


@pytest.mark.parametrize("kind", ["helm", "kustomize"])
def test_an_inference_service_has_plain_manifests_only(kind: str) -> None:
    own = {"kserve": True, "storage": "s3://a/b"}
    with pytest.raises(UsageError, match="use --emit kubernetes"):
        emit(kind, a_spec("kubernetes", image="a", kubernetes=own), FACTS, LOCAL)


@pytest.mark.parametrize("kind", ["kubernetes", "helm", "kustomize"])
def test_files_do_not_promise_a_canary(kind: str) -> None:
    one = a_spec("kubernetes", image="a", canary={}, kubernetes={"gateway": "edge"})
    with pytest.raises(UsageError, match="files cannot watch one"):
        emit(kind, one, FACTS, LOCAL)
