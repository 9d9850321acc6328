"""A benchmark's figures in CloudWatch, as moto's server plays it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.benchmarked import results
from tsx_cli.bench.model.results import Trial
from tsx_cli.bench.storage.cloudwatch import metrics, read_target, upload
from tsx_cli.common.failure import CliError, UsageError


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
        ("AWS_REGION", "eu-central-1"),
        ("AWS_DEFAULT_REGION", "eu-central-1"),
        ("AWS_ACCESS_KEY_ID", "testing"),
        ("AWS_SECRET_ACCESS_KEY", "testing"),
        ("NO_PROXY", "127.0.0.1"),
    ):
        monkeypatch.setenv(name, value)
    import boto3

    yield boto3.client("cloudwatch")
    server.stop()


def test_the_figures_are_there_by_configuration_and_for_the_best(cloud: Any) -> None:
    found = results()
    count = upload(found, "models/bench")
    reported = [page for part in cloud.get_paginator("list_metrics").paginate(Namespace="models/bench") for page in part["Metrics"]]
    assert len(reported) == count == len(metrics(found))
    best = next(each for each in reported if each["MetricName"] == "BestThroughput")
    assert best["Dimensions"] == [{"Name": "Model", "Value": "detector"}]
    dimensions = {each["Name"]: each["Value"] for each in next(m for m in metrics(found) if m["MetricName"] == "LatencyP99")["Dimensions"]}
    assert dimensions == {"Model": "detector", "Device": "cpu", "Workers": "1", "BatchSize": "1", "Precision": "as is"}


def test_a_form_is_a_dimension() -> None:
    found = results()
    found.trials[1].configuration["form"] = "openvino-int8"
    named = [{each["Name"]: each["Value"] for each in metric["Dimensions"]} for metric in metrics(found)]
    assert {each.get("Form") for each in named} == {None, "openvino-int8"}


def test_what_failed_has_no_figures_and_a_server_is_reported_by_its_address() -> None:
    found = results()
    assert {each["MetricName"] for each in metrics(found)} >= {"Throughput", "LatencyP50", "LatencyP99.9", "ErrorRate", "CPU", "Memory"}
    assert not any({"Name": "Workers", "Value": "16"} in each["Dimensions"] for each in metrics(found))
    trial = Trial(configuration={}, points=found.trials[0].points[:1], best=0)
    against = found.model_copy(update={"against": "http://h:8080", "trials": [trial], "winner": None})
    assert metrics(against)[0]["Dimensions"] == [{"Name": "Model", "Value": "detector"}, {"Name": "Server", "Value": "http://h:8080"}]


def test_a_cloud_that_is_not_there_is_reported_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with pytest.raises(CliError, match=r"accepted no figures: You must specify a region\. Check AWS_REGION"):
        upload(results(), "models/bench")


def test_the_target_is_a_namespace() -> None:
    assert read_target("cloudwatch:models/bench") == "models/bench"


@pytest.mark.parametrize(
    "text", ["cloudwatch", "cloudwatch:", "s3:bucket", "cloudwatch::x", "cloudwatch:AWS/EC2", "cloudwatch:" + 256 * "x"]
)
def test_what_is_no_target_is_reported(text: str) -> None:
    with pytest.raises(UsageError, match="--upload"):
        read_target(text)
