"""Calls of `torchserve` by its container image, SageMaker's toolkit and KServe."""

from __future__ import annotations

import json
import shlex
from urllib.error import HTTPError

import pytest

from tests.support.models import make_model
from tests.support.torchserve import TorchServe
from tsx_cli.serve.torchserve import READY

ECHO = "def handle(data, context):\n    return [bytes(next(iter(row.values()))) for row in data or []]\n"


def on_all_addresses(address: str) -> str:
    """Return the same port on all addresses of this machine, as in containers."""
    return address.replace("127.0.0.1", "0.0.0.0")


def test_the_entry_point_of_torchserves_image_starts_a_server(torchserve: TorchServe) -> None:
    make_model(torchserve.directory / "store" / "echo.mar", ECHO)
    lines = [
        f"{role}_address={on_all_addresses(getattr(torchserve, role))}"
        for role in ("inference", "management", "metrics")
    ]
    lines += [
        "number_of_netty_threads=32",
        "job_queue_size=1000",
        f"model_store={torchserve.directory}/store",
        "enable_grpc=false",
    ]
    lines += [f"workflow_store={torchserve.directory}/wf-store"]
    (torchserve.directory / "config.properties").write_text("\n".join(lines) + "\n")
    code, output = torchserve.start(
        "--start",
        "--ts-config",
        f"{torchserve.directory}/config.properties",
        "--disable-token-auth",
    )
    assert (code, output[-1]) == (0, READY), torchserve.stderr
    assert json.loads(torchserve.request("GET", f"{torchserve.inference}/ping")) == {
        "status": "Healthy"
    }
    with pytest.raises(HTTPError, match="405"):
        torchserve.request("POST", f"{torchserve.management}/models?url=echo.mar")


LOG4J = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration>
    <Appenders><Console name="STDOUT" target="SYSTEM_OUT"><PatternLayout pattern="%d{ISO8601} - %m%n"/></Console></Appenders>
    <Loggers><Root level="info"><AppenderRef ref="STDOUT"/></Root></Loggers>
</Configuration>
"""


def test_the_call_of_sagemakers_toolkit_serves_the_model(torchserve: TorchServe) -> None:
    model = make_model(torchserve.directory / "opt" / "ml" / "model", ECHO)
    models_setting = {
        "model": {
            "1.0": {
                "defaultVersion": True,
                "marName": "model.mar",
                "minWorkers": 1,
                "maxWorkers": 2,
                "batchSize": 8,
            }
        }
    }
    lines = [
        f"{role}_address={on_all_addresses(torchserve.inference)}"
        for role in ("inference", "management")
    ]
    lines += [
        "enable_envvars_config=true",
        "decode_input_request=false",
        "load_models=ALL",
        "enable_metrics_api=false",
        "enable_grpc=false",
    ]
    lines += [
        "disable_token_authorization=true",
        "enable_model_api=truedefault_response_timeout=60",
        f"models={json.dumps(models_setting)}",
    ]
    lines += ["default_service_handler=sagemaker_pytorch_serving_container.handler_service:handle"]
    (torchserve.directory / "sagemaker-ts.properties").write_text("\n".join(lines) + "\n")
    (torchserve.directory / "log4j2.xml").write_text(LOG4J)
    torchserve.environment["TS_JOB_QUEUE_SIZE"] = "7"
    options = shlex.split(
        "--start --model-store store --ts-config sagemaker-ts.properties --log-config log4j2.xml"
    )
    code, output = torchserve.start(*options, "--models", f"model={model}")
    assert (code, output[-1]) == (0, READY), torchserve.stderr
    assert (
        torchserve.request("POST", f"{torchserve.inference}/invocations", b'{"a": 1}')
        == b'{"a": 1}'
    )
    description = json.loads(torchserve.request("GET", f"{torchserve.inference}/models/model"))[0]
    assert (
        description["modelUrl"],
        description["batchSize"],
        description["minWorkers"],
        description["maxWorkers"],
    ) == (str(model), 8, 1, 2)
    assert description["jobQueueStatus"]["remainingCapacity"] == 7


def test_the_configuration_of_kserve_serves_the_models_of_its_snapshot(
    torchserve: TorchServe,
) -> None:
    make_model(torchserve.directory / "store" / "mnist.mar", ECHO)
    make_model(torchserve.directory / "store" / "other.mar", ECHO)
    version = {
        "defaultVersion": True,
        "marName": "mnist.mar",
        "minWorkers": 1,
        "maxWorkers": 5,
        "batchSize": 1,
        "maxBatchDelay": 10,
    }
    snapshot = {"name": "startup.cfg", "modelCount": 1, "models": {"mnist": {"1.0": version}}}
    lines = [
        f"{role}_address={on_all_addresses(torchserve.inference)}"
        for role in ("inference", "management")
    ]
    lines += [
        f"metrics_address={torchserve.metrics}",
        "metrics_mode=prometheus",
        "load_models=all",
        "enable_grpc=false",
    ]
    lines += [
        "disable_token_authorization=true",
        "enable_envvars_config=true",
        f"model_snapshot={json.dumps(snapshot)}",
    ]
    (torchserve.directory / "kserve.properties").write_text("\n".join(lines) + "\n")
    code, output = torchserve.start(
        "--start", "--model-store=store", "--ts-config=kserve.properties"
    )
    assert (code, output[-1]) == (0, READY), torchserve.stderr
    assert [
        model["modelName"]
        for model in json.loads(torchserve.request("GET", f"{torchserve.inference}/models"))[
            "models"
        ]
    ] == ["mnist"]
    description = json.loads(torchserve.request("GET", f"{torchserve.inference}/models/mnist"))[0]
    assert (description["minWorkers"], description["maxWorkers"], description["maxBatchDelay"]) == (
        1,
        5,
        10,
    )
    assert (
        torchserve.request("POST", f"{torchserve.inference}/v1/models/mnist:predict", b"hello")
        == b"hello"
    )
