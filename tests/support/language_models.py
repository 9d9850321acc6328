"""Tiny language models written by `save_pretrained`: a seeded one, and one that knows a text."""

from __future__ import annotations

import codecs
import json
import shutil
import textwrap
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from tsx_archiver.metadata.huggingface import (
    ADAPTERS,
    DIRECTORY,
    GENERATION,
    GENERATION_HANDLER,
    MANIFEST_KEY,
)

CONTEXT = 256  # tokens
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('there is no role ' + message['role']) }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]


def zen() -> str:
    """Return the text of Python's module `this`, whose import would print it."""
    source = Path(codecs.__file__).with_name("this.py").read_text()
    return codecs.decode(source.split('"""')[1], "rot13")


@cache
def bpe_tokenizer() -> Any:
    """Train a byte-level BPE tokenizer on text that comes with Python."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([zen(), Path(textwrap.__file__).read_text()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
    )


@cache
def byte_fallback_tokenizer() -> Any:
    """Make a tokenizer as SentencePiece's: words begin with "▁", unknown characters are bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    entries = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcé", "▁a", "▁ab"]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    merges = [("▁", "a"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )


def tiny_llama(directory: Path, **config: Any) -> Path:
    """Save a seeded Llama, with 100,000 parameters unless `config` changes its sizes."""
    tokenizer = bpe_tokenizer()
    model = llama(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, **config)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def llama(
    vocabulary: int, end: int, pad: int, seed: int = 0, dtype: str = "float32", **config: Any
) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    tokens = {
        "vocab_size": vocabulary,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
    }
    return (
        LlamaForCausalLM(LlamaConfig(**(sizes | tokens | config))).to(getattr(torch, dtype)).eval()
    )


def lora_adapter(base: Path, directory: Path, seed: int) -> Path:
    """Save an adapter with seeded weights, large enough to change the model's text."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=4),
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.5)
    model.save_pretrained(directory)
    return directory


def character_model(directory: Path, text: str) -> Path:
    """Save a model of characters that greedily continues the beginning of `text` up to its end.

    Its training takes seconds.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *sorted(set(text))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|pad|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=CHAT_TEMPLATE,
    )
    ids = [*fast(text)["input_ids"], vocabulary["<|end|>"]]
    model = llama(
        len(vocabulary),
        vocabulary["<|end|>"],
        vocabulary["<|pad|>"],
        initializer_range=0.02,
        tie_word_embeddings=False,
    )
    model.train()
    threads = torch.get_num_threads()
    # A second thread would only wait, since the matrices are small.
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    generator = torch.Generator().manual_seed(0)
    ahead = torch.tensor(ids + [vocabulary["<|pad|>"]] * len(ids))
    for _ in range(110):
        starts = [0, *torch.randint(len(ids) - 8, (7,), generator=generator).tolist()]
        batch = torch.stack([ahead[start : start + len(ids)] for start in starts])
        scores = model(input_ids=batch[:, :-1]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(
            scores, batch[:, 1:].flatten(), ignore_index=vocabulary["<|pad|>"]
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        optimizer.step()
    torch.set_num_threads(threads)
    model.eval().save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory


def scripted_model(
    directory: Path,
    answer: str,
    chat_template: str,
    markers: Mapping[str, bool],
    start: str = "<|assistant|>",
) -> Path:
    """Save a model that answers every prompt by the same text. Its weights are not trained.

    Args:
        directory: The directory of the model.
        answer: The text.
        chat_template: The template; its prompts end with `start`.
        markers: The tokens that are added to the vocabulary, and whether they are special.
        start: The last token of each prompt.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AddedToken, PreTrainedTokenizerFast

    # No token of the answer occurs twice, so each one determines the next.
    tokens, rest = [start], answer
    while rest:
        marker = next((marker for marker in markers if rest.startswith(marker)), "")
        size = len(marker) or 1
        while not marker and rest[:size] in tokens and size < len(rest):
            size += 1
        tokens.append(rest[:size])
        rest = rest[size:]
    tokens.append("<|end|>")
    names = [*SPECIAL, *markers, *(token for token in tokens if token not in markers)]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(names))}
    assert len(set(tokens)) == len(tokens)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|pad|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(name, special=special) for name, special in markers.items()])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=chat_template,
    )
    width = 64 * (len(vocabulary) // 64 + 1)
    model = llama(
        len(vocabulary),
        vocabulary["<|end|>"],
        vocabulary["<|pad|>"],
        hidden_size=width,
        num_hidden_layers=1,
        max_position_embeddings=1024,
        initializer_range=0.0,
        tie_word_embeddings=False,
    )
    with torch.no_grad():
        for index in vocabulary.values():
            model.model.embed_tokens.weight[index, index] = 1
        for token, following in pairwise(tokens):
            model.lm_head.weight[vocabulary[following], vocabulary[token]] = 1
    model.save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory


def generation_model(
    directory: Path, source: Path, adapters: Mapping[str, Path] | None = None, config: str = ""
) -> Path:
    """Write the directory of an archive with a model and its adapters."""
    shutil.copytree(source, directory / DIRECTORY)
    for name, adapter in (adapters or {}).items():
        shutil.copytree(adapter, directory / DIRECTORY / ADAPTERS / name)
    model = {
        "modelName": directory.name,
        "modelVersion": "1.0",
        "handler": GENERATION_HANDLER,
        "configFile": "model-config.yaml",
    }
    manifest = {
        "runtime": "python",
        "model": model,
        MANIFEST_KEY: {"task": GENERATION, "adapters": list(adapters or {})},
    }
    (directory / "model-config.yaml").write_text(config)
    (directory / "MAR-INF").mkdir()
    (directory / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
    return directory
