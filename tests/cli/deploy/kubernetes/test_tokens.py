"""Tokens of a deployment on Kubernetes: created once, kept, never shown, and sent by `invoke`."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.cli.deploy.kubernetes.conftest import IMAGE, KSERVE, Deploy, container_of, serving_pod
from tests.support.platforms.kubectl import Cluster

TOKENS = {"TSX_INFERENCE_TOKEN": "inference", "TSX_MANAGEMENT_TOKEN": "management"}


def secret_keys(cluster: Cluster) -> dict[str, dict[str, str]]:
    """Return the keys of Secrets that variables of the container take."""
    return {
        variable["name"]: variable["valueFrom"]["secretKeyRef"]
        for variable in container_of(cluster)["env"]
        if "secretKeyRef" in variable.get("valueFrom", {})
    }


def monitoring_endpoint(cluster: Cluster) -> Any:
    return cluster.objects["ServiceMonitor", "digits"]["spec"]["endpoints"][0]


def test_tokens_are_created_once_kept_and_never_shown(deploy: Deploy, cluster: Cluster) -> None:
    def tokens() -> list[str]:
        return [cluster.secret("digits-tokens", key) for key in TOKENS.values()]

    command = f"digits.mar --no-check --image {IMAGE}"
    out = deploy("plan", command, code=2) + deploy("plan", command, "--json", code=2)
    out += deploy.apply() + deploy.err
    assert "the Secret digits-tokens, key inference" in out
    expected = {name: {"name": "digits-tokens", "key": key} for name, key in TOKENS.items()}
    assert secret_keys(cluster) == expected
    authorization = monitoring_endpoint(cluster)["authorization"]
    assert authorization["credentials"] == expected["TSX_MANAGEMENT_TOKEN"]
    first = tokens()
    assert len({*first}) == 2
    assert min(map(len, first)) > 40
    out += deploy.apply("--set=env.A=b") + deploy.err + deploy("status", "--json")
    assert tokens() == first
    for token in first:
        assert token not in out
        assert base64.b64encode(token.encode()).decode() not in out
    assert deploy.read_json("status")["tokens"] == "in the Secret digits-tokens"
    deploy("destroy", "--yes")
    assert cluster.objects == {}


def test_switching_tokens_off_keeps_the_secret_for_earlier_versions(
    deploy: Deploy, cluster: Cluster
) -> None:
    deploy.apply()
    output = deploy.apply("--set=kubernetes.tokens=false")
    assert "need no token (kubernetes.tokens)" in output
    assert secret_keys(cluster) == {}
    assert "authorization" not in monitoring_endpoint(cluster)
    assert ("Secret", "digits-tokens") in cluster.objects
    deploy("rollback", "--yes")
    assert secret_keys(cluster).keys() == TOKENS.keys()


def test_without_access_to_secrets_a_plan_assumes_existing_tokens(
    deploy: Deploy, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy.apply()
    get = cluster._get

    def refuse(arguments: list[str], stdin: str) -> str:
        if arguments[0] == "secrets":
            raise LookupError("Error from server (Forbidden): secrets is forbidden")
        return get(arguments, stdin)

    monkeypatch.setattr(cluster, "_get", refuse)
    plan = deploy("plan", "digits.mar --no-check --image", IMAGE)
    assert "cannot read the Secret digits-tokens" in plan
    deploy("destroy", "--yes")
    assert set(cluster.objects) == {("Secret", "digits-tokens")}


@pytest.mark.parametrize(
    ("name", "arguments"),
    # `digits-tokens` is the name that emitted files tell the user to create.
    [("digits-tokens", ""), ("theirs", "--set=kubernetes.token_secret=theirs")],
)
def test_a_manually_created_secret_is_used_and_kept(
    deploy: Deploy, cluster: Cluster, name: str, arguments: str
) -> None:
    cluster.objects["Secret", name] = {
        "metadata": {"name": name, "labels": {}},
        "data": {"inference": "YQ==", "management": "Yg=="},
    }
    assert "Secret" not in deploy.plan(arguments, code=2)
    deploy.apply(arguments)
    assert {key["name"] for key in secret_keys(cluster).values()} == {name}
    deploy("destroy", "--yes")
    assert set(cluster.objects) == {("Secret", name)}


def test_a_secret_with_a_missing_key_is_reported(deploy: Deploy, cluster: Cluster) -> None:
    deploy.apply()
    del cluster.objects["Secret", "digits-tokens"]["data"]["management"]
    deploy.apply(code=1)
    assert "digits-tokens has no management" in deploy.err


def test_a_token_in_the_specification_is_not_set_twice(deploy: Deploy, cluster: Cluster) -> None:
    deploy.apply(
        "--set=env.TSX_INFERENCE_TOKEN=a",
        "--set=kubernetes.secrets.TSX_MANAGEMENT_TOKEN=ours/admin",
    )
    own_tokens = {"name": "ours", "key": "admin"}
    assert secret_keys(cluster) == {"TSX_MANAGEMENT_TOKEN": own_tokens}
    assert ("Secret", "digits-tokens") not in cluster.objects
    assert monitoring_endpoint(cluster)["authorization"]["credentials"] == own_tokens


def test_kserve_has_no_tokens_and_gets_a_note(deploy: Deploy, cluster: Cluster) -> None:
    output = deploy("plan", "digits.mar --no-check --image", IMAGE, KSERVE, code=2)
    assert "KServe's clients send none" in output


@pytest.fixture
def pod(cluster: Cluster) -> Iterator[list[Any]]:
    """Serve the forwarded port, and list the token of each request."""
    tokens: list[Any] = []

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        tokens.append(request.headers["Authorization"])
        request.rfile.read(int(request.headers["Content-Length"]))
        return 200, b"7"

    with serving_pod(cluster, answer):
        yield tokens


def test_invoke_sends_the_token_of_the_secret(
    deploy: Deploy,
    cluster: Cluster,
    pod: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TSX_INFERENCE_TOKEN", "of another server")
    deploy.apply()
    (tmp_path / "in.json").write_text("{}")
    deploy("invoke", "in.json")
    assert pod == [f"Bearer {cluster.secret('digits-tokens', 'inference')}"]
    del cluster.objects["Secret", "digits-tokens"]
    deploy("invoke", "in.json", code=1)
    assert "digits-tokens with the key inference" in deploy.err
