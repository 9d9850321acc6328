"""Grammars that generated texts follow, compiled by llguidance.

A matcher of llguidance reads the tokens of one sequence, and tells which tokens may come next.
A compilation cannot be stopped, and a schema as short as a large `multipleOf` may take hours and
all memory. Therefore another process compiles each grammar first, and may be killed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from functools import cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from tsx_runtime.features.generation.worker.interface import Grammar
from tsx_runtime.shared.cores import cpu_count
from tsx_runtime.worker.codecs.bodies import RefusedField
from tsx_runtime.worker.exceptions import describe_error

if TYPE_CHECKING:
    import torch
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

MAX_GRAMMAR_CHARS = 64 << 10
MAX_COMPILE_S = 2  # CPU time of the process that tries a grammar
MAX_TRIAL_S = 60.0  # the time on a busy machine, with the start of that process
MAX_PATH_S = 0.5  # CPU time of the search for the path of an error
MAX_CACHED_GRAMMARS, MAX_CACHED_CHARS = 64, 1 << 20
# llguidance compiles by recursion. For a grammar of MAX_GRAMMAR_CHARS it needs up to 32 MiB.
COMPILER_STACK_BYTES = 256 << 20
# Without a bound, a model may write white space until its last token.
JSON_OPTIONS = {"whitespace_pattern": r"[ \t\n\r]{1,32}"}
# With llguidance's own limits, one step of a hostile regular expression takes ten seconds.
INITIAL_LEXER_FUEL, STEP_LEXER_FUEL, MAX_LEXER_STATES = 200_000, 10_000, 20_000
INLINE_CORES = 2  # With so few cores, other threads take longer than they save.


class GrammarCompiler:
    """A compiler of grammars for one tokenizer, with a cache of the last ones."""

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = max(vocabulary, len(tokenizer))
        self._end_tokens = list(end_tokens)
        self._token_trie: LLTokenizer | None = None
        self._trials: GrammarTrials | None = None
        self._cache: dict[Grammar, asyncio.Future[LLMatcher | str]] = {}

    async def compile(self, grammar: Grammar) -> LLMatcher:
        """Return a matcher at the beginning of a text. The compiler has a thread of its own.

        Raises:
            RefusedField: The grammar cannot be compiled.
        """
        future = self._cache.pop(grammar, None)  # The last entry is the one used last.
        if future is None:
            if len(grammar.text) > MAX_GRAMMAR_CHARS:
                raise RefusedField(
                    f"The grammar has {len(grammar.text):,} characters; at most"
                    f" {MAX_GRAMMAR_CHARS:,} are compiled.",
                    grammar.field,
                )
            future = asyncio.get_running_loop().run_in_executor(
                _compiler_thread(), self._compile, grammar
            )
        self._cache[grammar] = future
        while (
            len(self._cache) > MAX_CACHED_GRAMMARS
            or sum(len(cached.text) for cached in self._cache) > MAX_CACHED_CHARS
        ):
            del self._cache[next(iter(self._cache))]
        # Other requests may wait for the same future, so one that is cancelled leaves it alone.
        result = await asyncio.shield(future)
        if isinstance(result, str):
            raise RefusedField(
                f"The grammar ({grammar.kind}) cannot be used: {result}", grammar.field
            )
        return result.deep_copy()

    def _compile(self, grammar: Grammar) -> LLMatcher | str:
        """Return a matcher, or why there is none."""
        from llguidance import LLTokenizer  # an extra

        if self._token_trie is None or self._trials is None:
            backend = _continuing_tokenizer(self._tokenizer.backend_tokenizer)
            # Its process reads the tokenizer at the same time as this one.
            self._trials = GrammarTrials(backend, self._vocabulary, self._end_tokens)
            try:
                self._token_trie = LLTokenizer(backend, self._vocabulary, self._end_tokens)
            except ValueError as error:
                return f"llguidance cannot read the model's tokenizer: {error}."
        reason = self._trials.error(grammar)
        return compile_grammar(self._token_trie, grammar) if reason is None else reason


class GrammarTrials:
    """A process that compiles grammars to find out whether they can be compiled in time."""

    def __init__(self, tokenizer: str, vocabulary: int, end_tokens: Sequence[int]) -> None:
        self._arguments = [tokenizer, vocabulary, list(end_tokens)]
        self._process: subprocess.Popen[str] | None = None
        with suppress(OSError):  # `error` tries again.
            self._process = self._start()

    def error(self, grammar: Grammar) -> str | None:
        """Return why a grammar cannot be used; None if it can. This blocks."""
        try:
            process = self._process = self._process or self._start()
        except OSError as error:
            return f"it cannot be tried in a process of its own: {describe_error(error)}."
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(MAX_TRIAL_S, process.kill)
        timer.start()
        try:
            process.stdin.write(f"{json.dumps(grammar)}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            timer.cancel()
        if answer:
            reason: str | None = json.loads(answer)
            return reason
        _end(process)
        self._process = None
        return f"its compilation takes more than {MAX_COMPILE_S} s, or breaks off. Make it simpler."

    def _start(self) -> subprocess.Popen[str]:
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import answer_trials;"
            " answer_trials()"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        weakref.finalize(self, _end, process)
        assert process.stdin is not None
        process.stdin.write(f"{json.dumps(self._arguments)}\n")
        return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    with suppress(OSError):  # The rest of its input cannot be written.
        process.communicate()


def answer_trials() -> None:
    """Compile the grammars in the lines of stdin, and write the error of each, or null."""
    from llguidance import LLTokenizer  # an extra

    tokenizer, vocabulary, end_tokens = json.loads(sys.stdin.readline())
    token_trie = LLTokenizer(tokenizer, n_vocab=vocabulary, eos_token=end_tokens)

    def error(grammar: Grammar) -> str | None:
        result = compile_grammar(token_trie, grammar)
        return result if isinstance(result, str) else None

    for line in sys.stdin:
        _limit_cpu_time()
        text = json.dumps(_compiler_thread().submit(error, Grammar(*json.loads(line))).result())
        print(text, flush=True)


def _limit_cpu_time() -> None:
    """Let the system end this process after the next MAX_COMPILE_S of CPU time."""
    if sys.platform != "win32":  # Windows has no such limit, so only MAX_TRIAL_S applies.
        import resource

        end_s = math.ceil(time.process_time() + MAX_COMPILE_S)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (end_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def compile_grammar(token_trie: LLTokenizer, grammar: Grammar) -> LLMatcher | str:
    """Return a matcher, or why there is none."""
    from llguidance import LLMatcher, LLParserLimits  # an extra

    try:
        definition = _definition(grammar)
    except (ValueError, TypeError, RecursionError) as error:
        return f"{error}."
    limits = LLParserLimits(
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_lexer_fuel=STEP_LEXER_FUEL,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )
    matcher = LLMatcher(token_trie, definition, log_level=0, limits=limits)
    if matcher.is_error():
        return describe_grammar_error(matcher) + _describe_path(grammar)
    # The first mask shows whether there is any text, and how long such masks take.
    matcher.compute_bitmask()
    if matcher.is_stopped() and not matcher.is_accepting():
        return "no text follows it."
    return matcher


def _continuing_tokenizer(tokenizer: Tokenizer) -> str:
    """Return a tokenizer that writes no space before the text, which continues a prompt.

    llguidance tokenizes the characters that a grammar forces, and reads no Metaspace decoder.
    """
    from tokenizers import decoders, pre_tokenizers  # an extra

    tokenizer = copy(tokenizer)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    steps = tokenizer.pre_tokenizer
    if not isinstance(steps, pre_tokenizers.Sequence):
        steps = [steps]
    for step in steps:
        if isinstance(step, pre_tokenizers.ByteLevel):
            step.add_prefix_space = False
        elif isinstance(step, pre_tokenizers.Metaspace):
            step.prepend_scheme = "never"
    if isinstance(tokenizer.decoder, decoders.Metaspace):
        spaces = decoders.Replace(tokenizer.decoder.replacement, " ")
        tokenizer.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])
    return str(tokenizer.to_str())


def missing_grammar_support(tokenizer: Any) -> str | None:
    """Explain why texts of a tokenizer cannot follow a grammar; None if they can."""
    if importlib.util.find_spec("llguidance") is None:
        return "a grammar needs the package llguidance: pip install 'tsx-serve[transformers]'"
    if not getattr(tokenizer, "is_fast", False):
        return "a grammar needs a tokenizer of the library tokenizers, which this model lacks"
    return None


def describe_grammar_error(matcher: LLMatcher) -> str:
    return matcher.get_error().partition("\n<")[0].strip().rstrip(".") + "."


def refused_tokens(matchers: Sequence[LLMatcher], vocabulary: int) -> torch.Tensor:
    """Return which tokens may not come next, as booleans of shape (matchers, vocabulary).

    At the end of a grammar, and after an error, these are all but the end tokens.
    """
    import torch  # The process of trials needs none.

    masks = torch.empty(len(matchers), (vocabulary + 31) // 32, dtype=torch.int32)
    address, row_bytes = masks.data_ptr(), 4 * masks.shape[1]
    if (executor := _executor()) is None:
        for index, matcher in enumerate(matchers):
            matcher.unsafe_compute_mask_ptr(address + index * row_bytes, row_bytes)
    else:
        rows = [(matcher, index) for index, matcher in enumerate(matchers)]
        executor.unsafe_compute_mask_ptr(rows, address, row_bytes, len(rows))
    mask_bytes = ~masks.numpy().view(np.uint8)
    bits = np.unpackbits(mask_bytes, axis=1, count=vocabulary, bitorder="little")
    return torch.from_numpy(bits.view(np.bool_))


def _definition(grammar: Grammar) -> str:
    """Return a grammar in the notation of llguidance.

    Raises:
        ValueError: The text is not JSON.
        TypeError: The choices are not texts.
    """
    from llguidance import LLMatcher  # an extra

    kind, text, _ = grammar
    if kind == "json_schema":
        options: Any = JSON_OPTIONS  # llguidance declares a TypedDict.
        return LLMatcher.grammar_from_json_schema(text, overrides=options)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "lark":
        return LLMatcher.grammar_from_lark(text)
    choices = json.loads(text)
    if not (isinstance(choices, list) and choices and all(isinstance(c, str) for c in choices)):
        raise TypeError("a choice is a list of one text or more")
    quoted = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    # As a terminal, thousands of choices are one regular expression.
    return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(quoted)}")


def _describe_path(grammar: Grammar) -> str:
    """Return a sentence about the place of an error in a JSON schema."""
    from llguidance import LLMatcher  # an extra

    if grammar.kind != "json_schema":
        return ""
    try:
        schema = json.loads(grammar.text)
    except RecursionError:
        return ""

    def error() -> str:
        return LLMatcher.validate_grammar(_definition(Grammar("json_schema", json.dumps(schema))))

    expected, end_s = error(), time.thread_time() + MAX_PATH_S
    _remove_valid_parts(schema, lambda: time.thread_time() > end_s or error() != expected)
    paths = list(_leaf_paths(schema))
    depth = max(map(len, paths))
    deepest = zip(*(path for path in paths if len(path) == depth), strict=True)
    path = [keys[0] for keys in takewhile(lambda keys: len(set(keys)) == 1, deepest)]
    return f" It is at {'.'.join(path)} in the schema." if path else ""


def _remove_valid_parts(node: Any, is_needed: Callable[[], bool]) -> None:
    """Reduce a schema to the parts that cause its error. Booleans replace the parts of lists."""
    for key, part in list(node.items() if isinstance(node, dict) else enumerate(node)):
        for substitute in (True, False):
            if isinstance(node, dict):
                del node[key]
            else:
                node[key] = substitute
            if not is_needed():
                break
            node[key] = part
        else:
            if isinstance(part, dict | list):
                _remove_valid_parts(part, is_needed)


def _leaf_paths(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(node, dict):
        parts = list(node.items())
    else:
        parts = [(key, part) for key, part in enumerate(node) if not isinstance(part, bool)]
    if not parts:
        yield path
    for key, part in parts:
        if isinstance(part, dict | list):
            yield from _leaf_paths(part, (*path, str(key)))
        else:
            yield (*path, str(key))


@cache
def _compiler_thread() -> ThreadPoolExecutor:
    executor = ThreadPoolExecutor(1, "tsx-grammars")
    usual_bytes = threading.stack_size(COMPILER_STACK_BYTES)
    try:
        executor.submit(int)  # starts the thread
    finally:
        threading.stack_size(usual_bytes)
    return executor


@cache
def _executor() -> LLExecutor | None:
    """Return threads that compute masks; None if there are too few cores for them."""
    from llguidance import LLExecutor  # an extra

    return LLExecutor() if cpu_count() > INLINE_CORES else None
