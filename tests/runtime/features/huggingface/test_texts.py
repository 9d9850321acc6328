"""Tasks for texts: answers equal transformers' pipelines; bad requests are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.features.huggingface.conftest import (
    Serve,
    assert_near,
    assert_refused_alone,
    mixed_texts,
    start,
)
from tests.support import huggingface_models
from tests.support.huggingface_models import WORDS
from tsx_runtime.features.generation.worker.interface import TaskRequest
from tsx_runtime.features.generation.worker.media_files import to_json_value


@pytest.mark.parametrize("kind", ["bert-classification", "roberta-classification"])
def test_classification_equals_the_pipeline_in_a_batch_of_mixed_lengths(
    served: Serve, kind: str
) -> None:
    model = served(kind)
    texts = mixed_texts(24, max_words=9)
    expected = model.pipeline()(texts, top_k=None)
    assert_near(
        [[entry] for entry in expected], model.values(*[{"inputs": text} for text in texts])
    )
    assert_near(expected, model.values({"inputs": texts})[0])
    # With an envelope, the handler gets a parsed request.
    (instance,) = model.model.entry.call([{"inputs": texts[0]}], model.model.context)
    assert_near([expected[0]], json.loads(instance))


def test_parameters_apply_to_one_request_only(served: Serve) -> None:
    model = served("bert-classification")
    pipeline = model.pipeline()
    default, best, raw, pair = model.values(
        b"the file is read",
        {"inputs": "the file is read", "parameters": {"top_k": 1}},
        {"inputs": "the file is read", "parameters": {"function_to_apply": "none"}},
        {"inputs": {"text": "the file", "text_pair": "is read"}},
    )
    assert_near([pipeline("the file is read", top_k=None)], default)
    assert_near([pipeline("the file is read", top_k=1)], best)
    assert_near([pipeline("the file is read", top_k=None, function_to_apply="none")], raw)
    assert_near([pipeline({"text": "the file", "text_pair": "is read"}, top_k=None)], pair)


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_token_classification_equals_the_pipeline(served: Serve, strategy: str) -> None:
    model = served("bert-tokens")
    texts = mixed_texts(9, seed=1)
    expected = model.pipeline()(texts, aggregation_strategy=strategy)
    bodies = [{"inputs": text, "parameters": {"aggregation_strategy": strategy}} for text in texts]
    assert_near(to_json_value(expected), model.values(*bodies))


def test_token_classification_splits_a_long_text_if_stride_is_set(
    served: Serve,
) -> None:
    model = served("bert-tokens")
    text = " ".join(WORDS * 12)
    expected = model.pipeline()(text, stride=16, aggregation_strategy="simple")
    answer = model.values(
        {"inputs": "the file"},
        {"inputs": text, "parameters": {"stride": 16, "aggregation_strategy": "simple"}},
    )[1]
    assert_near(to_json_value(expected), answer)


def test_masked_words_equal_the_pipeline(served: Serve) -> None:
    model = served("bert-masked")
    pipeline = model.pipeline()
    texts = [f"the [MASK] {text}" for text in mixed_texts(8, seed=2)] + ["[MASK] name [MASK]"]
    assert_near(
        [pipeline(text) for text in texts], model.values(*[{"inputs": text} for text in texts])
    )
    body = {"inputs": "the [MASK]", "parameters": {"targets": ["file", "name"], "top_k": 2}}
    assert_near(pipeline("the [MASK]", targets=["file", "name"], top_k=2), model.values(body)[0])


def test_zero_shot_equals_the_pipeline_with_different_labels(served: Serve) -> None:
    model = served("bert-nli")
    pipeline = model.pipeline()
    cases = [
        (text, WORDS[: 1 + number % 4], number % 2 == 0)
        for number, text in enumerate(mixed_texts(8, seed=3))
    ]
    bodies = [
        {"inputs": text, "parameters": {"candidate_labels": labels, "multi_label": multi}}
        for text, labels, multi in cases
    ]
    for (text, labels, multi), answer in zip(cases, model.values(*bodies), strict=True):
        expected = pipeline(text, candidate_labels=labels, multi_label=multi)
        assert_near(
            [
                {"label": label, "score": score}
                for label, score in zip(expected["labels"], expected["scores"], strict=True)
            ],
            answer,
        )


def test_token_vectors_equal_the_pipeline(served: Serve) -> None:
    model = served("bert")
    texts = mixed_texts(9, seed=4)
    assert_near(model.pipeline()(texts), model.values(*[{"inputs": text} for text in texts]))


def test_an_answer_is_the_most_likely_span_of_whole_words(served: Serve) -> None:
    """Compare with all spans of the model, since transformers 5 has no pipeline for this task."""
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    model = served("bert-answers")
    bare, tokenizer = (
        AutoModelForQuestionAnswering.from_pretrained(model.directory),
        AutoTokenizer.from_pretrained(model.directory),
    )
    cases = [("the name", text) for text in mixed_texts(7, seed=5)]
    answers = model.values(
        *[{"inputs": {"question": question, "context": context}} for question, context in cases]
    )
    for (question, context), answer in zip(cases, answers, strict=True):
        encoded = tokenizer(question, context, return_tensors="pt", return_offsets_mapping=True)
        offsets, sequences = encoded.pop("offset_mapping")[0].tolist(), encoded.sequence_ids(0)
        with torch.inference_mode():
            output = bare(**encoded)
        positions = [index for index, sequence in enumerate(sequences) if sequence == 1]
        start, end = (
            logits[0, [0, *positions]].softmax(0)[1:].tolist()
            for logits in (output.start_logits, output.end_logits)
        )
        pairs = [
            (start[i] * end[j], positions[i], positions[j])
            for i in range(len(positions))
            for j in range(i, min(i + 15, len(positions)))
        ]
        score, first, last = max(pairs)
        assert answer["score"] == pytest.approx(score, rel=1e-3)
        assert answer["answer"] == context[answer["start"] : answer["end"]]
        assert answer["start"] <= offsets[first][0]
        assert offsets[last][1] <= answer["end"]
        assert context[answer["start"] - 1 : answer["start"]] in ("", " ")


def test_a_long_context_is_split_and_may_give_several_answers(served: Serve) -> None:
    model = served("bert-answers")
    context = " ".join(mixed_texts(30, seed=6))
    body = {
        "question": "the name",
        "context": context,
        "parameters": {"top_k": 3, "doc_stride": 16},
    }
    short_answer, long_answers = model.values(
        {"question": "the name", "context": "the file is read"}, body
    )
    assert len(long_answers) == 3
    assert long_answers == sorted(long_answers, key=lambda entry: -entry["score"])
    assert all(entry["answer"] == context[entry["start"] : entry["end"]] for entry in long_answers)
    assert_near(
        short_answer,
        model.values({"inputs": {"question": "the name", "context": "the file is read"}})[0],
    )


def test_the_empty_answer_is_among_the_candidates_if_allowed(served: Serve) -> None:
    model = served("bert-answers")
    body = {
        "question": "the name",
        "context": WORDS[0],
        "parameters": {"handle_impossible_answer": True, "top_k": 200},
    }
    assert {"answer": "", "start": 0, "end": 0} in [
        {key: entry[key] for key in ("answer", "start", "end")} for entry in model.values(body)[0]
    ]


def test_generated_texts_equal_those_of_generate(served: Serve) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model = served("t5")
    bare, tokenizer = (
        AutoModelForSeq2SeqLM.from_pretrained(model.directory),
        AutoTokenizer.from_pretrained(model.directory),
    )
    cases = [
        (text, {"max_new_tokens": 4 + number % 2, "num_beams": 1 + number % 2})
        for number, text in enumerate(mixed_texts(8, seed=7))
    ]
    answers = model.values(
        *[
            {"inputs": text, "parameters": {"generate_parameters": options}}
            for text, options in cases
        ]
    )
    for (text, options), answer in zip(cases, answers, strict=True):
        tokens = bare.generate(**tokenizer(text, return_tensors="pt"), **options)
        assert answer == [{"summary_text": tokenizer.decode(tokens[0], skip_special_tokens=True)}]


@pytest.mark.parametrize(
    ("task", "name"),
    [("translation_en_to_de", "translation_text"), ("text2text-generation", "generated_text")],
)
def test_each_task_has_its_own_name_for_the_text(served: Serve, task: str, name: str) -> None:
    body = {"inputs": "the file", "parameters": {"max_new_tokens": 3}}
    ((answer,),) = served(f"t5/{task}").values(body)
    assert list(answer) == [name]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_answers_hardly_depend_on_the_batch(
    model_root: Path, tmp_path: Path, precision: str
) -> None:
    directory = huggingface_models.model("bert-classification", model_root)
    model = start(directory, "text-classification", tmp_path, {"huggingface": {"dtype": precision}})
    assert model.handler.precision == precision
    bodies = [{"inputs": text} for text in mixed_texts(12)]
    single_answers, batch_answers = model.values_alone(*bodies), model.values(*bodies)
    scores = [{entry["label"]: entry["score"] for entry in answer[0]} for answer in single_answers]
    assert_near(
        scores,
        [{entry["label"]: entry["score"] for entry in answer[0]} for answer in batch_answers],
        0.05,
    )


BAD = {
    "bert-classification": [
        (b"", "empty body"),
        (b'{"inputs": ', "cannot be read as JSON"),
        (b"\xff\xfe", "neither JSON nor text"),
        ({"inputs": []}, "`inputs` is empty"),
        ({"inputs": " "}, "is empty"),
        ({"inputs": 5}, "must be text"),
        ({"input": "x"}, "has no `inputs`, but 'input'. Send"),
        ({"inputs": "x", "parameters": {"topk": 1}}, "has no parameter 'topk'; it takes"),
        ({"inputs": "x", "parameters": {"top_k": "1"}}, 'is "1": it must be a valid integer.'),
        ({"inputs": "x", "parameters": [1]}, "`parameters` is a list"),
        ({"inputs": "x", "parameters": {"adapter": "a"}}, "no adapter 'a'"),
        ({"inputs": "\ud800"}, "surrogates not allowed"),
    ],
    "bert-masked": [
        ({"inputs": "the file"}, "has no [MASK]"),
        (
            {"inputs": "the [MASK]", "parameters": {"targets": [" "]}},
            "At least one target must be provided",
        ),
        (
            {"inputs": "[MASK]" * 11, "parameters": {"top_k": 1000}},
            "11000 words",
        ),
    ],
    "bert-nli": [
        (
            {"inputs": "x", "parameters": {"candidate_labels": ["the " * 400]}},
            "tokens; the model takes at most 128",
        ),
        ({"inputs": "x"}, "needs the parameter 'candidate_labels'"),
        (
            {
                "inputs": "x",
                "parameters": {"candidate_labels": "a", "hypothesis_template": "{:>99999999}"},
            },
            "must have {} in the place of the label",
        ),
        (
            {"inputs": ["x"] * 101, "parameters": {"candidate_labels": ["a"] * 100}},
            "Texts times labels are 10100; at most 10000",
        ),
        (
            {"inputs": ["x", "y" * 20_000], "parameters": {"candidate_labels": ["a" * 10] * 1000}},
            "20021000 characters together; at most 10000000",
        ),
        (
            {
                "inputs": "x",
                "parameters": {"candidate_labels": "a", "hypothesis_template": "{}" + "x" * 1000},
            },
            "it must have at most 1000 characters",
        ),
    ],
    "bert-ranking": [
        ({"query": "x" * 10_000, "texts": ["y"] * 1000}, "have 10001000 characters together"),
        ({"query": "x", "texts": "y"}, "`inputs` must be"),
    ],
    "bert-tokens": [
        ({"inputs": "x", "parameters": {"stride": 125}}, "parts that overlap more are too many"),
        ({"inputs": "x" * 150_000, "parameters": {"stride": 113}}, "let them overlap less"),
    ],
    "bert-answers": [
        ({"question": "x"}, "`inputs` must be"),
        (
            {"question": "x", "context": "y" * 50_000, "parameters": {"max_seq_len": 8}},
            "overlap less",
        ),
        (
            {"question": "x", "context": "y", "parameters": {"doc_stride": 900}},
            "at most 0.9 of them",
        ),
    ],
    "bert": [
        ({"inputs": ["x"] * 10_001}, "has 10001 entries; at most 10000"),
    ],
    "t5": [
        (
            {"inputs": "x", "parameters": {"max_new_tokens": 10**9}},
            "it must be less than or equal to 1024",
        ),
        ({"inputs": "x", "parameters": {"num_return_sequences": 4}}, "as many num_beams"),
        (
            {
                "inputs": "x",
                "parameters": {"num_return_sequences": 3, "num_beams": 2, "do_sample": True},
            },
            "num_beams",
        ),
    ],
    "sentences/sentence-similarity": [
        ({"source_sentence": "x", "sentences": []}, "inputs"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "body", "message"), [(kind, *row) for kind, rows in BAD.items() for row in rows]
)
def test_an_invalid_request_fails_alone(served: Serve, kind: str, body: Any, message: str) -> None:
    assert_refused_alone(served(kind), body, message)


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
def test_the_total_number_of_chunks_of_a_request_is_limited(
    served: Serve, monkeypatch: pytest.MonkeyPatch, kind: str, body: dict[str, Any]
) -> None:
    handler = served(kind).handler
    request = handler.task.read(TaskRequest(body["inputs"], body.get("parameters", {})))
    (parts,) = {
        sum(unit.input == number for unit in handler.task.units([request])) for number in range(3)
    }
    assert parts > 1
    monkeypatch.setattr(handler.task, "max_parts", 3 * parts - 1)
    good_answer, bad_answer = served(kind).ask({**body, "inputs": body["inputs"][:2]}, body)
    assert (good_answer.status, bad_answer.status) == (200, 400)
    assert bad_answer.message.startswith(f"The request makes more than {3 * parts - 1} parts")


def test_the_cost_tokenizes_a_text_once_for_all_labels(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = served("bert-nli").handler
    tokenizer, tokenized_texts = handler.loaded.tokenizer, list[str]()

    class ObservedTokenizer:
        def __call__(self, text: str, **options: Any) -> Any:
            tokenized_texts.append(text)
            return tokenizer(text, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    pair = len(tokenizer("the file is read", "the list")["input_ids"])
    monkeypatch.setattr(
        handler.task, "loaded", handler.loaded._replace(tokenizer=ObservedTokenizer())
    )
    body = {"inputs": "the file is read", "parameters": {"candidate_labels": ["the list"] * 3}}
    assert handler.cost({"body": json.dumps(body).encode()}) == 3 * pair
    assert tokenized_texts == ["the file is read", "the list"]


def test_the_cost_of_a_request_is_its_number_of_tokens(served: Serve) -> None:
    handler = served("bert-classification").handler
    short_answer, long_answers = (
        len(handler.loaded.tokenizer(text)["input_ids"]) for text in ("the", "the file is read")
    )
    assert (
        handler.cost({"body": b'{"inputs": ["the", "the file is read"]}'})
        == short_answer + long_answers
    )
    assert handler.cost({"body": b"the file is read"}) == long_answers
    assert handler.cost({"body": b'{"inputs": '}) == 0.0
