"""`tsx models adapter` against real servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.cli.models.conftest import TwoVersions
from tests.support.language_models import generation_model, lora_adapter, tiny_llama
from tests.support.servers import serving


def test_a_model_that_generates_no_text_takes_no_adapter(
    two_versions: TwoVersions, run: Run
) -> None:
    with two_versions.serving():
        outcome = run("models", "adapter", "add", "digits:2.0", "formal", "--path", "lora")
        assert outcome.code == 1
        assert "Model digits takes no adapters" in outcome.err
        assert json.loads(run("models", "adapter", "list", "digits:2.0", "--json").out) == {}


@pytest.mark.nightly
def test_an_adapter_is_added_listed_replaced_and_removed(
    tmp_path: Path,
    user_environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
) -> None:
    pytest.importorskip("peft")
    monkeypatch.setenv("TSX_MANAGEMENT_ADDRESS", user_environment["TSX_MANAGEMENT_ADDRESS"])
    llama, store = tiny_llama(tmp_path / "llama"), tmp_path / "store"
    store.mkdir()
    generation_model(store / "chat", llama)
    lora_adapter(llama, store / "lora", 1)
    add = ("models", "adapter", "add", "chat", "formal", "--path", "lora")
    arguments = ["serve", store / "chat", "--model-store", store]
    with serving(arguments, tmp_path, user_environment):
        assert run(*add).out == "Success: LoRA adapter 'formal' added successfully.\n"
        assert run("models", "adapter", "list", "chat").out.split() == [
            *("adapter", "path"),
            *("formal", "lora"),
        ]
        assert "has already been loaded" in run(*add).err
        assert run(*add, "--replace").code == 0
        removed = run("models", "adapter", "remove", "chat", "formal")
        assert removed.out == "Success: LoRA adapter 'formal' removed successfully.\n"
