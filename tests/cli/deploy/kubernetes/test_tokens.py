"""Tokens of a deployment on Kubernetes: made once, kept, shown nowhere, sent by `invoke`."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from tests.cli.deploy.kubernetes.conftest import IMAGE, Deploy, answering
from tests.support.platforms.kubectl import Cluster

TOKENS = {"TSX_INFERENCE_TOKEN": "inference", "TSX_MANAGEMENT_TOKEN": "management"}


def places(cluster: Cluster) -> dict[str, dict[str, str]]:
    found = cluster.objects["Deployment", "digits"]["spec"]["template"]["spec"]["containers"][0][
        "env"
    ]
    return {
        each["name"]: each["valueFrom"]["secretKeyRef"]
        for each in found
        if "secretKeyRef" in each.get("valueFrom", {})
    }


def test_tokens_are_made_once_and_kept_and_nothing_shows_them(
    deploy: Deploy, cluster: Cluster
) -> None:
    command = ("digits.mar", "--no-check", "--image", IMAGE)
    out = (
        deploy("plan", *command, code=2)
        + deploy("plan", *command, "--json", code=2)
        + deploy.apply()
        + deploy.err
    )
    assert "note: requests must carry the token in the Secret digits-tokens, key inference" in out
    assert places(cluster) == {
        name: {"name": "digits-tokens", "key": key} for name, key in TOKENS.items()
    }
    endpoint = cluster.objects["ServiceMonitor", "digits"]["spec"]["endpoints"][0]
    assert endpoint["authorization"]["credentials"] == {
        "name": "digits-tokens",
        "key": "management",
    }
    made = [cluster.secret("digits-tokens", key) for key in TOKENS.values()]
    assert len({*made}) == 2
    assert min(map(len, made)) > 40
    out += deploy.apply("--set=env.A=b") + deploy.err + deploy("status", "--json")
    assert [cluster.secret("digits-tokens", key) for key in TOKENS.values()] == made
    assert not [
        token for token in made if token in out or base64.b64encode(token.encode()).decode() in out
    ]
    assert json.loads(deploy("status", "--json"))["tokens"] == "in the Secret digits-tokens"
    deploy("destroy", "--yes")
    assert cluster.objects == {}


def test_without_tokens_the_plan_says_so_and_the_secret_is_kept_for_earlier_versions(
    deploy: Deploy, cluster: Cluster
) -> None:
    deploy.apply()
    shown = deploy.apply("--set=kubernetes.tokens=false")
    assert (
        "note: requests need no token (kubernetes.tokens): every pod that reaches digits can use it"
        in shown
    )
    assert places(cluster) == {}
    assert (
        "authorization" not in cluster.objects["ServiceMonitor", "digits"]["spec"]["endpoints"][0]
    )
    assert ("Secret", "digits-tokens") in cluster.objects
    deploy("rollback", "--yes")
    assert places(cluster).keys() == TOKENS.keys()


def test_credentials_that_may_not_read_secrets_plan_as_if_the_tokens_were_there(
    deploy: Deploy, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy.apply()
    get = cluster._get

    def refusing(words: list[str], stdin: str) -> str:
        if words[0] == "secrets":
            raise LookupError(
                'Error from server (Forbidden): secrets is forbidden: User "ci" cannot list resource "secrets"'
            )
        return get(words, stdin)

    monkeypatch.setattr(cluster, "_get", refusing)
    assert "these credentials cannot read the Secret digits-tokens" in deploy(
        "plan", "digits.mar", "--no-check", "--image", IMAGE
    )
    deploy("destroy", "--yes")
    assert set(cluster.objects) == {("Secret", "digits-tokens")}


@pytest.mark.parametrize("words", [(), ("--set=kubernetes.token_secret=theirs",)])
def test_the_secret_of_a_person_is_used_and_left(
    deploy: Deploy, cluster: Cluster, words: tuple[str, ...]
) -> None:
    name = (
        words[0].rpartition("=")[2] if words else "digits-tokens"
    )  # as the next step of emitted files says
    cluster.objects["Secret", name] = {
        "metadata": {"name": name, "labels": {}},
        "data": {"inference": "YQ==", "management": "Yg=="},
    }
    assert "Secret" not in deploy.plan(*words, code=2)
    deploy.apply(*words)
    assert {place["name"] for place in places(cluster).values()} == {name}
    deploy("destroy", "--yes")
    assert set(cluster.objects) == {("Secret", name)}


def test_a_secret_that_has_lost_a_key_is_reported(deploy: Deploy, cluster: Cluster) -> None:
    deploy.apply()
    del cluster.objects["Secret", "digits-tokens"]["data"]["management"]
    deploy.apply(code=1)
    assert "the Secret digits-tokens has no management; add it, or delete the Secret" in deploy.err


def test_tokens_that_are_given_another_way_are_not_given_twice(
    deploy: Deploy, cluster: Cluster
) -> None:
    deploy.apply(
        "--set=env.TSX_INFERENCE_TOKEN=a",
        "--set=kubernetes.secrets.TSX_MANAGEMENT_TOKEN=ours/admin",
    )
    assert places(cluster) == {"TSX_MANAGEMENT_TOKEN": {"name": "ours", "key": "admin"}}
    assert ("Secret", "digits-tokens") not in cluster.objects
    credentials = cluster.objects["ServiceMonitor", "digits"]["spec"]["endpoints"][0][
        "authorization"
    ]["credentials"]
    assert credentials == {"name": "ours", "key": "admin"}


def test_kserve_has_no_tokens_and_the_plan_says_so(deploy: Deploy, cluster: Cluster) -> None:
    words = ("--set=kubernetes.kserve=true", "--set=kubernetes.storage=s3://models/digits")
    shown = deploy("plan", "digits.mar", "--no-check", "--image", IMAGE, *words, code=2)
    assert "requests need no token, because KServe's clients send none" in shown


@pytest.fixture
def pod(cluster: Cluster) -> Iterator[list[Any]]:
    """What requests to the forwarded port carry as their token."""
    carried: list[Any] = []

    def answer(request: BaseHTTPRequestHandler) -> tuple[int, bytes]:
        carried.append(request.headers["Authorization"])
        request.rfile.read(int(request.headers["Content-Length"]))
        return 200, b"7"

    with answering(cluster, answer):
        yield carried


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
    assert (
        "has no Secret digits-tokens with the key inference, which TSX_INFERENCE_TOKEN is read from"
        in deploy.err
    )
