"""`--emit helm`: Helm renders the objects of `--emit kubernetes`, whatever the values say, and
refuses values that could not work.
"""

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
from tsx_cli.deploy.emit.helm import VALUES, schema, values
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
    own = {"namespace": "models"} | more.pop("kubernetes", {})
    return a_spec("kubernetes", **{"image": IMAGE, "kubernetes": own, **more})


def values_of(one: DeploySpec) -> dict[str, Any]:
    return values(one, str(one.image))


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("chart") / "digits"
    for name, text in emit("helm", spec(), FACTS, LOCAL).files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def comparable(made: list[dict[str, Any]]) -> dict[str, Any]:
    """Without what Helm has its own way of saying: the owner, the annotations of what was
    specified; and variables in any order.
    """
    found = {}
    for each in copy.deepcopy(made):
        for metadata in (each["metadata"], each["spec"].get("template", {}).get("metadata", {})):
            metadata.get("labels", {}).pop("app.kubernetes.io/managed-by", None)
            for name in [
                name for name in metadata.get("annotations", {}) if name.startswith("tsx/")
            ]:
                del metadata["annotations"][name]
        if each["kind"] == "Deployment":
            each["spec"]["template"]["spec"]["containers"][0]["env"].sort(
                key=lambda variable: variable["name"]
            )
        found[each["kind"]] = each
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(not IS_THERE, reason="needs helm, or helm-python-sdk")
def test_helm_renders_for_any_values_the_objects_of_their_specification(chart: Path) -> None:
    specs = [spec(**more) for more in CASES.values()]
    findings, rendered = render(chart, "digits", "models", [values_of(each) for each in specs])
    assert findings == []
    for case, one, text in zip(CASES, specs, rendered, strict=True):
        made = objects(text)
        tests = [each for each in made if each["kind"] == "Pod"]
        assert len(tests) == (case not in ("none", "guarded", "other")), (
            text
        )  # nobody would answer, or a policy keeps it out
        labels = {"tsx:model": "digits/1.0"}
        assert comparable([each for each in made if each["kind"] != "Pod"]) == comparable(
            manifests(one, str(one.image), labels)
        ), case
        for each in made:
            check(each)


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(not IS_THERE, reason="needs helm, or helm-python-sdk")
def test_helm_names_objects_after_the_release_and_refuses_what_cannot_scale(chart: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"queueTarget": 0, "keda": KEDA}, "nothing to scale by"),
        ({"replicas": 0, "keda": KEDA}, "pods that are not there count no requests"),
        ({"replicas": 0}, "keeps at least one pod"),
        ({"replica": 3}, "replica"),
        ({"env": {"A": 1}}, "env"),
    ]
    _, (plain, *refused) = render(
        chart,
        "canary",
        "shop",
        [{"metricsFrom": ["monitoring"], "allowFrom": ["shop"]}, *(each for each, _ in wrong)],
    )
    assert {
        (each["metadata"]["name"], each["metadata"]["namespace"]) for each in objects(plain)
    } == {
        ("canary", "shop"),
        ("canary-test", "shop"),
    }
    assert "digits:1@sha256" in plain
    for text, (_, reason) in zip(refused, wrong, strict=True):
        assert text.startswith("#"), text
        assert reason in text


def test_the_chart_has_all_that_helm_reads_and_the_schema_describes_each_value() -> None:
    files = emit("helm", spec(), FACTS, LOCAL).files
    head = yaml.safe_load(files["Chart.yaml"])
    assert (head["apiVersion"], head["name"], head["appVersion"]) == ("v2", "digits", "1.0")
    assert yaml.safe_load(files["values.yaml"]) == values_of(spec())
    described = json.loads(files["values.schema.json"])["properties"]
    assert {key: each.get("description") for key, each in described.items()} == VALUES | {
        "global": None
    }
    for text in VALUES.values():
        assert text.split()[-1] in files["values.yaml"]


def test_values_are_checked_by_the_limits_of_the_specification() -> None:
    for more in CASES.values():
        jsonschema.validate(values_of(spec(**more)), schema())
    wrong = [
        {"replica": 3}, {"replicas": -1}, {"memory": "4G"}, {"secrets": {"A": 1}}, {"keda": {"cooldown": -1}},
        {"keda": {"prometheus": "x"}}, {"image": {"tag": "1"}}, {"image": {"repository": "a", "digest": "sha1:0"}},
        {"tolerations": ["spot"]}, {"grace": 5},
    ]  # fmt: skip
    for each in wrong:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(each, schema())
    jsonschema.validate({"cpu": 4, "global": {"x": 1}}, schema())


def test_an_image_that_is_built_lies_beside_the_chart() -> None:
    emitted = emit("helm", spec(image=None, repository="registry.example.com/digits"), FACTS, LOCAL)
    assert "image/Dockerfile" in emitted.files
    assert emitted.copied == {"image/model.mar": Path("digits.mar")}
    assert "image/" in emitted.files[".helmignore"].splitlines()
    assert yaml.safe_load(emitted.files["values.yaml"])["image"]["tag"].startswith("tsx-")
    assert emitted.next_step.endswith(
        "then helm upgrade --install digits . --namespace models --wait"
    )
