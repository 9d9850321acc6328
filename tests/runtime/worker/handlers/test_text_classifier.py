"""The handler text_classifier: probabilities of classes, and the weights of words."""

from __future__ import annotations

import collections
import inspect
import json
from typing import Any

import pytest
import torch

from tests.runtime.worker.conftest import StartWorker, Worker, a_request
from tests.runtime.worker.handlers.conftest import script_bytes, torch_bytes
from tsx_runtime.worker.handlers.steps.text_cleaning import (
    expand_contractions,
    ngrams_iterator,
    remove_accents,
    remove_html_tags,
    remove_punctuation,
    tokenize,
)

WORDS = ["<unk>", "good", "bad", "day", "it", "is", "cafe", "good day"]


class Net(torch.nn.Module):
    """A model in which `good` adds to class 1, `bad` to class 2, and other words to class 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(8, 3, mode="sum")

    def forward(self, text: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.embedding(text, offsets)
        return scores


def weights() -> dict[str, torch.Tensor]:
    table = torch.zeros(8, 3)
    for number, column, value in ((1, 1, 2.0), (2, 2, 3.0), (7, 1, 1.0)):
        table[number, column] = value
    return {"embedding.weight": table}


FILES: dict[str, str | bytes] = {
    "model.py": f"import torch\n\n\n{inspect.getsource(Net)}",
    "weights.pth": torch_bytes(weights()),
    "source_vocab.pt": torch_bytes({token: number for number, token in enumerate(WORDS)}),
    "index_to_name.json": json.dumps({"0": "neither", "1": "good", "2": "bad"}),
}
EAGER = {"serializedFile": "weights.pth", "modelFile": "model.py"}


def start(
    start_worker: StartWorker, files: dict[str, str | bytes] | None = None, **order: Any
) -> Worker:
    return start_worker(
        files={**FILES, **(files or {})}, **{"model": EAGER, "handler": "text_classifier", **order}
    )


def probabilities(*counts: float) -> dict[str, Any]:
    return dict(
        zip(
            ["neither", "good", "bad"],
            torch.softmax(torch.tensor(counts, dtype=torch.float32), 0).tolist(),
            strict=True,
        )
    )


def test_each_text_of_a_batch_gets_the_models_probabilities(start_worker: StartWorker) -> None:
    worker = start(start_worker)
    assert worker.loaded, worker.report
    form = b'--x\r\nContent-Disposition: form-data; name="data"\r\n\r\na good day\r\n--x--\r\n'
    answers = worker.ask(
        a_request(b"<p>It's a <b>GOOD</b>, good day!</p>", "text/plain"),
        "Café, bad".encode(),
        a_request(form, "multipart/form-data; boundary=x"),
        a_request({"a": 1}),
        b"\xff\xfe",
        a_request(b"", "text/plain"),
        a_request(b"plain text", "application/x-www-form-urlencoded"),
    )
    assert [answer.status for answer in answers] == [200, 200, 200, 400, 400, 400, 400]
    for answer, counts in zip(answers, [(0, 5, 0), (0, 0, 3), (0, 3, 0)], strict=False):
        assert json.loads(answer.body) == pytest.approx(probabilities(*counts))
    for answer, message in zip(
        answers[3:], ("a dict, not text", "UTF-8", "vocabulary", "text/plain"), strict=True
    ):
        assert message in answer.message


def test_an_explanation_names_the_words_and_their_weights(start_worker: StartWorker) -> None:
    net = Net()
    net.load_state_dict(weights())
    for files, model in (
        ({}, EAGER),
        ({"script.pt": script_bytes(net)}, {"serializedFile": "script.pt"}),
    ):
        request = a_request(b"It is a good day", query=b"target=1", explain="True")
        (insight,) = start(start_worker, files, model=model).values(request)
        assert insight["words"] == ["it", "is", "a", "good", "day"]
        # The pair "good day" has the weight 1: one half for each of its words.
        length = (2.5**2 + 0.5**2) ** 0.5
        assert insight["importances"] == pytest.approx(
            [0, 0, 0, 2.5 / length, 0.5 / length], abs=1e-4
        )


@pytest.mark.parametrize(
    ("files", "config", "message"),
    [
        ({"source_vocab.pt": torch_bytes(7)}, {}, "source_vocab.pt holds a int, not a vocabulary"),
        ({"source_vocab.pt": torch_bytes(WORDS)}, {}, None),
        ({"source_vocab.pt": torch_bytes(collections.OrderedDict(good=1, bad=2))}, {}, None),
        (
            {"source_vocab.pt": torch_bytes(inspect.Parameter("x", inspect.Parameter.VAR_KEYWORD))},
            {},
            "torch.save(vocab.get_stoi(), 'source_vocab.pt')",
        ),
        (
            {"source_vocab.pt": torch_bytes(collections.ChainMap({"good": 1}))},
            {"weightsOnly": False},
            None,
        ),
    ],
)
def test_a_vocabulary_is_plain_data_unless_the_archive_is_trusted(
    start_worker: StartWorker,
    files: dict[str, str | bytes],
    config: dict[str, Any],
    message: str | None,
) -> None:
    worker = start(start_worker, files, model_config=config)
    if message is None:
        assert worker.values(b"good")[0] == pytest.approx(probabilities(0, 2, 0))
    else:
        assert not worker.loaded
        assert message in worker.report["message"]


def test_the_vocabulary_may_have_its_name_in_old_archives(
    start_worker: StartWorker,
) -> None:
    files = {"vocab.pt": torch_bytes({"good": 1})}
    worker = start(start_worker, files, model={**EAGER, "sourceVocab": "vocab.pt"})
    assert worker.values(b"a good bad day")[0] == pytest.approx(probabilities(0, 2, 0))


def test_the_error_names_a_missing_vocabulary(start_worker: StartWorker) -> None:
    worker = start_worker(
        files={name: FILES[name] for name in ("model.py", "weights.pth")},
        model=EAGER,
        handler="text_classifier",
    )
    assert "source_vocab.pt is not in the archive" in worker.report["message"]


@pytest.mark.parametrize(
    ("step", "text", "result"),
    [
        (remove_html_tags, "naïve <b>bold</b><br/>x &amp; y", "naïve boldx  y"),
        (
            expand_contractions,
            "I can't, won't; it's what's he'd've y'all",
            "I cannot, will not; it is what is he would have you all",
        ),
        (
            expand_contractions,
            "Can\u2019t WON'T the dog's 'n' where'd",
            "Cannot Will not the dogs n where did",
        ),
        (remove_accents, "Café naïve", "Cafe naive"),
        (remove_punctuation, "Hello, it-s_fine (a.b) $5.00", "Hello itsfine ab 500"),
        (tokenize, 'a"b a;b a:b a<br />b', ["ab", "a", "b", "a", "b", "a", "b"]),
        (
            tokenize,
            "Hello, world! it-s (a.b) 'q' \"z\"",
            ["hello", ",", "world", "!", "it-s", "(", "a", ".", "b", ")", "'", "q", "'", "z"],
        ),
    ],
)
def test_each_cleaning_step_equals_torchserves(step: Any, text: str, result: Any) -> None:
    assert step(text) == result


def test_ngrams_are_sorted_by_length() -> None:
    assert list(ngrams_iterator(["a", "b", "c"], 3)) == ["a", "b", "c", "a b", "b c", "a b c"]
