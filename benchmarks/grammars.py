"""Compilation, masks and memory of llguidance and xgrammar, with a vocabulary of 128,000 tokens.

    python -m benchmarks.grammars [--vocabulary 128000]

Each library runs in a process of its own, if it is installed. The vocabulary is made of the
beginnings of the words in Python's standard library. Texts are valid JSON under each schema; each
is read token by token, and before each token the library computes which tokens may come next.
`first use` is the time to prepare the tokenizer. Memory is the growth of the process by the
prepared tokenizer, and then by 100 sequences that have read their text. Times are of the processor.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

POINT = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "string", "pattern": "^[a-z]+@[a-z]+\\.org$"},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "good"]}, "maxItems": 5},
    },
    "required": ["name", "age", "mail", "tags"],
    "additionalProperties": False,
}
CASES: dict[str, tuple[Any, Any]] = {
    "any object": ({"type": "object"}, {"a": [1, True, None, "some text"], "b": {"c": -2.5}}),
    "person": (
        PERSON,
        {"name": "Ada Lovelace", "age": 36, "mail": "ada@example.org", "tags": ["new", "good"]},
    ),
    "tools": (
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"name": {"const": f"tool_{number}"}, "arguments": PERSON},
                    "required": ["name", "arguments"],
                    "additionalProperties": False,
                }
                for number in range(32)
            ]
        },
        {
            "name": "tool_7",
            "arguments": {"name": "b", "age": 3, "mail": "b@c.org", "tags": ["old"]},
        },
    ),
    "enum of 1,000": ({"enum": [f"value {number}" for number in range(1000)]}, "value 512"),
}


def vocabulary_tokenizer(size: int) -> Tokenizer:
    beginnings: dict[str, None] = {}
    for file in Path(json.__file__).parents[1].glob("*.py"):
        for term in re.findall(r" ?\w+|\W", file.read_text(errors="replace")):
            beginnings.update(dict.fromkeys(term[:end] for end in range(2, len(term) + 1)))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    entries = (byte_level.pre_tokenize_str(text)[0][0] for text in beginnings)
    tokens = list(dict.fromkeys(["<end>", *sorted(alphabet), *entries]))[:size]
    tokens += [f"Ġ{number}Ġ" for number in range(size - len(tokens))]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [
        (token[:-1], token[-1]) for token in tokens if {token[:-1], token[-1]} <= vocabulary.keys()
    ]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    return tokenizer


def llguidance_library(tokenizer: Tokenizer, mask: Any) -> Callable[[str], Any]:
    from llguidance import LLMatcher, LLTokenizer

    trie = LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=0)

    def compile_schema(schema: str) -> Any:
        prototype = LLMatcher(trie, LLMatcher.grammar_from_json_schema(schema), log_level=0)
        if prototype.is_error():
            raise ValueError(prototype.get_error())

        def sequence() -> tuple[Callable[[], None], Callable[[int], bool]]:
            matcher = prototype.deep_copy()
            pointer, size = mask.ctypes.data, mask.nbytes
            return lambda: matcher.unsafe_compute_mask_ptr(pointer, size), matcher.consume_token

        return sequence

    return compile_schema


def xgrammar_library(tokenizer: Tokenizer, mask: Any) -> Callable[[str], Any]:
    import torch
    import xgrammar

    vocabulary = [tokenizer.id_to_token(id) for id in range(tokenizer.get_vocab_size())]
    info = xgrammar.TokenizerInfo(
        vocabulary, xgrammar.VocabType.BYTE_LEVEL, vocab_size=len(vocabulary), stop_token_ids=[0]
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    bitmask = torch.from_numpy(mask[None])

    def compile_schema(schema: str) -> Any:
        compiled = compiler.compile_json_schema(schema)

        def sequence() -> tuple[Callable[[], None], Callable[[int], bool]]:
            matcher = xgrammar.GrammarMatcher(compiled)
            return lambda: matcher.fill_next_token_bitmask(bitmask), matcher.accept_token

        return sequence

    return compile_schema


LIBRARIES = {"llguidance": llguidance_library, "xgrammar": xgrammar_library}


def measure(library: str, size: int) -> None:
    tokenizer = vocabulary_tokenizer(size)
    mask = np.zeros((size + 31) // 32, np.int32)
    process = psutil.Process()
    start_bytes, start = process.memory_info().rss, time.thread_time()
    compile_schema = LIBRARIES[library](tokenizer, mask)
    first_s = time.thread_time() - start
    trie_mib = (process.memory_info().rss - start_bytes) / 2**20
    for name, (schema, value) in CASES.items():
        ids = tokenizer.encode(json.dumps(value)).ids
        compile_s, mask_us, read_us, alive = [], [], [], []
        for _ in range(3):
            start = time.thread_time()
            new_sequence = compile_schema(json.dumps(schema))
            compile_s.append(time.thread_time() - start)
        start_bytes = process.memory_info().rss
        for _ in range(100):
            fill, read = new_sequence()
            alive.append((fill, read))
            for id in ids:
                start = time.thread_time()
                fill()
                filled = time.thread_time()
                if not (mask.view(np.uint32)[id // 32] >> id % 32 & 1 and read(id)):
                    raise ValueError(f"{library} refuses {tokenizer.id_to_token(id)} of {value}")
                mask_us.append(1e6 * (filled - start))
                read_us.append(1e6 * (time.thread_time() - filled))
        sequence_kib = (process.memory_info().rss - start_bytes) / 1024 / len(alive)
        p99_us = sorted(mask_us)[len(mask_us) * 99 // 100]
        print(
            f"| {name} | {library} | {1000 * statistics.median(compile_s):.1f} |"
            f" {statistics.median(mask_us):.0f} | {statistics.mean(mask_us):.0f} | {p99_us:.0f} |"
            f" {statistics.mean(read_us):.1f} | {sequence_kib:.0f} |",
            flush=True,
        )
    print(f"| first use | {library} | {1000 * first_s:.0f} | | | | | {trie_mib:.0f} MiB in all |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--library", choices=LIBRARIES, help="only this one, in this process")
    options = parser.parse_args()
    if options.library:
        measure(options.library, options.vocabulary)
        return
    print(
        "| schema | library | compile ms | mask p50 us | mask mean us | mask p99 us | read us |"
        " KiB a sequence |\n|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    for library in LIBRARIES:
        command = [sys.executable, "-m", "benchmarks.grammars", "--library", library]
        subprocess.run([*command, "--vocabulary", str(options.vocabulary)], check=False)


if __name__ == "__main__":
    main()
