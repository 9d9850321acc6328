"""`--emit helm`: Helm renders the objects of `--emit kubernetes` and refuses invalid values."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.cli.deploy.kubernetes.conftest import check
from tests.support.deploying import FACTS, LOCAL, a_spec
from tests.support.platforms.helm import IS_THERE, objects, render
from tsx_cli.deploy.emit.helm import VALUE_DESCRIPTIONS, schema, values
from tsx_cli.deploy.emit.render import emit
from tsx_cli.deploy.kubernetes.resources import manifests
from tsx_cli.deploy.spec import DeploySpec

IMAGE = "registry.example.com:5000/digits:1@sha256:" + "0" * 64
KEDA = {"prometheus": "http://prometheus.monitoring:9090"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fixed": {"kubernetes": {"replicas": 3, "most_replicas": 3, "monitoring": False, "queue_target": 0}},
    "busy": {"kubernetes": {"queue_target": 0}},
    "single": {"kubernetes": {"replicas": 1, "most_replicas": 1, "startup_timeout": "91s", "grace": "12s"}},
    "other": {
        "image": "digits",
        "env": {"TSX_DRAIN_TIMEOUT": "7", "TSX_CPUS": "3", "B": 'a "b"', "LONG": "1234567"},
        "kubernetes": {
            "replicas": 1, "queue_target": 9, "cpu_target": 60, "cpu": "2000m", "memory": "2048Mi", "disk": "10Gi", "shared_memory": "2Gi",
            "gpus": 2, "node_selector": {"disk": "ssd", "gpu": "true"}, "tolerations": "pool=models:NoSchedule,spot",
            "secrets": {"HF_TOKEN": "hub/token"}, "allow_from": "shop,search", "metrics_from": "monitoring", "token_secret": "tokens",
            "pull_secret": "pull", "monitor_labels": {"release": "prometheus"},
        },
    },
    "guarded": {"kubernetes": {"allow_from": "shop", "metrics_from": "monitoring", "grpc": True}},
    "route": {"kubernetes": {"gateway": "edge/public", "hostnames": "a.example.com,b.example.com", "grpc": True}},
    "near": {"kubernetes": {"gateway": "public", "tokens": False}},
    "open": {"env": {"TSX_DISABLE_TOKEN_AUTHORIZATION": "True"}, "kubernetes": {"secrets": {"TSX_MANAGEMENT_TOKEN": "own/admin"}}},
    "own": {"env": {"TSX_INFERENCE_TOKEN": "a"}, "kubernetes": {"secrets": {"TSX_MANAGEMENT_TOKEN": "own/admin"}}},
    "neuron": {"kubernetes": {"gpus": 1, "gpu_resource": "aws.amazon.com/neuroncore"}},
    "half": {"env": {"TSX_MANAGEMENT_TOKEN": "a"}},
    "keda": {"kubernetes": {"keda": KEDA}},
    "none": {
        "kubernetes": {"replicas": 0, "keda": KEDA | {"rate_target": 2.5, "rate_query": 'sum(rate(x{a="b"}[1m]))', "cooldown": "10m"}},
    },
    "rate": {"kubernetes": {"keda": KEDA | {"rate_target": 20}, "queue_target": 0, "most_replicas": 2}},
}  # fmt: skip


def spec(**more: Any) -> DeploySpec:
    kubernetes = {"namespace": "models"} | more.pop("kubernetes", {})
    return a_spec("kubernetes", **{"image": IMAGE, "kubernetes": kubernetes, **more})


def values_of(spec: DeploySpec) -> dict[str, Any]:
    return values(spec, str(spec.image))


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chart") / "digits"
    for name, text in emit("helm", spec(), FACTS, LOCAL).files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def comparable(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    """Return manifests by kind, without the differences that Helm makes.

    Helm names itself as the owner, omits annotations of tsx, and sorts variables.
    """
    result = {}
    for manifest in copy.deepcopy(manifests):
        template = manifest["spec"].get("template", {})
        for metadata in (manifest["metadata"], template.get("metadata", {})):
            metadata.get("labels", {}).pop("app.kubernetes.io/managed-by", None)
            annotations = metadata.get("annotations", {})
            for name in [name for name in annotations if name.startswith("tsx/")]:
                del annotations[name]
        if manifest["kind"] == "Deployment":
            variables = template["spec"]["containers"][0]["env"]
            variables.sort(key=lambda variable: variable["name"])
        result[manifest["kind"]] = manifest
    return result


@pytest.mark.skipif(not IS_THERE, reason="needs helm, or helm-python-sdk")
def test_helm_renders_the_objects_of_any_specification(chart: Path) -> None:
    specs = [spec(**more) for more in CASES.values()]
    findings, rendered = render(chart, "digits", "models", [values_of(case) for case in specs])
    assert findings == []
    for case, specification, text in zip(CASES, specs, rendered, strict=True):
        rendered_objects = objects(text)
        tests = [manifest for manifest in rendered_objects if manifest["kind"] == "Pod"]
        # The chart has no test if no server answers, or a network policy blocks the test's pod.
        assert len(tests) == (case not in ("none", "guarded", "other")), text
        labels = {"tsx:model": "digits/1.0"}
        expected = manifests(specification, str(specification.image), labels)
        deployed = [manifest for manifest in rendered_objects if manifest["kind"] != "Pod"]
        assert comparable(deployed) == comparable(expected), case
        for manifest in rendered_objects:
            check(manifest)


@pytest.mark.skipif(not IS_THERE, reason="needs helm, or helm-python-sdk")
def test_objects_are_named_after_the_release_and_scaling_is_validated(chart: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"queueTarget": 0, "keda": KEDA}, "nothing to scale by"),
        ({"replicas": 0, "keda": KEDA}, "pods that are not there count no requests"),
        ({"replicas": 0}, "keeps at least one pod"),
        ({"replica": 3}, "replica"),
        ({"env": {"A": 1}}, "env"),
    ]
    policies = {"metricsFrom": ["monitoring"], "allowFrom": ["shop"]}
    cases = [policies, *(invalid for invalid, _ in wrong)]
    _, (plain, *refused) = render(chart, "canary", "shop", cases)
    metadata = [manifest["metadata"] for manifest in objects(plain)]
    assert {(entry["name"], entry["namespace"]) for entry in metadata} == {
        ("canary", "shop"),
        ("canary-test", "shop"),
    }
    assert "digits:1@sha256" in plain
    for text, (_, reason) in zip(refused, wrong, strict=True):
        assert text.startswith("#"), text
        assert reason in text


def test_the_chart_has_all_files_and_a_schema_for_each_value() -> None:
    files = emit("helm", spec(), FACTS, LOCAL).files
    head = yaml.safe_load(files["Chart.yaml"])
    assert (head["apiVersion"], head["name"], head["appVersion"]) == ("v2", "digits", "1.0")
    assert yaml.safe_load(files["values.yaml"]) == values_of(spec())
    schema_properties = json.loads(files["values.schema.json"])["properties"]
    descriptions = {key: value.get("description") for key, value in schema_properties.items()}
    assert descriptions == VALUE_DESCRIPTIONS | {"global": None}
    for text in VALUE_DESCRIPTIONS.values():
        assert text.split()[-1] in files["values.yaml"]


def test_values_have_the_same_limits_as_the_specification() -> None:
    for more in CASES.values():
        jsonschema.validate(values_of(spec(**more)), schema())
    wrong = [
        {"replica": 3}, {"replicas": -1}, {"memory": "4G"}, {"secrets": {"A": 1}}, {"keda": {"cooldown": -1}},
        {"keda": {"prometheus": "x"}}, {"image": {"tag": "1"}}, {"image": {"repository": "a", "digest": "sha1:0"}},
        {"tolerations": ["spot"]}, {"grace": 5},
    ]  # fmt: skip
    for invalid in wrong:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(invalid, schema())
    jsonschema.validate({"cpu": 4, "global": {"x": 1}}, schema())


def test_the_files_of_an_image_are_next_to_the_chart() -> None:
    emitted = emit("helm", spec(image=None, repository="registry.example.com/digits"), FACTS, LOCAL)
    assert "image/Dockerfile" in emitted.files
    assert emitted.copied == {"image/model.mar": Path("digits.mar")}
    assert "image/" in emitted.files[".helmignore"].splitlines()
    assert yaml.safe_load(emitted.files["values.yaml"])["image"]["tag"].startswith("tsx-")
    assert emitted.next_step.endswith(
        "then helm upgrade --install digits . --namespace models --wait"
    )
