"""Tiny seeded models and tokenizers in directories written by `save_pretrained`."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

WORDS = [
    "the file is read",
    "a value of the list",
    "Return the name",
    "an error was raised",
    "this is the class",
]
BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
LABELS = {
    "id2label": {0: "bad", 1: "neutral", 2: "good"},
    "label2id": {"bad": 0, "neutral": 1, "good": 2},
}


def model(kind: str, root: Path) -> Path:
    """Return the directory of a model (one of `KINDS`), made once for all processes of `root`."""
    directory = root / f"hf-{kind}"
    with FileLock(root / f"hf-{kind}.lock"):
        if not (directory / "done").exists():
            import torch

            with torch.random.fork_rng():
                torch.manual_seed(7)
                KINDS[kind](directory)
            (directory / "done").touch()
    return directory


def corpus() -> list[str]:
    import argparse
    import inspect

    return inspect.getsource(argparse).splitlines()


def wordpiece() -> Any:
    from tokenizers import (
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.train_from_iterator(
        corpus(),
        trainers.WordPieceTrainer(vocab_size=600, special_tokens=BERT_SPECIAL, show_progress=False),
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    special = dict(
        zip(
            ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"),
            BERT_SPECIAL,
            strict=True,
        )
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=128, model_input_names=names, **special
    )


def byte_pairs(special: list[str], **names: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token=special[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    )
    tokenizer.decoder = decoders.ByteLevel()
    if "eos_token" in names:
        end = names["eos_token"]
        template = f"$A {end}", f"$A {end} $B {end}"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template[0], pair=template[1], special_tokens=[(end, special.index(end))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **names)


def _bert(head: str, **options: Any) -> Callable[[Path], None]:
    def build(directory: Path) -> None:
        import transformers

        tokenizer = wordpiece()
        config = transformers.BertConfig(
            vocab_size=len(tokenizer),
            max_position_embeddings=128,
            initializer_range=0.5,
            **SIZES,
            **options,
        )
        getattr(transformers, head)(config).save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    return build


def _sentences(directory: Path) -> None:
    _bert("BertModel")(directory)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    vocabulary_lines = [
        {"name": kind, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for kind, path in modules
    ]
    (directory / "modules.json").write_text(json.dumps(vocabulary_lines))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True})
    )
    (directory / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 32, "do_lower_case": False})
    )
    (directory / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "the name: "}, "default_prompt_name": None})
    )


def _roberta(directory: Path) -> None:
    import transformers

    special = {
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    }
    tokenizer = byte_pairs(["<s>", *special.values()], **special)
    config = transformers.RobertaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=66,
        pad_token_id=1,
        initializer_range=0.5,
        **SIZES,
        **LABELS,
    )
    transformers.RobertaForSequenceClassification(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _t5(directory: Path) -> None:
    import transformers

    tokenizer = byte_pairs(
        ["<pad>", "</s>", "<unk>"], pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    config = transformers.T5Config(
        vocab_size=len(tokenizer),
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        initializer_factor=2.0,
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _vision(
    config: str, head: str, processor: str, size: dict[str, Any], **options: Any
) -> Callable[[Path], None]:
    def build(directory: Path) -> None:
        import transformers

        getattr(transformers, head)(getattr(transformers, config)(**options)).save_pretrained(
            directory
        )
        getattr(transformers, processor)(**size).save_pretrained(directory)

    return build


def _detr(directory: Path) -> None:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_queries=5,
        init_xavier_std=3.0,
        **LABELS,
    )
    transformers.DetrForObjectDetection(config).save_pretrained(directory)
    transformers.DetrImageProcessorPil(
        size={"shortest_edge": 48, "longest_edge": 96}
    ).save_pretrained(directory)


def _clip(directory: Path) -> None:
    import transformers

    tokenizer = byte_pairs(
        ["<unk>", "<pad>", "</s>"], pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    text = {
        **SIZES,
        "vocab_size": len(tokenizer),
        "eos_token_id": 2,
        "pad_token_id": 1,
        "bos_token_id": 0,
    }
    vision = {**SIZES, "image_size": 32, "patch_size": 16}
    config = transformers.CLIPConfig(
        text_config=text, vision_config=vision, projection_dim=16, initializer_factor=20.0
    )
    transformers.CLIPModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    ).save_pretrained(directory)


def _wav2vec2(head: str, **options: Any) -> Callable[[Path], None]:
    def build(directory: Path) -> None:
        import transformers

        letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"etaoinshrdlu"]
        directory.mkdir(exist_ok=True)
        (directory / "vocab.json").write_text(
            json.dumps({letter: number for number, letter in enumerate(letters)})
        )
        config = transformers.Wav2Vec2Config(
            vocab_size=len(letters),
            conv_dim=(16, 16),
            conv_stride=(10, 8),
            conv_kernel=(20, 8),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
            feat_extract_norm="layer",
            initializer_range=0.5,
            **SIZES,
            **options,
        )
        getattr(transformers, head)(config).save_pretrained(directory)
        transformers.Wav2Vec2CTCTokenizer(str(directory / "vocab.json")).save_pretrained(directory)
        transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(directory)

    return build


def _whisper(directory: Path) -> None:
    import transformers

    base = byte_pairs(["<|endoftext|>"])
    state = json.loads(base.backend_tokenizer.to_str())["model"]
    vocab, merges = state["vocab"], [tuple(pair) for pair in state["merges"]]
    tokenizer = transformers.WhisperTokenizer(
        vocab=vocab, merges=merges, unk_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    special = [
        "<|startoftranscript|>",
        "<|en|>",
        "<|de|>",
        "<|translate|>",
        "<|transcribe|>",
        "<|notimestamps|>",
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens([f"<|{number * 0.02:.2f}|>" for number in range(1501)])
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in special}
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=8,
        max_target_positions=64,
        init_std=0.5,
        decoder_start_token_id=ids["<|startoftranscript|>"],
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    speech = transformers.WhisperForConditionalGeneration(config)
    speech.generation_config = transformers.GenerationConfig(
        lang_to_id={"<|en|>": ids["<|en|>"], "<|de|>": ids["<|de|>"]},
        task_to_id={"translate": ids["<|translate|>"], "transcribe": ids["<|transcribe|>"]},
        no_timestamps_token_id=ids["<|notimestamps|>"],
        is_multilingual=True,
        max_length=24,
        decoder_start_token_id=ids["<|startoftranscript|>"],
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
    )
    speech.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    transformers.WhisperFeatureExtractor(feature_size=8).save_pretrained(directory)


def _llava(directory: Path) -> None:
    import transformers

    special = ["<unk>", "<s>", "</s>", "<pad>", "<image>"]
    tokenizer = byte_pairs(special, unk_token="<unk>", pad_token="<pad>", bos_token="<s>")
    tokenizer.eos_token, tokenizer.padding_side = "</s>", "left"
    ids = {"eos_token_id": 2, "pad_token_id": 3, "max_position_embeddings": 256}
    text = transformers.LlamaConfig(
        vocab_size=len(tokenizer), initializer_range=0.5, **ids, **SIZES
    )
    vision = transformers.CLIPVisionConfig(image_size=32, patch_size=16, **SIZES)
    images = {
        "image_token_index": 4,
        "image_seq_length": 4,
        "vision_feature_select_strategy": "default",
    }
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, **images)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(directory)
    transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        ),
        tokenizer=tokenizer,
        patch_size=16,
        vision_feature_select_strategy="default",
        image_token="<image>",
        num_additional_image_tokens=1,
        chat_template=(
            "{% for message in messages %}{{ message.role }}: {% for part in message.content %}"
            "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}assistant:"
        ),
    ).save_pretrained(directory)


SEGFORMER = {
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "decoder_hidden_size": 16,
    "num_attention_heads": [1, 1, 2, 2],
}
NLI = {
    "id2label": {0: "contradiction", 1: "neutral", 2: "entailment"},
    "label2id": {"contradiction": 0, "neutral": 1, "entailment": 2},
}
ENTITIES = {
    "id2label": {0: "O", 1: "B-X", 2: "I-X", 3: "B-Y"},
    "label2id": {"O": 0, "B-X": 1, "I-X": 2, "B-Y": 3},
}
KINDS: dict[str, Callable[[Path], None]] = {
    "bert": _bert("BertModel"),
    "bert-answers": _bert("BertForQuestionAnswering"),
    "bert-classification": _bert("BertForSequenceClassification", **LABELS),
    "bert-masked": _bert("BertForMaskedLM"),
    "bert-nli": _bert("BertForSequenceClassification", **NLI),
    "bert-ranking": _bert("BertForSequenceClassification", num_labels=1),
    "bert-tokens": _bert("BertForTokenClassification", **ENTITIES),
    "clip": _clip,
    "detr": _detr,
    "glpn": _vision(
        "GLPNConfig",
        "GLPNForDepthEstimation",
        "GLPNImageProcessorPil",
        {},
        hidden_sizes=[8, 8, 20, 16],
        depths=[1] * 4,
        decoder_hidden_size=16,
    ),
    "llava": _llava,
    "roberta-classification": _roberta,
    "segformer": _vision(
        "SegformerConfig",
        "SegformerForSemanticSegmentation",
        "SegformerImageProcessorPil",
        {"size": {"height": 64, "width": 64}},
        **SEGFORMER,
        **LABELS,
    ),
    "sentences": _sentences,
    "t5": _t5,
    "vit": _vision(
        "ViTConfig",
        "ViTForImageClassification",
        "ViTImageProcessorPil",
        {"size": {"height": 32, "width": 32}},
        image_size=32,
        patch_size=16,
        initializer_range=0.5,
        **SIZES,
        **LABELS,
    ),
    "wav2vec2-classification": _wav2vec2(
        "Wav2Vec2ForSequenceClassification", classifier_proj_size=16, **LABELS
    ),
    "wav2vec2-speech": _wav2vec2("Wav2Vec2ForCTC"),
    "whisper": _whisper,
}


def adapter(base: Path, name: str, seed: int) -> None:
    """Make a LoRA adapter of a classifier in `adapters/NAME` of the model's directory."""
    import torch
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import AutoModelForSequenceClassification

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        plain = AutoModelForSequenceClassification.from_pretrained(base)
        config = LoraConfig(
            task_type=TaskType.SEQ_CLS,
            r=4,
            target_modules=["query", "value"],
            init_lora_weights=False,
        )
        get_peft_model(plain, config).save_pretrained(base / "adapters" / name)


def image(width: int = 40, height: int = 30, seed: int = 0) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(
        0, 255, (height // 5 + 1, width // 5 + 1, 3), dtype=np.uint8
    )
    Image.fromarray(pixels.repeat(5, 0).repeat(5, 1)[:height, :width]).save(file, "PNG")
    return file.getvalue()


def sound(seconds: float = 0.5, pitch: float = 440.0, rate: int = 16000) -> bytes:
    """Return a WAV file."""
    times = np.arange(int(seconds * rate)) / rate
    samples = 0.4 * np.sin(2 * np.pi * pitch * times) + 0.1 * np.sin(
        2 * np.pi * 3 * pitch * times**1.2
    )
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, rate, 0, "NONE", ""))
        writer.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()
