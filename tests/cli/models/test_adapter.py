"""`tsx models adapter` against real servers."""

from __future__ import annotations

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
        assert "must name a model that generates text; it is 'digits:2.0'" in outcome.err


@pytest.mark.nightly
def test_an_adapter_is_added_described_replaced_and_removed(
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
        assert ["addedAdapters", "formal", "lora"] in [
            line.split() for line in run("models", "describe", "chat").out.splitlines()
        ]
        assert "has already been loaded" in run(*add).err
        assert run(*add, "--replace").code == 0
        removed = run("models", "adapter", "remove", "chat", "formal")
        assert removed.out == "Success: LoRA adapter 'formal' removed successfully.\n"
