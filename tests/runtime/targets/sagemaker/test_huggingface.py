"""A text generator of Hugging Face on SageMaker: its archive as `tsx deploy` uploads it, asked by
boto3's own client.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.language_models import tiny_llama
from tests.support.platforms.sagemaker_host import container, unpack
from tests.support.platforms.sagemaker_runtime import runtime
from tests.support.servers import FreePorts
from tsx_archiver import write_archive
from tsx_archiver.pretrained import pretrained_spec


@pytest.mark.usefixtures("processes")
def test_a_text_generator_answers_whole_and_token_by_token(
    tmp_path: Path, free_ports: FreePorts
) -> None:
    spec, _ = pretrained_spec(tiny_llama(tmp_path / "tiny"), source="tiny")
    unpack(write_archive(spec, tmp_path), tmp_path)
    request = {"inputs": "Now is better", "parameters": {"max_new_tokens": 5, "do_sample": False}}
    given = {"EndpointName": "e", "ContentType": "application/json"}
    (port,) = free_ports(1)
    with container(tmp_path, port, {}) as host:
        host.wait_until_healthy()
        with runtime(host) as client:
            (whole,) = json.loads(
                client.invoke_endpoint(**given, Body=json.dumps(request))["Body"].read()
            )
            parts = client.invoke_endpoint_with_response_stream(
                **given, Body=json.dumps(request | {"stream": True})
            )["Body"]
            streamed = b"".join(part["PayloadPart"]["Bytes"] for part in parts)
        assert host.stop() == 0
    events = [
        json.loads(line.removeprefix(b"data:"))
        for line in streamed.splitlines()
        if line.startswith(b"data:")
    ]
    assert (
        "".join(event["token"]["text"] for event in events)
        == events[-1]["generated_text"]
        == whole["generated_text"]
    )
    assert events[-1]["details"]["generated_tokens"] == 5
