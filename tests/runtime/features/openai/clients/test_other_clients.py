"""Clients that are installed for their test: what the first page of their documentation does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.features.openai.clients.conftest import TOKEN
from tests.support import client_environments as environments

PROGRAMS = Path(__file__).parent / "programs"
# The clients' texts have at most so many characters by their schemas.
LENGTH = 12

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("processes")]


def run(base_url: str, *command: str | Path) -> Any:
    """Run a client's program, and return the JSON object that it prints last."""
    variables = {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": TOKEN,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    finished = subprocess.run(
        command,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


def run_python(client: str, base_url: str) -> Any:
    program = PROGRAMS / f"use_{client.replace('-', '_')}.py"
    return run(base_url, environments.python_of(client), program)


def is_short(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LENGTH


def test_instructor(base_url: str) -> None:
    result = run_python("instructor", base_url)
    for user in (result["user"], result["streamed"]):
        assert is_short(user["name"])
        assert is_short(user["pet"]["name"])
        assert 0 <= user["age"] <= 120


def test_pydantic_ai(base_url: str) -> None:
    result = run_python("pydantic-ai", base_url)
    assert result["text"] == result["streamed"]
    assert result["text"]
    assert is_short(result["city"]["city"])
    assert isinstance(result["won"], bool)
    (square,) = result["squares"]
    assert 0 <= square <= 36


def test_litellm(base_url: str) -> None:
    result = run_python("litellm", base_url)
    assert result["text"] == result["streamed"]
    assert result["text"]
    assert is_short(result["city"]["city"])
    name, arguments = result["call"]
    assert name == "get_current_weather"
    assert is_short(arguments["location"])
    assert result["streamed_call"] == arguments
    assert result["streamed_reason"] == "tool_calls"
    assert result["answer"]


def test_llama_index(base_url: str) -> None:
    result = run_python("llama-index", base_url)
    assert result["text"] == result["streamed"]
    assert result["chat"] == result["streamed_chat"]
    assert is_short(result["city"]["name"])
    assert is_short(result["called_city"]["name"])
    ((first, second),) = result["products"]
    assert 0 <= first <= 9999
    assert 0 <= second <= 9999
    assert result["answer"]


def test_openai_agents(base_url: str) -> None:
    result = run_python("openai-agents", base_url)
    expected = ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert result["items"] == result["streamed_items"] == expected
    city, streamed_city = result["cities"]
    assert city == streamed_city
    assert is_short(city)
    assert is_short(result["event"]["name"])


@pytest.fixture
def ai_sdk_program() -> Iterator[Path]:
    """Copy the program to its packages, which Node looks for beside it."""
    program = environments.node_packages() / "use_ai_sdk.mjs"
    shutil.copy(PROGRAMS / program.name, program)
    yield program
    program.unlink()


def test_the_ai_sdk(base_url: str, ai_sdk_program: Path) -> None:
    node = ai_sdk_program.parent / "node_modules" / ".bin" / "node"
    result = run(base_url, node, ai_sdk_program)
    assert result["text"] == result["streamed"]
    assert 0 < result["outputTokens"] <= 24
    recipe = result["recipe"]
    assert is_short(recipe["name"])
    assert all(is_short(ingredient["name"]) for ingredient in recipe["ingredients"])
    assert result["streamedRecipe"] == recipe
    assert result["streamedSteps"] == result["steps"]
    ([_, [weather]], [_, no_results]) = result["steps"]
    assert (weather["temperature"], no_results) == (72, [])
    assert is_short(weather["location"])
