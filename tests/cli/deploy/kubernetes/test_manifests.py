"""The manifests of a deployment, checked against schemas and the requirements of a cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.cli.deploy.kubernetes.conftest import check
from tests.support.deploying import FACTS, LOCAL, a_spec
from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.emit.render import EmittedFiles, emit
from tsx_cli.deploy.kubernetes.resources import canonical, manifests

GUIDES = Path(__file__).parents[4] / "docs" / "guides"

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fixed": {"kubernetes": {"replicas": 3, "most_replicas": 3}},
    "gpu": {
        "kubernetes": {
            "gpus": 1,
            "tolerations": "pool=models:NoSchedule,spot",
            "secrets": {"HF_TOKEN": "hub/token"},
            "pull_secret": "pull",
        }
    },
    "open": {"kubernetes": {"tokens": False, "monitoring": False}},
    "routed": {
        "kubernetes": {"gateway": "web/public", "hostnames": ["a.example.com", "*.example.org"]}
    },
    "grpc": {
        "build": {"extras": ["grpc"]},
        "kubernetes": {
            "allow_from": "shop",
            "metrics_from": "monitoring",
            "token_secret": "tokens",
        },
    },
    "kserve": {
        "kubernetes": {
            "kserve": True,
            "storage": "s3://models/digits",
            "gpus": 1,
            "node_selector": {"disk": "ssd"},
        }
    },
}


def build(**more: Any) -> dict[str, Any]:
    """Build the manifests of a specification, by their kinds."""
    spec = a_spec("kubernetes", **more)
    built = manifests(spec, "example.com/digits@sha256:1", {"tsx:name": "digits"})
    return {manifest["kind"]: manifest for manifest in built}


def pod_of(objects: dict[str, Any]) -> Any:
    return objects["Deployment"]["spec"]["template"]["spec"]


def port_numbers(objects: dict[str, Any]) -> dict[str, int]:
    (container,) = pod_of(objects)["containers"]
    return {port["name"]: port["containerPort"] for port in container["ports"]}


@pytest.mark.parametrize("case", list(CASES))
def test_each_manifest_matches_its_schema(case: str) -> None:
    for manifest in build(**CASES[case]).values():
        check(manifest)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("HTTPRoute", "parentRefs", [{"name": ""}]),
        ("ServiceMonitor", "endpoints", [{"interval": "often"}]),
        ("HTTPRoute", "rules", [{"backendRefs": [{"name": "digits"}]}]),
    ],
)
def test_the_schemas_refuse_invalid_values_like_a_cluster(
    kind: str, field: str, value: Any
) -> None:
    manifest = build(**CASES["routed"])[kind]
    manifest["spec"][field] = value
    with pytest.raises(jsonschema.ValidationError):
        check(manifest)


def test_pods_for_neuron_tolerate_the_taint_of_its_nodes() -> None:
    pod = pod_of(build(kubernetes={"gpus": 1, "gpu_resource": "aws.amazon.com/neuroncore"}))
    assert pod["tolerations"] == [{"key": "aws.amazon.com/neuron", "operator": "Exists"}]
    assert pod["containers"][0]["resources"]["limits"]["aws.amazon.com/neuroncore"] == "1"


def test_every_selector_contains_the_instance() -> None:
    selected = {"app.kubernetes.io/name": "digits", "app.kubernetes.io/instance": "digits"}
    objects = build(kubernetes={"allow_from": "shop"})
    deployment = objects["Deployment"]["spec"]
    assert deployment["selector"]["matchLabels"] == selected
    assert selected.items() <= deployment["template"]["metadata"]["labels"].items()
    spread = pod_of(objects)["topologySpreadConstraints"]
    assert [entry["labelSelector"]["matchLabels"] for entry in spread] == [selected, selected]
    assert objects["Service"]["spec"]["selector"] == selected
    for kind in ("PodDisruptionBudget", "ServiceMonitor"):
        assert objects[kind]["spec"]["selector"]["matchLabels"] == selected
    assert objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == selected
    for manifest in objects.values():
        assert selected.items() <= manifest["metadata"]["labels"].items()


def test_grpc_has_a_port_if_the_image_supports_it() -> None:
    def service_ports(objects: dict[str, Any]) -> dict[str, tuple[int, str]]:
        ports = objects["Service"]["spec"]["ports"]
        return {port["name"]: (port["port"], port["appProtocol"]) for port in ports}

    served = build(**CASES["grpc"])
    assert service_ports(served) == {
        "http": (8080, "http"),
        "grpc": (7070, "kubernetes.io/h2c"),
        "metrics": (8082, "http"),
    }
    # The management API has no port outside the pod.
    assert port_numbers(served) == {"http": 8080, "grpc": 7070, "metrics": 8082}
    (container,) = pod_of(served)["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert "grpc_inference_address=0.0.0.0" in variables["TSX_DEFAULTS"].split()
    assert "TSX_MANAGEMENT_ADDRESS" not in variables
    rules = served["NetworkPolicy"]["spec"]["ingress"]
    assert [[port["port"] for port in rule["ports"]] for rule in rules] == [
        ["http", "grpc"],
        ["metrics"],
    ]
    image = "registry.example.com/digits:1"
    for objects in (build(), build(image=image, build={"extras": ["grpc"]})):
        assert [*service_ports(objects)] == ["http", "metrics"]
    assert len(service_ports(build(image=image, kubernetes={"grpc": True}))) == 3
    with pytest.raises(UsageError, match=r"add --set build\.extras=grpc"):
        build(kubernetes={"grpc": True})


def test_a_route_refers_to_the_given_gateway() -> None:
    body = build(**CASES["routed"])["HTTPRoute"]["spec"]
    assert body["parentRefs"] == [{"name": "public", "namespace": "web"}]
    assert body["hostnames"] == ["a.example.com", "*.example.org"]
    assert body["rules"] == [{"backendRefs": [{"name": "digits", "port": 8080}]}]
    spec = build(kubernetes={"gateway": "public", "namespace": "models"})["HTTPRoute"]["spec"]
    assert spec["parentRefs"] == [{"name": "public", "namespace": "models"}]
    assert "hostnames" not in spec


def test_the_autoscaler_may_double_the_pods_at_once() -> None:
    body = build()["HorizontalPodAutoscaler"]["spec"]
    assert body["metrics"][0]["pods"]["metric"] == {"name": "tsx_requests_waiting"}
    assert body["metrics"][1]["resource"]["target"] == {
        "type": "Utilization",
        "averageUtilization": 80,
    }
    assert body["behavior"]["scaleUp"] == {
        "stabilizationWindowSeconds": 0,
        "policies": [{"type": "Percent", "value": 100, "periodSeconds": 30}],
    }


@pytest.mark.parametrize(
    ("quantity", "stored"),
    [
        ("2000m", "2"),
        ("1500m", "1500m"),
        ("2048Mi", "2Gi"),
        ("1048576Mi", "1Ti"),
        ("2048Gi", "2Ti"),
        ("1000", "1k"),
        ("4", "4"),
    ],
)
def test_quantities_have_the_form_that_clusters_store(quantity: str, stored: str) -> None:
    assert canonical(quantity) == stored


def test_files_contain_no_token_and_name_the_command_that_creates_it() -> None:
    def files(**kubernetes: Any) -> EmittedFiles:
        return emit("kubernetes", a_spec("kubernetes", kubernetes=kubernetes), FACTS, LOCAL)

    emitted = files(namespace="models")
    assert emitted.files == files(namespace="models").files
    step = r"kubectl create secret generic digits-tokens --namespace models --from-literal=inference=\S.* once, then kubectl apply"
    assert re.search(step, emitted.next_step)
    for tokens in ({"tokens": False}, {"token_secret": "theirs"}):
        assert "create secret" not in files(**tokens).next_step


@pytest.mark.parametrize(("page", "port"), [("security.md", 8080), ("deploy/ray.md", 8000)])
def test_the_documented_policies_open_only_the_port_of_requests_to_others(
    page: str, port: int
) -> None:
    text = (GUIDES / page).read_text(encoding="utf-8")
    (policy,) = (
        yaml.safe_load(block)
        for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
        if "NetworkPolicy" in block
    )
    check(policy)
    pod_rule, clients = policy["spec"]["ingress"]
    assert pod_rule["from"][0]["podSelector"] == policy["spec"]["podSelector"]
    assert clients["ports"] == [{"protocol": "TCP", "port": port}]


def test_a_pod_exposes_the_documented_ports() -> None:
    text = (GUIDES / "security.md").read_text(encoding="utf-8")
    (row,) = re.findall(r"\| a pod of `tsx deploy --target kubernetes`: ([^|]*)\|", text)
    objects = build(**CASES["grpc"])
    ports = port_numbers(objects)
    assert {*ports.values()} == {int(port) for port in re.findall(r"[0-9]+", row)}
    rules = objects["NetworkPolicy"]["spec"]["ingress"]
    assert {port["port"] for rule in rules for port in rule["ports"]} == ports.keys()
