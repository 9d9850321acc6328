"""The manifests of a deployment, as Kubernetes' own schemas and those of the kinds beside it take
them; and what a cluster relies on.
"""

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
from tsx_cli.deploy.emit.render import emit
from tsx_cli.deploy.kubernetes.resources import canonical, manifests

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


def made(**more: Any) -> dict[str, Any]:
    return {
        each["kind"]: each
        for each in manifests(
            a_spec("kubernetes", **more), "example.com/digits@sha256:1", {"tsx:name": "digits"}
        )
    }


@pytest.mark.parametrize("case", list(CASES))
def test_each_manifest_is_what_its_schema_takes(case: str) -> None:
    for manifest in made(**CASES[case]).values():
        check(manifest)


@pytest.mark.parametrize(
    ("kind", "place", "value"),
    [
        ("HTTPRoute", "parentRefs", [{"name": ""}]),
        ("ServiceMonitor", "endpoints", [{"interval": "often"}]),
        ("HTTPRoute", "rules", [{"backendRefs": [{"name": "digits"}]}]),
    ],
)
def test_the_schemas_refuse_what_a_cluster_would(kind: str, place: str, value: Any) -> None:
    manifest = made(**CASES["routed"])[kind]
    manifest["spec"][place] = value
    with pytest.raises(jsonschema.ValidationError):
        check(manifest)


def test_pods_for_neuron_tolerate_the_taint_of_its_nodes() -> None:
    pod = made(kubernetes={"gpus": 1, "gpu_resource": "aws.amazon.com/neuroncore"})["Deployment"][
        "spec"
    ]["template"]["spec"]
    assert pod["tolerations"] == [{"key": "aws.amazon.com/neuron", "operator": "Exists"}]
    assert pod["containers"][0]["resources"]["limits"]["aws.amazon.com/neuroncore"] == "1"


def test_every_selector_has_the_instance() -> None:
    selected = {"app.kubernetes.io/name": "digits", "app.kubernetes.io/instance": "digits"}
    all_made = made(kubernetes={"allow_from": "shop"})
    deployment = all_made["Deployment"]["spec"]
    assert deployment["selector"]["matchLabels"] == selected
    assert selected.items() <= deployment["template"]["metadata"]["labels"].items()
    spread = deployment["template"]["spec"]["topologySpreadConstraints"]
    assert [each["labelSelector"]["matchLabels"] for each in spread] == [selected, selected]
    assert all_made["Service"]["spec"]["selector"] == selected
    for kind in ("PodDisruptionBudget", "ServiceMonitor"):
        assert all_made[kind]["spec"]["selector"]["matchLabels"] == selected
    assert all_made["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == selected
    assert all(selected.items() <= each["metadata"]["labels"].items() for each in all_made.values())


def test_grpc_has_a_port_where_the_image_serves_it() -> None:
    served = made(**CASES["grpc"])
    ports = {
        each["name"]: (each["port"], each["appProtocol"])
        for each in served["Service"]["spec"]["ports"]
    }
    assert ports == {
        "http": (8080, "http"),
        "grpc": (7070, "kubernetes.io/h2c"),
        "metrics": (8082, "http"),
    }
    (container,) = served["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert {each["name"]: each["containerPort"] for each in container["ports"]} == {
        "http": 8080,
        "grpc": 7070,
        "metrics": 8082,
    }
    (defaults,) = [each["value"] for each in container["env"] if each["name"] == "TSX_DEFAULTS"]
    assert "grpc_inference_address=0.0.0.0" in defaults.split()
    rules = [
        [port["port"] for port in rule["ports"]]
        for rule in served["NetworkPolicy"]["spec"]["ingress"]
    ]
    assert rules == [["http", "grpc"], ["metrics"]]
    without = [made(), made(image="registry.example.com/digits:1", build={"extras": ["grpc"]})]
    assert [[each["name"] for each in one["Service"]["spec"]["ports"]] for one in without] == [
        ["http", "metrics"]
    ] * 2
    asked_for = made(image="registry.example.com/digits:1", kubernetes={"grpc": True})
    assert len(asked_for["Service"]["spec"]["ports"]) == 3
    with pytest.raises(UsageError, match=r"add --set build\.extras=grpc"):
        made(kubernetes={"grpc": True})


def test_management_has_no_port_outside_the_pod() -> None:
    all_made = made(**CASES["grpc"])
    (container,) = all_made["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert not {8081, 7071} & {each["containerPort"] for each in container["ports"]}
    assert "TSX_MANAGEMENT_ADDRESS" not in {each["name"] for each in container["env"]}


def test_a_route_leads_to_the_gateway_that_is_named() -> None:
    body = made(**CASES["routed"])["HTTPRoute"]["spec"]
    assert body["parentRefs"] == [{"name": "public", "namespace": "web"}]
    assert body["hostnames"] == ["a.example.com", "*.example.org"]
    assert body["rules"] == [{"backendRefs": [{"name": "digits", "port": 8080}]}]
    own = made(kubernetes={"gateway": "public", "namespace": "models"})["HTTPRoute"]["spec"]
    assert own["parentRefs"] == [{"name": "public", "namespace": "models"}]
    assert "hostnames" not in own


def test_a_burst_of_requests_may_double_the_pods_at_once() -> None:
    body = made()["HorizontalPodAutoscaler"]["spec"]
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
    ("given", "stored"),
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
def test_quantities_are_written_as_a_cluster_stores_them(given: str, stored: str) -> None:
    assert canonical(given) == stored


def test_files_name_the_command_that_creates_the_secret_and_hold_no_token() -> None:
    first, second = (
        emit("kubernetes", a_spec("kubernetes", kubernetes={"namespace": "models"}), FACTS, LOCAL)
        for _ in range(2)
    )
    assert first.files == second.files
    step = r"kubectl create secret generic digits-tokens --namespace models --from-literal=inference=\S.* once, then kubectl apply"
    assert re.search(step, first.next_step)
    for own in ({"tokens": False}, {"token_secret": "theirs"}):
        assert (
            "create secret"
            not in emit("kubernetes", a_spec("kubernetes", kubernetes=own), FACTS, LOCAL).next_step
        )


@pytest.mark.parametrize(("page", "port"), [("security.md", 8080), ("deploy/ray.md", 8000)])
def test_the_policies_in_the_documentation_open_the_port_of_requests_alone_to_others(
    page: str, port: int
) -> None:
    text = (Path(__file__).parents[4] / "docs" / "guides" / page).read_text(encoding="utf-8")
    (policy,) = (
        yaml.safe_load(block)
        for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
        if "NetworkPolicy" in block
    )
    check(policy)
    among, clients = policy["spec"]["ingress"]
    assert among["from"][0]["podSelector"] == policy["spec"]["podSelector"]
    assert clients["ports"] == [{"protocol": "TCP", "port": port}]


def test_a_pod_exposes_the_ports_that_the_documentation_names() -> None:
    text = (Path(__file__).parents[4] / "docs" / "guides" / "security.md").read_text(
        encoding="utf-8"
    )
    (row,) = re.findall(r"\| a pod of `tsx deploy --target kubernetes`: ([^|]*)\|", text)
    (container,) = made(**CASES["grpc"])["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert {each["containerPort"] for each in container["ports"]} == {
        int(port) for port in re.findall(r"[0-9]+", row)
    }
    rules = made(**CASES["grpc"])["NetworkPolicy"]["spec"]["ingress"]
    assert {port["port"] for rule in rules for port in rule["ports"]} == {
        each["name"] for each in container["ports"]
    }
