"""Directories of Hugging Face models: their task, files, adapters and configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tsx_archiver import parse_model_config
from tsx_archiver.errors import CannotPack
from tsx_archiver.metadata.huggingface import (
    TASKS,
    Pretrained,
    check_references,
    external_code,
    extras_of,
    is_huggingface,
    needed_files,
)
from tsx_archiver.metadata.modelconfig import HuggingFaceConfig
from tsx_archiver.pretrained import pretrained_spec

TOKENIZER = {"tokenizer.json": "{}"}


def save_model(directory: Path, config: dict[str, Any], **files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in {
        "config.json": json.dumps(config),
        "model.safetensors": "weights",
        **files,
    }.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def task_of(directory: Path, config: dict[str, Any], task: str | None = None, **files: str) -> str:
    spec, _ = pretrained_spec(save_model(directory, config, **files), source="m", task=task)
    return str(spec.extra_manifest["huggingface"]["task"])


def config_of(architecture: str, **more: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **more}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "task"),
    [
        (config_of("BertForSequenceClassification"), "text-classification"),
        (
            config_of(
                "BartForSequenceClassification", id2label={"0": "contradiction", "1": "ENTAILMENT"}
            ),
            "zero-shot-classification",
        ),
        (config_of("BertForSequenceClassification", id2label={"0": "LABEL_0"}), "text-ranking"),
        (
            config_of("Wav2Vec2ForSequenceClassification", model_type="wav2vec2"),
            "audio-classification",
        ),
        (config_of("BertForTokenClassification"), "token-classification"),
        (config_of("DistilBertForQuestionAnswering"), "question-answering"),
        (config_of("RobertaForMaskedLM"), "fill-mask"),
        (config_of("PegasusForConditionalGeneration", model_type="pegasus"), "summarization"),
        (
            config_of("BartForConditionalGeneration", task_specific_params={"summarization": {}}),
            "summarization",
        ),
        (config_of("MarianMTModel"), "translation"),
        (config_of("M2M100ForConditionalGeneration", model_type="m2m_100"), "translation"),
        (config_of("BertModel"), "feature-extraction"),
        (config_of("ViTForImageClassification"), "image-classification"),
        (config_of("SegformerForSemanticSegmentation"), "image-segmentation"),
        (config_of("DetrForSegmentation"), "image-segmentation"),
        (config_of("DetrForObjectDetection"), "object-detection"),
        (config_of("DPTForDepthEstimation"), "depth-estimation"),
        (
            config_of("CLIPModel", text_config={}, vision_config={}),
            "zero-shot-image-classification",
        ),
        (
            config_of("WhisperForConditionalGeneration", model_type="whisper"),
            "automatic-speech-recognition",
        ),
        (config_of("Wav2Vec2ForCTC"), "automatic-speech-recognition"),
        (config_of("ASTForAudioClassification"), "audio-classification"),
        (config_of("LlamaForCausalLM"), "text-generation"),
        (config_of("GPT2LMHeadModel"), "text-generation"),
        (config_of("LlavaForConditionalGeneration", vision_config={}), "image-text-to-text"),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else value,
)
def test_the_task_is_derived_from_the_architecture(
    tmp_path: Path, config: dict[str, Any], task: str
) -> None:
    assert task_of(tmp_path, config, **TOKENIZER) == task


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (config_of("LlavaForConditionalGeneration", vision_config={}), "chat"),
        (config_of("Qwen2AudioForConditionalGeneration", audio_config={}), None),
    ],
)
def test_models_of_images_and_sounds_can_chat(
    tmp_path: Path, config: dict[str, Any], name: str | None
) -> None:
    files = TOKENIZER | {"chat_template.jinja": "x"}
    assert task_of(tmp_path, config, name, **files) == "text-generation"


def test_every_task_has_a_sample_request(tmp_path: Path) -> None:
    for task in TASKS:
        spec, _ = pretrained_spec(
            save_model(tmp_path, {"model_type": "own"}), source="m", task=task
        )
        (name, content) = next(iter(spec.contents.items()))
        assert name.startswith("samples/example.")
        assert content


def test_the_layout_and_the_model_card_override_the_architecture(tmp_path: Path) -> None:
    def card(tag: str) -> dict[str, str]:
        return {
            "README.md": f"---\nlicense: mit\npipeline_tag: {tag}\n---\npipeline_tag: fill-mask\n"
        }

    nli = config_of("BertForSequenceClassification", id2label={"0": "entailment"})
    layout = {"modules.json": "[]"}
    config_with_task = {"model-config.yaml": "huggingface: {task: feature-extraction}"}
    for number, (config, files, task) in enumerate(
        [
            (config_of("Qwen3ForCausalLM"), layout, "feature-extraction"),
            (nli, card("text-classification"), "text-classification"),
            (config_of("BertForMaskedLM"), card("sentence-similarity"), "feature-extraction"),
            (nli, card("depth-estimation"), "zero-shot-classification"),
            (config_of("LlamaForCausalLM"), config_with_task, "feature-extraction"),
        ]
    ):
        assert task_of(tmp_path / str(number), config, **files) == task


def test_the_error_for_an_unknown_task_lists_the_known_ones(tmp_path: Path) -> None:
    directory = save_model(tmp_path, config_of("T5ForConditionalGeneration", model_type="t5"))
    tasks = "summarization, translation, text2text-generation"
    with pytest.raises(CannotPack, match=rf"T5ForConditionalGeneration.*--task.*{tasks}"):
        pretrained_spec(directory, source="m")
    for config in (
        config_of("ViTModel"),
        config_of("OwlViTForObjectDetection", text_config={}),
        {"model_type": "own"},
    ):
        with pytest.raises(CannotPack, match=r"text-classification, .*text-generation, "):
            pretrained_spec(save_model(tmp_path, config), source="m")


def test_a_given_task_must_fit_the_model(tmp_path: Path) -> None:
    assert (
        task_of(tmp_path, config_of("T5ForConditionalGeneration"), "translation_en_to_de")
        == "translation_en_to_de"
    )
    assert task_of(tmp_path, config_of("BertForSequenceClassification"), "rerank") == "text-ranking"
    with pytest.raises(CannotPack, match=r"does text-classification or .*, not fill-mask"):
        task_of(tmp_path, config_of("BertForSequenceClassification"), "fill-mask")
    with pytest.raises(CannotPack, match=r"'fill-mash' \(did you mean fill-mask\?\)"):
        task_of(tmp_path, config_of("BertForMaskedLM"), "fill-mash")
    with pytest.raises(CannotPack, match="has no chat template, so it cannot chat"):
        task_of(tmp_path, config_of("LlamaForCausalLM"), "chat")
    spec, notes = pretrained_spec(
        save_model(tmp_path, config_of("LlamaForCausalLM"), **{"chat_template.jinja": "x"}),
        source="m",
        task="chat",
    )
    assert spec.handler == "huggingface_generation"
    assert spec.extra_manifest["huggingface"]["chat"] is True
    assert "LlamaForCausalLM, task text-generation with a chat" in notes[0]


def test_only_files_that_serving_needs_are_packed() -> None:
    needed_names = [
        "1_Pooling/config.json",
        "config.json",
        "model.safetensors",
        "modeling_own.py",
        "sub/own.py",
        "tokenizer.json",
        "vocab.txt",
    ]
    unneeded_names = [
        "pytorch_model.bin",
        "tf_model.h5",
        "onnx/model.onnx",
        "onnx/config.json",
        ".git/config.json",
        "training_args.bin",
        "trainer_state.json",
    ]
    unneeded_names += ["checkpoint-5/model.safetensors", "optimizer.pt", "model.fp16.safetensors"]
    assert needed_files([*unneeded_names, *needed_names], (), "m") == needed_names
    assert needed_files(["config.json", "pytorch_model.bin"], (), "m") == [
        "config.json",
        "pytorch_model.bin",
    ]
    with pytest.raises(CannotPack, match=r"m has no weights .*model\.gguf"):
        needed_files(["config.json", "model.gguf"], (), "m")


def test_the_weight_files_are_read_from_the_index(tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}})
    directory = save_model(
        tmp_path,
        config_of("LlamaForCausalLM"),
        **{
            "model.safetensors.index.json": index,
            "part-1.safetensors": "x",
            "pytorch_model.bin": "x",
        },
    )
    (directory / "model.safetensors").unlink()
    model = Pretrained(
        directory,
        ["config.json", "model.safetensors.index.json", "part-1.safetensors", "pytorch_model.bin"],
    )
    with pytest.raises(CannotPack, match=r"index\.json names: part-2\.safetensors"):
        _ = model.needed
    complete = Pretrained(
        directory, [*model.names, "part-2.safetensors", "pytorch_model.bin.index.json"]
    )
    assert complete.needed == [
        "config.json",
        "model.safetensors.index.json",
        "part-1.safetensors",
        "part-2.safetensors",
    ]


def test_pickles_and_code_are_reported_in_notes(tmp_path: Path) -> None:
    directory = save_model(
        tmp_path,
        config_of("LlamaForCausalLM"),
        **{"pytorch_model.bin": "x", "modeling_own.py": "x"},
    )
    (directory / "model.safetensors").unlink()
    _, notes = pretrained_spec(directory, source="m")
    assert [note for note in notes if "pytorch_model.bin is a pickle" in note]
    assert [note for note in notes if re.search("modeling_own.py.*--trust-remote-code", note)]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "../../x.safetensors"}}',
            "does not say which files",
        ),
        (
            "adapters/a/model.safetensors.index.json",
            '{"weight_map": {"a": "/x.safetensors"}}',
            "does not say which files",
        ),
        (
            "processor_config.json",
            '{"audio_tokenizer": {"audio_tokenizer_name_or_path": "/x"}}',
            "names another model",
        ),
    ],
)
def test_weights_outside_the_model_directory_are_refused(
    tmp_path: Path, name: str, text: str, reason: str
) -> None:
    check_references(save_model(tmp_path, config_of("Own")))
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    with pytest.raises(CannotPack, match=reason):
        check_references(tmp_path)


def test_code_in_another_repository_is_detected(tmp_path: Path) -> None:
    directory = save_model(
        tmp_path,
        config_of("Own", auto_map={"AutoModel": "modeling_own.Own"}),
        **{"tokenizer_config.json": "{}"},
    )
    assert external_code(directory) is None
    (directory / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": [null, "org/other--tok.Own"]}}'
    )
    assert external_code(directory) == "org/other--tok.Own of tokenizer_config.json"
    save_model(
        directory, config_of("Own", custom_pipelines={"own": {"impl": "org/third--pipe.Own"}})
    )
    assert external_code(directory) == "org/third--pipe.Own of config.json"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"config.json": '{"model_type": "bert"}'}, True),
        ({"adapter_config.json": "{}"}, True),
        ({"config.json": '{"learning_rate": 1}'}, False),
        ({"config.json": "{}{"}, False),
        ({"config.json": "{}{", "model.safetensors": ""}, True),
        ({"config.json": '{"model_type": "bert"}', "MAR-INF/MANIFEST.json": "{}"}, False),
    ],
)
def test_a_hugging_face_directory_is_recognized_by_its_config(
    tmp_path: Path, files: dict[str, str], expected: bool
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert is_huggingface(tmp_path) is expected


def test_an_adapter_is_checked_and_its_base_model_reported(tmp_path: Path) -> None:
    base, lora = save_model(tmp_path / "base", config_of("LlamaForCausalLM")), tmp_path / "lora"
    lora.mkdir()
    with pytest.raises(CannotPack, match=r"it has no adapter_config\.json"):
        pretrained_spec(base, source="m", adapters={"a": lora})
    (lora / "adapter_config.json").write_text("{}")
    with pytest.raises(CannotPack, match="describes no adapter: it has no peft_type"):
        pretrained_spec(base, source="m", adapters={"a": lora})
    (lora / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "org/base"}'
    )
    with pytest.raises(CannotPack, match="has no weights"):
        pretrained_spec(base, source="m", adapters={"a": lora})
    (lora / "adapter_model.bin").write_text("x")
    with pytest.raises(CannotPack, match="An adapter cannot be called 'a/b'"):
        pretrained_spec(base, source="m", adapters={"a/b": lora})
    with pytest.raises(CannotPack, match=r"\(LORA\) of org/base.*--adapter NAME="):
        pretrained_spec(lora, source="m")
    spec, notes = pretrained_spec(base, source="m", adapters={"a": lora})
    assert "adapter a: LORA of org/base" in notes
    assert (
        spec.files["huggingface_model/adapters/a/adapter_model.bin"] == lora / "adapter_model.bin"
    )
    assert extras_of({"huggingface": spec.extra_manifest["huggingface"]}) == (
        "transformers",
        "peft",
    )
    assert extras_of({"huggingface": {"task": "audio-classification"}}) == ("transformers", "audio")
    assert extras_of({}) == ()


def test_the_huggingface_block_of_the_configuration_is_read() -> None:
    block = {
        "task": "chat",
        "dtype": "bf16",
        "engine": "transformers",
        "maxSequences": 8,
        "cacheMemory": "1GiB",
    }
    config, problems = parse_model_config({"huggingface": block})
    assert config.huggingface == HuggingFaceConfig(
        "text-generation", "bf16", "transformers", 8, 1 << 30
    )
    assert problems == []


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        (3, "mapping of keys"),
        ({"dtpe": "bf16"}, "did you mean huggingface.dtype"),
        ({"dtype": "int4"}, "'auto', 'fp32', 'fp16' or 'bf16'"),
        ({"dtype": []}, "dtype: [] is invalid"),
        ({"task": "generation"}, "did you mean text-generation?"),
        ({"maxSequences": 0}, "maxSequences: 0 is invalid"),
        ({"cacheMemory": "much"}, "cacheMemory: 'much' is invalid"),
        ({"cacheMemory": True}, "cacheMemory: True is invalid"),
    ],
)
def test_an_invalid_huggingface_block_is_refused_with_the_reason(value: Any, fault: str) -> None:
    config, (problem,) = parse_model_config({"huggingface": value})
    assert config.huggingface is None
    assert fault in problem
