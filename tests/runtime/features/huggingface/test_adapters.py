"""PEFT adapters of one model, which requests choose and batches mix."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.runtime.features.huggingface.conftest import (
    Served,
    assert_near,
    mixed_texts,
    start,
)
from tests.support import huggingface_models
from tsx_runtime.worker.exceptions import LoadError

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def adapted(model_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory = tmp_path_factory.mktemp("adapted")
    base = directory / "base"
    shutil.copytree(huggingface_models.model("bert-classification", model_root), base)
    for seed, name in enumerate(("news", "films")):
        huggingface_models.adapter(base, name, seed)
    return start(base, "text-classification", directory, adapters=("news", "films"))


def test_answers_equal_those_of_peft_in_any_batch(adapted: Served) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    cases = [
        (text, ("news", "films", None)[number % 3]) for number, text in enumerate(mixed_texts(12))
    ]
    answers = adapted.values(
        *[{"inputs": text, "parameters": {"adapter": name} if name else {}} for text, name in cases]
    )
    tokenizer = AutoTokenizer.from_pretrained(adapted.directory)
    for adapter in ("news", "films", None):
        base_model = AutoModelForSequenceClassification.from_pretrained(adapted.directory)
        model = (
            PeftModel.from_pretrained(base_model, adapted.directory / "adapters" / adapter).eval()
            if adapter
            else base_model
        )
        for (text, name), answer in zip(cases, answers, strict=True):
            if name == adapter:
                with torch.inference_mode():
                    expected = (
                        model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1).tolist()
                    )
                assert_near(sorted(expected), sorted(entry["score"] for entry in answer[0]))
    first = {entry["label"]: entry["score"] for entry in answers[0][0]}
    base_scores = {
        entry["label"]: entry["score"] for entry in adapted.values({"inputs": cases[0][0]})[0][0]
    }
    assert first != pytest.approx(base_scores, abs=1e-3)


def test_an_unknown_adapter_fails_only_its_request(adapted: Served) -> None:
    bad_answer, good_answer = adapted.ask(
        {"inputs": "x", "parameters": {"adapter": "sports"}},
        {"inputs": "x", "parameters": {"adapter": "films"}},
    )
    assert (bad_answer.status, good_answer.status) == (400, 200)
    assert "no adapter 'sports'; it has news, films" in bad_answer.message


def test_an_adapter_may_have_any_valid_archive_name(adapted: Served, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(adapted.directory, base)
    (base / "adapters" / "news").rename(base / "adapters" / "v1.2")
    (base / "adapters" / "films").rename(base / "adapters" / "keys")
    renamed = start(base, "text-classification", tmp_path, adapters=("v1.2", "keys"))
    for new, old in (("v1.2", "news"), ("keys", "films")):
        bodies = [{"inputs": "the file", "parameters": {"adapter": name}} for name in (new, old)]
        assert_near(adapted.values(bodies[1]), renamed.values(bodies[0]))


@pytest.mark.parametrize(("setting", "value"), [("bias", "all"), ("init_lora_weights", "pissa")])
def test_an_adapter_that_changes_the_shared_model_is_refused(
    adapted: Served, tmp_path: Path, setting: str, value: str
) -> None:
    base = tmp_path / "base"
    shutil.copytree(adapted.directory, base)
    config = base / "adapters" / "news" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {setting: value}))
    with pytest.raises(LoadError, match=f"news was trained with {setting}={value}"):
        start(base, "text-classification", tmp_path, adapters=("news",))


def test_adapters_share_the_memory_of_the_model(adapted: Served) -> None:
    loaded_model = adapted.handler.loaded
    shared = set(map(id, loaded_model.model.parameters()))
    for model in loaded_model.adapters.values():
        unshared = {name for name, value in model.named_parameters() if id(value) not in shared}
        lora = {name for name in unshared if "lora_" in name}
        # The two layers have two adapted projections (query and value), with two matrices each.
        assert len(lora) == 2 * 2 * 2
        # The classifier was trained completely, so it is not shared.
        assert all("modules_to_save" in name for name in unshared - lora)


def test_the_error_names_a_missing_adapter(model_root: Path, tmp_path: Path) -> None:
    directory = huggingface_models.model("bert-classification", model_root)
    with pytest.raises(LoadError, match="The adapter lost does not fit"):
        start(directory, "text-classification", tmp_path, adapters=("lost",))
