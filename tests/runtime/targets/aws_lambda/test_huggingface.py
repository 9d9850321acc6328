"""A Hugging Face text generator as a Lambda function whose answers stream."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.language_models import tiny_llama
from tests.support.platforms.lambda_api import function, function_url
from tsx_archiver import write_archive
from tsx_archiver.pretrained import pretrained_spec


@pytest.mark.usefixtures("processes")
def test_a_text_generator_answers_events_and_streams_to_clients_of_its_url(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    spec, _ = pretrained_spec(tiny_llama(tmp_path / "tiny"), source="tiny")
    write_archive(spec, tmp_path / "model")
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Now"}],
        "max_tokens": 5,
        "temperature": 0,
        "stream": True,
    }
    with function(tmp_path, {"TSX_LAMBDA_ANSWERS": "streamed"}) as host:
        invocation = host.invoke(
            {"inputs": "Now is better", "parameters": {"max_new_tokens": 5, "details": True}}
        ).json()
        assert invocation[0]["details"]["generated_tokens"] == 5
        json_headers = {"content-type": "application/json"}
        prelude, _, body = host.invoke(
            function_url("/v1/chat/completions", json.dumps(chat), headers=json_headers)
        ).answer.partition(b"\0" * 8)
    assert json.loads(prelude)["statusCode"] == 200
    assert body.count(b"data: ") > 3
    assert body.endswith(b"data: [DONE]\n\n")
