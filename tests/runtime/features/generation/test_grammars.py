"""Grammars: each text follows its grammar, beside sequences that have another or none."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import subprocess
import sys
import tarfile
import weakref
from collections.abc import Iterator
from contextlib import aclosing
from importlib import metadata
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.features.generation.conftest import Run
from tests.support.language_models import bpe_tokenizer
from tsx_archiver.metadata.modelconfig import HuggingFaceConfig
from tsx_runtime.features.generation.worker.engines import grammars
from tsx_runtime.features.generation.worker.engines.grammars import GrammarCompiler
from tsx_runtime.features.generation.worker.engines.transformers_engine import TransformersEngine
from tsx_runtime.features.generation.worker.interface import Grammar, Sampling
from tsx_runtime.worker.codecs.bodies import RefusedField
from tsx_runtime.worker.exceptions import InvalidInput

pytest.importorskip("llguidance")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
STRICT_POINT = POINT | {"additionalProperties": False}
SCHEMAS: list[Any] = [
    {"type": "object"},
    {"type": "integer", "minimum": 3, "maximum": 400},
    {"type": "number", "multipleOf": 0.5},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-c]{3}-[0-9]+$"},
    {"type": "string", "format": "date"},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}], "items": False},
    {"enum": ["red", 7, None, {"a": [1]}]},
    {"anyOf": [{"type": "boolean"}, STRICT_POINT]},
    {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "point": {"$ref": "#/$defs/point"}},
        "required": ["kind", "point"],
        "additionalProperties": False,
        "$defs": {"point": STRICT_POINT},
    },
    {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"left": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
                "required": ["left"],
                "additionalProperties": False,
            }
        },
    },
    {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": name}}, "required": ["k"]}
            for name in ("cat", "dog")
        ]
    },
]


def schema_grammar(schema: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


@pytest.fixture(scope="module")
def ending_bias() -> dict[int, float]:
    """Return biases for tokens that end a string, a list, an object or the text."""
    tokenizer = bpe_tokenizer()
    tokens = [*tokenizer('"}]')["input_ids"], tokenizer.eos_token_id]
    return dict.fromkeys(tokens, 9.0)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = bpe_tokenizer()
    return GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def start(run: Run, directory: Path, **limits: Any) -> TransformersEngine:
    from transformers import AutoModelForCausalLM

    tokenizer = bpe_tokenizer()
    engine = TransformersEngine(
        AutoModelForCausalLM.from_pretrained(directory).to(DEVICE),
        {},
        HuggingFaceConfig(**limits),
        [tokenizer.eos_token_id],
        tokenizer,
    )
    run(engine.start())
    return engine


@pytest.fixture(scope="module")
def engine(llama: Path, run: Run) -> Iterator[TransformersEngine]:
    engine = start(run, llama)
    yield engine
    run(engine.close())


async def write(
    engine: TransformersEngine, prompt: str, grammar: Grammar | None, **options: Any
) -> tuple[str, str | None]:
    """Return the text of an answer, and its finish reason."""
    sampling = Sampling(**{"max_tokens": 120, "temperature": 1.0} | options, grammar=grammar)
    ids: list[int] = []
    async for tokens in engine.generate(bpe_tokenizer()(prompt)["input_ids"], sampling):
        ids += tokens.token_ids
    return bpe_tokenizer().decode(ids, skip_special_tokens=True), tokens.finish_reason


def test_texts_are_valid_by_their_schemas_in_one_batch(
    engine: TransformersEngine, run: Run, ending_bias: dict[int, float]
) -> None:
    async def together() -> Any:
        return await asyncio.gather(
            *(
                write(
                    engine,
                    "ab" * (seed + 1),
                    schema_grammar(schema),
                    seed=seed,
                    logit_bias=ending_bias,
                )
                for seed, schema in enumerate(SCHEMAS)
            ),
            *(write(engine, "Now is", None, temperature=0.0, max_tokens=40) for _ in range(2)),
        )

    *answers, free, _ = run(together())
    assert free == run(write(engine, "Now is", None, temperature=0.0, max_tokens=40))
    complete = [
        (schema, text)
        for schema, (text, reason) in zip(SCHEMAS, answers, strict=True)
        if reason == "stop"
    ]
    for schema, text in complete:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)
    assert len(complete) >= len(SCHEMAS) - 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", "[a-d]{2,6}x|é+"), "[a-d]{2,6}x|é+"),
        (Grammar("choice", '["so\\n\\"it\\"", "é😀", "is better"]'), 'so\n"it"|é😀|is better'),
        (Grammar("lark", 'start: "(" start ")" | "x"'), r"\(*x\)*"),
    ],
    ids=["regex", "choice", "lark"],
)
def test_texts_follow_other_grammars(
    engine: TransformersEngine, run: Run, grammar: Grammar, pattern: str, temperature: float
) -> None:
    text, reason = run(
        write(engine, "Beautiful", grammar, temperature=temperature, repetition_penalty=1.2)
    )
    assert re.fullmatch(pattern, text) if reason == "stop" else reason == "length"


def test_a_bias_cannot_leave_the_grammar_and_its_end_forces_the_end_token(
    engine: TransformersEngine, run: Run
) -> None:
    tokenizer = bpe_tokenizer()
    (letter,) = tokenizer("z")["input_ids"]
    bias = {letter: 100.0, tokenizer.eos_token_id: 50.0}
    grammar = Grammar("regex", "z{3}|b")
    assert run(write(engine, "a", grammar, logit_bias=bias)) == ("zzz", "stop")


def test_a_sequence_that_loses_its_cache_goes_on_in_its_grammar(
    llama: Path, run: Run, ending_bias: dict[int, float]
) -> None:
    engine = start(run, llama, cacheMemory=142_000, maxSequences=8)
    grammar = Grammar("regex", "(ab|cd){20}[0-9]{40}")
    texts = ["ab " * 20, "b" * 30, "c d " * 10, "Simple"]

    async def together() -> Any:
        return await asyncio.gather(
            *(write(engine, text, grammar, max_tokens=100, seed=5) for text in texts * 2)
        )

    scheduler = engine._engines[None]._manager.batch_processor.scheduler
    restarts: list[str] = []
    add = scheduler.add_waiting_request

    def record(state: Any) -> None:
        if state._true_initial_tokens:
            restarts.append(state.request_id)
        add(state)

    scheduler.add_waiting_request = record
    answers = run(together())
    run(engine.close())
    assert all(re.fullmatch(grammar.text, text) for text, _ in answers)
    assert restarts


def test_clients_that_leave_within_a_grammar_leave_no_matcher(
    engine: TransformersEngine, run: Run
) -> None:
    grammar = schema_grammar({"type": "array", "items": {"type": "integer"}, "minItems": 90})
    sequences: list[weakref.ref[Any]] = []
    sampler = engine._engines[None].sampler

    async def leave() -> None:
        sampling = Sampling(max_tokens=100, temperature=1.0, grammar=grammar)
        async with aclosing(engine.generate([9, 8], sampling)) as stream:
            async for _ in stream:
                sequences.extend(
                    weakref.ref(row.arguments["grammar"])
                    for row in sampler.rows
                    if row.arguments["grammar"] is not None
                )
                return

    async def all_clients() -> None:
        for _ in range(3):
            await asyncio.gather(*(leave() for _ in range(6)))
        await write(engine, "a", None, max_tokens=3)  # replaces the rows of the last batch

    run(all_clients())
    gc.collect()
    assert sequences
    assert not [sequence for sequence in sequences if sequence() is not None]
    assert engine.stats() == (0, 0, 0.0)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (
            {"properties": {"name": {}, "age": {"type": "number", "multipleOf": 0}}},
            "properties.age.multipleOf",
        ),
        ({"properties": {"a": {"not": {"type": "string"}}}}, "properties.a.not"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"pattern": "(?=a)", "type": "string"}}}, "pattern"),
        ({"anyOf": [{"type": "string"}, {"type": "strin"}]}, "anyOf.1.type"),
        ({"allOf": [{"type": "string"}, {"type": "number"}]}, "allOf"),
    ],
)
def test_an_error_has_its_path_in_the_schema(
    compiler: GrammarCompiler, run: Run, schema: Any, path: str
) -> None:
    with pytest.raises(InvalidInput, match=re.escape(f"{path} in the schema")):
        run(compiler.compile(schema_grammar(schema)))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", "{"),
        Grammar("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
        Grammar("json_schema", " " * (grammars.MAX_GRAMMAR_CHARS + 1)),
        schema_grammar({"$ref": "#"}),
        Grammar("choice", "[1]"),
        Grammar("choice", "[]"),
        Grammar("regex", "(" * 20_000 + ")" * 20_000),
        Grammar("regex", "a(?=b)"),
        Grammar("lark", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
        Grammar("lark", "start: missing"),
        schema_grammar({"type": "integer", "multipleOf": 999_983}),  # It takes minutes.
        Grammar("regex", ".*" * 20_000),
    ],
)
def test_an_unusable_grammar_is_refused(
    compiler: GrammarCompiler, run: Run, grammar: Grammar
) -> None:
    for _ in range(2):  # The second refusal comes from the cache.
        with pytest.raises(RefusedField, match="grammar") as exc_info:
            run(compiler.compile(grammar._replace(field="tools")))
        assert exc_info.value.param == "tools"


def test_a_long_chain_of_rules_is_compiled(compiler: GrammarCompiler, run: Run) -> None:
    """Check that the recursion of the compiler fits its stack."""
    rules = (f'r{number}: "a" r{number + 1}' for number in range(3600))
    text = "\n".join(("start: r0", *rules, 'r3600: "b"'))
    assert run(compiler.compile(Grammar("lark", text))).is_accepting() is False


def test_a_grammar_too_complex_for_a_step_ends_with_an_error(
    engine: TransformersEngine, run: Run
) -> None:
    properties = {f"p{number}": {"type": "string", "pattern": "a"} for number in range(500)}
    with pytest.raises(InvalidInput, match="within its grammar"):
        run(write(engine, "a", schema_grammar({"type": "object", "properties": properties})))


def test_compiled_grammars_are_cached_within_bounds(run: Run) -> None:
    compiler = GrammarCompiler(bpe_tokenizer(), 0, [0])

    async def compile_all() -> None:
        await asyncio.gather(
            *(compiler.compile(Grammar("regex", f"a{{{number % 80}}}")) for number in range(100))
        )
        for number in range(40):
            await compiler.compile(Grammar("choice", json.dumps(["a" * 60_000, str(number)])))

    run(compile_all())
    assert len(compiler._cache) <= grammars.MAX_CACHED_GRAMMARS
    assert sum(len(grammar.text) for grammar in compiler._cache) <= grammars.MAX_CACHED_CHARS


def test_thousands_of_choices_can_be_written(compiler: GrammarCompiler, run: Run) -> None:
    matcher = run(compiler.compile(Grammar("choice", json.dumps([f"c{n}" for n in range(5000)]))))
    assert matcher.consume_tokens(bpe_tokenizer()("c4321")["input_ids"])
    matcher.compute_bitmask()
    assert matcher.is_accepting()


@settings(max_examples=25)
@given(st.lists(st.text(alphabet='ab\n"\\é😀 /{|', max_size=6), min_size=1, max_size=4))
def test_exactly_the_choices_can_be_written(compiler: GrammarCompiler, choices: list[str]) -> None:
    tokenizer = bpe_tokenizer()
    prototype = compiler._compile(Grammar("choice", json.dumps(choices)))
    assert not isinstance(prototype, str)
    for text in {*choices, "b", "aab"}:
        matcher = prototype.deep_copy()
        matcher.consume_tokens(tokenizer(text)["input_ids"])
        assert matcher.is_accepting() is (text in choices)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("ByteLevel", {"add_prefix_space": True}), ("Metaspace", {"prepend_scheme": "always"})],
)
def test_an_answer_begins_without_the_space_that_tokenizers_write_before_texts(
    kind: str, options: dict[str, Any]
) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    space = "Ġ" if kind == "ByteLevel" else "▁"
    vocabulary = {token: index for index, token in enumerate(["<end>", space, *'{"a:1}'])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = getattr(pre_tokenizers, kind)(**options)
    backend.decoder = getattr(decoders, kind)()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    matcher = asyncio.run(
        GrammarCompiler(tokenizer, len(tokenizer), [0]).compile(schema_grammar({"const": {"a": 1}}))
    )
    assert tokenizer.tokenize("{") == [space, "{"]
    refused = grammars.refused_tokens([matcher], len(tokenizer))[0]
    allowed = refused.logical_not().nonzero()[:, 0].tolist()
    assert tokenizer.convert_ids_to_tokens(allowed) == ["{"]
    assert matcher.consume_tokens(list(map(vocabulary.__getitem__, '{"a":1}')))
    assert matcher.is_accepting()


def test_grammars_need_a_tokenizer_that_llguidance_reads() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<end>": 0, "a": 1}, unk_token="<end>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    with pytest.raises(InvalidInput, match="cannot read the model's tokenizer"):
        asyncio.run(GrammarCompiler(tokenizer, 2, [0]).compile(schema_grammar(True)))


@pytest.mark.nightly
def test_no_text_of_the_json_schema_test_suite_is_invalid(
    engine: TransformersEngine, run: Run, ending_bias: dict[int, float], tmp_path: Path
) -> None:
    """Generate texts under each schema of the suite, which the source of jsonschema has."""
    version = metadata.version("jsonschema")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    command += ["--no-binary", "jsonschema", f"jsonschema=={version}", "-d", str(tmp_path)]
    subprocess.run(command, check=False)
    archives = list(tmp_path.glob("*.tar.gz"))
    if not archives:
        pytest.skip("the registry cannot be reached")
    cases: list[tuple[str, Any]] = []
    with tarfile.open(archives[0]) as archive:
        for member in archive.getmembers():
            if re.search(
                r"/json/tests/draft2020-12/(?!optional/.*|optional$)[^/]+\.json$", member.name
            ):
                file = archive.extractfile(member)
                assert file is not None
                groups = json.load(file)
                cases += [
                    (f"{Path(member.name).stem}: {g['description']}", g["schema"]) for g in groups
                ]
    assert len(cases) > 300
    outcomes: dict[str, list[Any]] = {"valid": [], "refused": [], "length": [], "invalid": []}

    async def check(name: str, schema: Any, seed: int) -> None:
        try:
            text, reason = await write(
                engine,
                "ab",
                schema_grammar(schema),
                max_tokens=60,
                seed=seed,
                logit_bias=ending_bias,
            )
        except InvalidInput as error:
            outcomes["refused"].append((name, str(error)))
            return
        if reason == "length":
            outcomes["length"].append(name)
            return
        try:
            is_valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        except jsonschema.exceptions._WrappedReferencingError:  # a schema of another server
            return
        outcomes["valid" if is_valid else "invalid"].append((name, text))

    async def check_cases(some_cases: list[tuple[str, Any]]) -> None:
        await asyncio.gather(*(check(*case, seed) for case in some_cases for seed in range(2)))

    for begin in range(0, len(cases), 2):  # `run` has a timeout.
        run(check_cases(cases[begin : begin + 2]))
    assert outcomes["invalid"] == []
    assert len(outcomes["valid"]) > 200
