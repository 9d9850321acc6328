"""Tasks that read text: answers equal transformers' own pipelines, whoever shares the batch; bad
requests are refused alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.worker.handlers.huggingface.conftest import (
    Serve,
    mixed,
    near,
    refuses_alone,
    start,
)
from tests.support import huggingface_models
from tests.support.huggingface_models import WORDS
from tsx_runtime.worker.generation.interface import TaskRequest
from tsx_runtime.worker.handlers.huggingface.media import plain


@pytest.mark.parametrize("kind", ["bert-classification", "roberta-classification"])
def test_classification_equals_the_pipeline_in_a_batch_of_mixed_lengths(
    served: Serve, kind: str
) -> None:
    model = served(kind)
    texts = mixed(24, longest=9)
    wanted = model.pipeline()(texts, top_k=None)
    near([[each] for each in wanted], model.ok(*[{"inputs": text} for text in texts]))
    near(wanted, model.ok({"inputs": texts})[0])
    (instance,) = model.model.entry.call(
        [{"inputs": texts[0]}], model.model.context
    )  # as an envelope has it
    near([wanted[0]], json.loads(instance))


def test_parameters_are_each_requests_own(served: Serve) -> None:
    model = served("bert-classification")
    pipeline = model.pipeline()
    default, best, raw, pair = model.ok(
        b"the file is read",
        {"inputs": "the file is read", "parameters": {"top_k": 1}},
        {"inputs": "the file is read", "parameters": {"function_to_apply": "none"}},
        {"inputs": {"text": "the file", "text_pair": "is read"}},
    )
    near([pipeline("the file is read", top_k=None)], default)
    near([pipeline("the file is read", top_k=1)], best)
    near([pipeline("the file is read", top_k=None, function_to_apply="none")], raw)
    near([pipeline({"text": "the file", "text_pair": "is read"}, top_k=None)], pair)


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_token_classification_equals_the_pipeline(served: Serve, strategy: str) -> None:
    model = served("bert-tokens")
    texts = mixed(9, seed=1)
    wanted = model.pipeline()(texts, aggregation_strategy=strategy)
    bodies = [{"inputs": text, "parameters": {"aggregation_strategy": strategy}} for text in texts]
    near(plain(wanted), model.ok(*bodies))


def test_token_classification_reads_a_long_text_in_parts_where_stride_is_given(
    served: Serve,
) -> None:
    model = served("bert-tokens")
    text = " ".join(WORDS * 12)
    wanted = model.pipeline()(text, stride=16, aggregation_strategy="simple")
    found = model.ok(
        {"inputs": "the file"},
        {"inputs": text, "parameters": {"stride": 16, "aggregation_strategy": "simple"}},
    )[1]
    near(plain(wanted), found)


def test_masked_words_equal_the_pipeline(served: Serve) -> None:
    model = served("bert-masked")
    pipeline = model.pipeline()
    texts = [f"the [MASK] {text}" for text in mixed(8, seed=2)] + ["[MASK] name [MASK]"]
    near([pipeline(text) for text in texts], model.ok(*[{"inputs": text} for text in texts]))
    body = {"inputs": "the [MASK]", "parameters": {"targets": ["file", "name"], "top_k": 2}}
    near(pipeline("the [MASK]", targets=["file", "name"], top_k=2), model.ok(body)[0])


def test_zero_shot_equals_the_pipeline_with_labels_of_each_request(served: Serve) -> None:
    model = served("bert-nli")
    pipeline = model.pipeline()
    asked = [
        (text, WORDS[: 1 + number % 4], number % 2 == 0)
        for number, text in enumerate(mixed(8, seed=3))
    ]
    bodies = [
        {"inputs": text, "parameters": {"candidate_labels": labels, "multi_label": multi}}
        for text, labels, multi in asked
    ]
    for (text, labels, multi), found in zip(asked, model.ok(*bodies), strict=True):
        wanted = pipeline(text, candidate_labels=labels, multi_label=multi)
        near(
            [
                {"label": label, "score": score}
                for label, score in zip(wanted["labels"], wanted["scores"], strict=True)
            ],
            found,
        )


def test_token_vectors_equal_the_pipeline(served: Serve) -> None:
    model = served("bert")
    texts = mixed(9, seed=4)
    near(model.pipeline()(texts), model.ok(*[{"inputs": text} for text in texts]))


def test_an_answer_is_the_most_likely_span_of_whole_words(served: Serve) -> None:
    """transformers 5 has no pipeline for it: beside the model itself, by trying all spans."""
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    model = served("bert-answers")
    bare, tokenizer = (
        AutoModelForQuestionAnswering.from_pretrained(model.directory),
        AutoTokenizer.from_pretrained(model.directory),
    )
    asked = [("the name", text) for text in mixed(7, seed=5)]
    found = model.ok(
        *[{"inputs": {"question": question, "context": context}} for question, context in asked]
    )
    for (question, context), answer in zip(asked, found, strict=True):
        encoded = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
        offsets, sequences = encoded.pop("offset_mapping")[0].tolist(), encoded.sequence_ids(0)
        with torch.inference_mode():
            output = bare(**encoded)
        kept = [at for at, sequence in enumerate(sequences) if sequence == 1]
        start, end = (
            logits[0, [0, *kept]].softmax(0)[1:].tolist()
            for logits in (output.start_logits, output.end_logits)
        )
        pairs = [
            (start[i] * end[j], kept[i], kept[j])
            for i in range(len(kept))
            for j in range(i, min(i + 15, len(kept)))
        ]
        score, first, last = max(pairs)
        assert answer["score"] == pytest.approx(score, rel=1e-3)
        assert answer["answer"] == context[answer["start"] : answer["end"]]
        assert answer["start"] <= offsets[first][0]
        assert offsets[last][1] <= answer["end"]
        assert context[answer["start"] - 1 : answer["start"]] in ("", " ")


def test_a_long_context_is_read_in_parts_and_several_answers_are_given(served: Serve) -> None:
    model = served("bert-answers")
    context = " ".join(mixed(30, seed=6))
    body = {
        "question": "the name",
        "context": context,
        "parameters": {"top_k": 3, "doc_stride": 16},
    }
    short, long = model.ok({"question": "the name", "context": "the file is read"}, body)
    assert len(long) == 3
    assert long == sorted(long, key=lambda each: -each["score"])
    assert all(each["answer"] == context[each["start"] : each["end"]] for each in long)
    near(short, model.ok({"inputs": {"question": "the name", "context": "the file is read"}})[0])


def test_no_answer_where_that_is_more_likely(served: Serve) -> None:
    model = served("bert-answers")
    body = {
        "question": "the name",
        "context": WORDS[0],
        "parameters": {"handle_impossible_answer": True, "top_k": 200},
    }
    assert {"answer": "", "start": 0, "end": 0} in [
        {key: each[key] for key in ("answer", "start", "end")} for each in model.ok(body)[0]
    ]


def test_generated_texts_equal_those_of_generate(served: Serve) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model = served("t5")
    bare, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(model.directory),
        AutoTokenizer.from_pretrained(model.directory),
    )
    asked = [
        (text, {"max_new_tokens": 4 + number % 2, "num_beams": 1 + number % 2})
        for number, text in enumerate(mixed(8, seed=7))
    ]
    found = model.ok(
        *[
            {"inputs": text, "parameters": {"generate_parameters": options}}
            for text, options in asked
        ]
    )
    for (text, options), answer in zip(asked, found, strict=True):
        tokens = bare.generate(**tokenizer(text, return_tensors="pt"), **options)
        assert answer == [{"summary_text": tokenizer.decode(tokens[0], skip_special_tokens=True)}]


@pytest.mark.parametrize(
    ("task", "name"),
    [("translation_en_to_de", "translation_text"), ("text2text-generation", "generated_text")],
)
def test_each_task_names_its_text(served: Serve, task: str, name: str) -> None:
    assert list(
        served(f"t5/{task}").ok({"inputs": "the file", "parameters": {"max_new_tokens": 3}})[0][0]
    ) == [name]


BATCHES = [
    ("bert-classification", {}),
    ("bert-tokens", {}),
    (
        "bert-nli",
        {"candidate_labels": ["the file", "a name of the list"]},
    ),
    ("bert", {}),
    ("sentences", {}),
    ("t5", {"max_new_tokens": 6}),
]


@pytest.mark.parametrize(("kind", "parameters"), BATCHES)
def test_an_answer_does_not_depend_on_who_shares_the_batch(
    served: Serve, kind: str, parameters: dict[str, Any]
) -> None:
    model = served(kind)
    bodies = [{"inputs": text, "parameters": parameters} for text in mixed(12)]
    near(model.alone(*bodies), model.ok(*bodies))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_nor_in_half_precision(model_root: Path, tmp_path: Path, precision: str) -> None:
    directory = huggingface_models.model("bert-classification", model_root)
    model = start(directory, "text-classification", tmp_path, {"huggingface": {"dtype": precision}})
    assert model.handler.precision == precision
    bodies = [{"inputs": text} for text in mixed(12)]
    alone, together = model.alone(*bodies), model.ok(*bodies)
    scores = [{each["label"]: each["score"] for each in answer[0]} for answer in alone]
    near(
        scores, [{each["label"]: each["score"] for each in answer[0]} for answer in together], 0.05
    )


BAD = [
    ("bert-classification", b"", "empty body"),
    ("bert-classification", b'{"inputs": ', "cannot be read as JSON"),
    ("bert-classification", b"\xff\xfe", "neither JSON nor text"),
    ("bert-classification", {"inputs": []}, "`inputs` is empty"),
    ("bert-classification", {"inputs": " "}, "is empty"),
    ("bert-classification", {"inputs": 5}, "must be text"),
    (
        "bert-classification",
        {"input": "x"},
        "has no `inputs`, but 'input'. Send",
    ),
    (
        "bert-classification",
        {"inputs": "x", "parameters": {"topk": 1}},
        "has no parameter 'topk'; it takes",
    ),
    (
        "bert-classification",
        {"inputs": "x", "parameters": {"top_k": "1"}},
        'is "1": it must be a valid integer.',
    ),
    (
        "bert-classification",
        {"inputs": "x", "parameters": [1]},
        "`parameters` is a list",
    ),
    (
        "bert-classification",
        {"inputs": "x", "parameters": {"adapter": "a"}},
        "no adapter 'a'",
    ),
    ("bert-classification", {"inputs": "\ud800"}, "surrogates not allowed"),
    ("bert-masked", {"inputs": "the file"}, "has no [MASK]"),
    (
        "bert-nli",
        {"inputs": "x", "parameters": {"candidate_labels": ["the " * 400]}},
        "tokens; the model takes at most 128",
    ),
    (
        "bert-masked",
        {"inputs": "the [MASK]", "parameters": {"targets": [" "]}},
        "At least one target must be provided",
    ),
    (
        "bert-nli",
        {"inputs": "x"},
        "needs the parameter 'candidate_labels'",
    ),
    (
        "bert-nli",
        {
            "inputs": "x",
            "parameters": {"candidate_labels": "a", "hypothesis_template": "{:>99999999}"},
        },
        "must have {} in the place of the label",
    ),
    (
        "bert-nli",
        {"inputs": ["x"] * 101, "parameters": {"candidate_labels": ["a"] * 100}},
        "Texts times labels are 10100; at most 10000",
    ),
    (
        "bert-nli",
        {"inputs": ["x", "y" * 20_000], "parameters": {"candidate_labels": ["a" * 10] * 1000}},
        "20021000 characters together; at most 10000000",
    ),
    (
        "bert-nli",
        {
            "inputs": "x",
            "parameters": {"candidate_labels": "a", "hypothesis_template": "{}" + "x" * 1000},
        },
        "it must have at most 1000 characters",
    ),
    (
        "bert-ranking",
        {"query": "x" * 10_000, "texts": ["y"] * 1000},
        "have 10001000 characters together",
    ),
    (
        "bert-masked",
        {"inputs": "[MASK]" * 11, "parameters": {"top_k": 1000}},
        "That are 11000 words to propose",
    ),
    (
        "bert-tokens",
        {"inputs": "x", "parameters": {"stride": 125}},
        "parts that overlap more are too many",
    ),
    (
        "bert-tokens",
        {"inputs": "x" * 150_000, "parameters": {"stride": 113}},
        "let them overlap less",
    ),
    ("bert-answers", {"question": "x"}, "`inputs` must be"),
    (
        "bert-answers",
        {"question": "x", "context": "y" * 50_000, "parameters": {"max_seq_len": 8}},
        "overlap less",
    ),
    ("bert", {"inputs": ["x"] * 10_001}, "has 10001 entries; at most 10000"),
    (
        "bert-answers",
        {"question": "x", "context": "y", "parameters": {"doc_stride": 900}},
        "at most 0.9 of them",
    ),
    (
        "t5",
        {"inputs": "x", "parameters": {"max_new_tokens": 10**9}},
        "it must be less than or equal to 1024",
    ),
    (
        "t5",
        {"inputs": "x", "parameters": {"num_return_sequences": 4}},
        "as many num_beams",
    ),
    (
        "t5",
        {
            "inputs": "x",
            "parameters": {"num_return_sequences": 3, "num_beams": 2, "do_sample": True},
        },
        "num_beams",
    ),
    ("sentences/sentence-similarity", {"source_sentence": "x", "sentences": []}, "inputs"),
    ("bert-ranking", {"query": "x", "texts": "y"}, "`inputs` must be"),
]


@pytest.mark.parametrize(("kind", "body", "message"), BAD)
def test_a_bad_request_is_refused_alone(served: Serve, kind: str, body: Any, message: str) -> None:
    refuses_alone(served(kind), body, message)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (
            "bert-tokens",
            {"inputs": ["the file is read " * 100] * 3, "parameters": {"stride": 2}},
        ),
        (
            "bert-answers",
            {"inputs": [{"question": "the file", "context": "the file is read " * 100}] * 3},
        ),
    ],
)
def test_the_parts_of_the_texts_of_a_request_are_bounded_together(
    served: Serve, monkeypatch: pytest.MonkeyPatch, kind: str, body: dict[str, Any]
) -> None:
    handler = served(kind).handler
    request = handler.task.read(TaskRequest(body["inputs"], body.get("parameters", {})))
    (parts,) = {
        sum(unit.input == number for unit in handler.task.units([request])) for number in range(3)
    }
    assert parts > 1
    monkeypatch.setattr(handler.task, "most_parts", 3 * parts - 1)
    one, bad = served(kind).ask({**body, "inputs": body["inputs"][:2]}, body)
    assert (one.status, bad.status) == (200, 400)
    assert bad.message.startswith(f"The request makes more than {3 * parts - 1} parts")


def test_for_its_cost_a_text_is_tokenized_once_for_all_labels(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = served("bert-nli").handler
    tokenizer, seen = handler.loaded.tokenizer, list[str]()

    class ObservedTokenizer:
        def __call__(self, text: str, **options: Any) -> Any:
            seen.append(text)
            return tokenizer(text, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    pair = len(tokenizer("the file is read", "the list")["input_ids"])
    monkeypatch.setattr(
        handler.task, "loaded", handler.loaded._replace(tokenizer=ObservedTokenizer())
    )
    body = {"inputs": "the file is read", "parameters": {"candidate_labels": ["the list"] * 3}}
    assert handler.cost({"body": json.dumps(body).encode()}) == 3 * pair
    assert seen == ["the file is read", "the list"]


def test_the_cost_of_a_request_is_its_tokens(served: Serve) -> None:
    handler = served("bert-classification").handler
    one, two = (
        len(handler.loaded.tokenizer(text)["input_ids"]) for text in ("the", "the file is read")
    )
    assert handler.cost({"body": b'{"inputs": ["the", "the file is read"]}'}) == one + two
    assert handler.cost({"body": b"the file is read"}) == two
    assert handler.cost({"body": b'{"inputs": '}) == 0.0
