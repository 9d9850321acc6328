"""Tiny seeded models that read images or sounds, written by `save_pretrained`."""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.language_models import bpe_tokenizer

CONTEXT = 512  # tokens
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}PLACEHOLDER{% endif %}"
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
}
DECODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}


def png(color: Any = "red", size: tuple[int, int] = (40, 30)) -> bytes:
    """Return an image with a gradient, which differs by its color."""
    from PIL import Image

    file = io.BytesIO()
    image = Image.linear_gradient("L").resize(size).convert("RGB")
    Image.blend(image, Image.new("RGB", size, color), 0.5).save(file, "PNG")
    return file.getvalue()


def wav(frequency: float = 440.0, seconds: float = 0.5) -> bytes:
    """Return a sound of one tone."""
    import numpy as np
    import soundfile

    file, rate = io.BytesIO(), 16_000
    times = np.arange(int(seconds * rate)) / rate
    soundfile.write(file, np.sin(2 * np.pi * frequency * times), rate, format="WAV")
    return file.getvalue()


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def image_part(content: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(content), "detail": "auto"}}


def sound_part(content: bytes) -> dict[str, Any]:
    data = base64.b64encode(content).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def tokenizer_with(*tokens: str) -> tuple[Any, list[int]]:
    """Return a tokenizer with further special tokens, and their ids."""
    tokenizer = copy.deepcopy(bpe_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.model_max_length = CONTEXT
    return tokenizer, [tokenizer.convert_tokens_to_ids(token) for token in tokens]


def _decoder(tokenizer: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**(DECODER | {"vocab_size": len(tokenizer)}))


def _llava() -> tuple[Any, Any]:
    import transformers as tf

    tokenizer, (image,) = tokenizer_with("<image>")
    vision = tf.CLIPVisionConfig(image_size=28, patch_size=14, projection_dim=32, **ENCODER)
    config = tf.LlavaConfig(
        vision_config=vision, text_config=_decoder(tokenizer), image_token_id=image
    )
    processor = tf.LlavaProcessor(
        tf.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("PLACEHOLDER", "<image>"),
    )
    return tf.LlavaForConditionalGeneration(config), processor


def _idefics3() -> tuple[Any, Any]:
    import transformers as tf

    tokenizer, (image, *_) = tokenizer_with(
        "<image>", "<fake_token_around_image>", "<end_of_utterance>"
    )
    config = tf.Idefics3Config(
        vision_config={"image_size": 28, "patch_size": 7, **ENCODER},
        text_config=_decoder(tokenizer),
        image_token_id=image,
        scale_factor=2,
        pad_token_id=1,
        tie_word_embeddings=False,
    )
    edge = {"longest_edge": 28}
    processor = tf.Idefics3Processor(
        tf.Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size=edge),
        tokenizer,
        image_seq_len=4,
        chat_template=TEMPLATE.replace("PLACEHOLDER", "<image>"),
    )
    return tf.Idefics3ForConditionalGeneration(config), processor


def _qwen2_audio() -> tuple[Any, Any]:
    import transformers as tf

    tokenizer, (audio, *_) = tokenizer_with("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    encoder = {
        "num_mel_bins": 16,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "d_model": 32,
        "max_source_positions": 100,
        "initializer_range": 0.2,
    }
    config = tf.Qwen2AudioConfig(
        audio_config=encoder, text_config=_decoder(tokenizer).to_dict(), audio_token_id=audio
    )
    processor = tf.Qwen2AudioProcessor(
        tf.WhisperFeatureExtractor(feature_size=16, chunk_length=2),
        tokenizer,
        chat_template=TEMPLATE.replace("PLACEHOLDER", "<|audio_bos|><|AUDIO|><|audio_eos|>"),
    )
    return tf.Qwen2AudioForConditionalGeneration(config), processor


def _gemma3() -> tuple[Any, Any]:
    import transformers as tf

    tokenizer, (image, start, end) = tokenizer_with("<image>", "<start_of_image>", "<end_of_image>")
    tokenizer._set_model_specific_special_tokens(
        {
            "image_token": "<image>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        }
    )
    text = DECODER | {"vocab_size": len(tokenizer), "head_dim": 16, "sliding_window": 64}
    config = tf.Gemma3Config(
        text_config=text,
        vision_config={"image_size": 28, "patch_size": 7, **ENCODER},
        mm_tokens_per_image=4,
        image_token_index=image,
        boi_token_index=start,
        eoi_token_index=end,
    )
    processor = tf.Gemma3Processor(
        tf.Gemma3ImageProcessorPil(size={"height": 28, "width": 28}),
        tokenizer,
        image_seq_length=4,
        chat_template=TEMPLATE.replace("PLACEHOLDER", "<start_of_image>"),
    )
    return tf.Gemma3ForConditionalGeneration(config), processor


def qwen2_vl() -> Any:
    """Return a model whose tokens have positions of three dimensions."""
    import transformers as tf

    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    tokenizer, (image, video, start, end) = tokenizer_with(*names)
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    config = tf.Qwen2VLConfig(
        text_config=DECODER | {"vocab_size": len(tokenizer), "rope_parameters": rope},
        vision_config={"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    return tf.Qwen2VLForConditionalGeneration(config)


MODELS: Mapping[str, Callable[[], tuple[Any, Any]]] = {
    "llava": _llava,
    "idefics3": _idefics3,
    "qwen2_audio": _qwen2_audio,
    "gemma3": _gemma3,
}


def tiny_model(directory: Path, kind: str) -> Path:
    """Save a model of `MODELS` with its processor."""
    import torch

    torch.manual_seed(0)
    model, processor = MODELS[kind]()
    model.eval().save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory
