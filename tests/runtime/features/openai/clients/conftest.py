"""A server with a tiny language model of random weights, whose chat template shows tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.language_models import generation_model, tiny_llama

TOKEN = "sesame"
# The form of Hermes and Qwen.
TOOL_TEMPLATE = (
    "{% if tools %}<|system|>Call one of {{ tools | tojson }} as <tool_call>"
    '{"name": NAME, "arguments": ARGUMENTS}</tool_call><|end|>{% endif %}'
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}"
    "</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def base_url(
    store: Path, start_server: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Serve the model `tiny`, and return the address for OpenAI's clients."""
    weights = tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)
    (weights / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    generation_model(store / "tiny", weights, config="minWorkers: 1\nmaxWorkers: 1\n")
    with start_server(inference_token=TOKEN) as server:
        server.register("tiny", initial_workers=1)
        yield f"{server.addresses['inference']}/v1"
