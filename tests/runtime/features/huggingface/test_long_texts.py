"""Long texts, of which the tokenizer reads only the part that the model can take."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.runtime.features.huggingface.conftest import Serve, assert_near
from tests.support.huggingface_models import WORDS, byte_pairs, corpus, wordpiece
from tsx_runtime.features.huggingface.worker.loading import Loaded
from tsx_runtime.features.huggingface.worker.texts import cut_long_pair, cut_long_text

MAX_TOKENS = 16
LETTERS = [
    "abcXYZ",
    "0123456789",
    " ",
    "\n",
    " \n\t",
    "漢字仮名",
    "हिन्दी ",
    "e\u0301\u0308",
    "👩\u200d",
    "!.,",
    "'s t",
    "ﬁİß",
]
LONG = "the file is read. " * 50_000


def unigram(split: bool) -> Any:
    """Make a tokenizer like sentencepiece's. Without `split`, a text is one word."""
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=split)
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def digits_from_the_right() -> Any:
    """Make a tokenizer whose pattern looks ahead over a run of digits or spaces."""
    from tokenizers import Regex, pre_tokenizers

    tokenizer = byte_pairs(["<unk>"], unk_token="<unk>")
    pattern = Regex(
        r" ?\p{L}+|\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = (
        pre_tokenizers.Split(pattern, "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split])
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "wordpiece": wordpiece,
    "byte-level": lambda: byte_pairs(["<unk>"], unk_token="<unk>"),
    "digits from the right": digits_from_the_right,
    "unigram": lambda: unigram(split=True),
    "unigram of whole texts": lambda: unigram(split=False),
}


def random_text(chance: random.Random) -> str:
    size = chance.choice([1, 2, 7, 40, 300, 10_000])
    letters = chance.choice(LETTERS)
    return (
        "".join(chance.choices(letters, k=size))
        if chance.random() < 0.5
        else " ".join(chance.choices(WORDS, k=min(size, 30)))
    )


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_tokens_of_a_shortened_text_equal_those_of_the_whole(served: Serve, name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    tokenizer.model_max_length = MAX_TOKENS
    loaded, chance, shortened_count = (
        served("bert").handler.loaded._replace(tokenizer=tokenizer),
        random.Random(5),
        0,
    )
    for _ in range(10):
        text = "".join(random_text(chance) for _ in range(chance.randrange(1, 20)))
        used_text = cut_long_text(loaded, text)
        whole_ids, ids = (
            tokenizer(source, verbose=False)["input_ids"] for source in (text, used_text)
        )
        assert (whole_ids[:MAX_TOKENS], len(whole_ids) > MAX_TOKENS) == (
            ids[:MAX_TOKENS],
            len(ids) > MAX_TOKENS,
        )
        shortened_count += len(used_text) < len(text) / 8
    assert shortened_count > 2


def test_the_end_of_a_long_text_is_not_tokenized(served: Serve) -> None:
    loaded: Loaded = served("bert").handler.loaded
    max_tokens = loaded.max_tokens or 0
    assert cut_long_text(loaded, LONG) == LONG[: 8 * max_tokens]
    assert cut_long_pair(loaded, "the file", LONG) == ("the file", LONG[: 8 * max_tokens])
    assert cut_long_pair(loaded, LONG, LONG + "x") == (
        LONG[: 8 * max_tokens],
        LONG[: 8 * max_tokens],
    )
    # The tokenizer would need half a minute for two such words.
    letters = "x" * 100_000
    assert [len(piece or "") for piece in cut_long_pair(loaded, letters, letters)] == [
        64 * max_tokens,
        64 * max_tokens,
    ]
    short_text = "x" * 8 * max_tokens
    assert cut_long_text(loaded, short_text) is short_text
    try:
        loaded.tokenizer.truncation_side = "left"
        assert cut_long_text(loaded, LONG) is LONG
    finally:
        loaded.tokenizer.truncation_side = "right"


def test_answers_equal_those_of_the_whole_text(served: Serve) -> None:
    model, truncation = served("bert-classification"), {"truncation": True}
    assert_near(
        [model.pipeline()(LONG[:10_000], top_k=None, **truncation)],
        model.values({"inputs": LONG, "parameters": truncation})[0],
    )
    pair = {"text": "the file", "text_pair": LONG}
    assert_near(
        [model.pipeline()(pair, top_k=None, **truncation)],
        model.values({"inputs": pair, "parameters": truncation})[0],
    )
    for kind in ("bert-tokens", "sentences"):
        assert_near(*served(kind).values({"inputs": LONG[:10_000]}, {"inputs": LONG}))
    ranking = {"query": "the file", "texts": [LONG, "a list"], "return_text": True}
    assert {entry["text"] for entry in served("bert-ranking").values(ranking)[0]} == {
        LONG,
        "a list",
    }


def test_a_refused_long_text_is_not_tokenized_completely(served: Serve) -> None:
    for kind, text, message in (
        ("bert-classification", LONG, "tokens; the model takes at most 128"),
        ("t5", LONG, "tokens; the model takes at most 128"),
        ("bert-masked", f"{LONG} [MASK]", "has no [MASK] in its first 128 tokens"),
    ):
        (answer,) = served(kind).ask({"inputs": text})
        assert (answer.status, message in answer.message) == (400, True), answer.message
