"""Hugging Face's client, OpenAI's formats, and models in workers."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.features.huggingface.conftest import (
    Answer,
    Serve,
    assert_near,
    mixed_texts,
    start,
)
from tests.support import huggingface_models
from tests.support.huggingface_models import WORDS, image, sound
from tests.support.language_models import tiny_llama
from tests.support.served_model import a_context, answers_of
from tsx_archiver.metadata.modelconfig import HuggingFaceConfig
from tsx_runtime.features.generation.worker import loading as generation
from tsx_runtime.features.generation.worker.pretrained import PretrainedFiles
from tsx_runtime.features.openai.worker import tasks as openai
from tsx_runtime.wire import parse_header_block
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.handler_api.loader import find_entry

hub = pytest.importorskip("huggingface_hub")


@pytest.fixture(scope="module")
def client(served: Serve) -> Iterator[Callable[[str], Any]]:
    """Return `client("kind")`, an InferenceClient of that model."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            with lock:
                answer: Answer = served(self.path.removeprefix("/")).ask(body)[0]
            self.send_response(answer.status)
            self.end_headers()
            self.wfile.write(json.dumps(answer.value).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield lambda name: hub.InferenceClient(f"http://127.0.0.1:{server.server_port}/{name}")
    server.shutdown()
    server.server_close()


def test_hugging_faces_client_can_read_answers_for_texts(
    client: Callable[[str], Any],
) -> None:
    text = WORDS[0]
    assert len(client("bert-classification").text_classification(text, top_k=2)) == 2
    assert (
        client("bert-nli")
        .zero_shot_classification(text, ["a", "b", "c"], multi_label=True)[0]
        .score
        > 0
    )
    assert (
        client("bert-tokens")
        .token_classification(text, aggregation_strategy="simple", ignore_labels=[""])[0]
        .word
    )
    assert len(client("bert-masked").fill_mask("the [MASK]", top_k=3)) == 3
    assert (
        client("bert-answers").question_answering(question="the name", context=text).answer in text
    )
    assert client("sentences").feature_extraction(text, normalize=True).shape == (32,)
    assert (
        len(client("sentences/sentence-similarity").sentence_similarity(text, WORDS[1:]))
        == len(WORDS) - 1
    )
    assert (
        client("t5").summarization(text, generate_parameters={"max_new_tokens": 3}).summary_text
        is not None
    )
    assert (
        client("t5/translation_en_to_de")
        .translation(text, generate_parameters={"max_new_tokens": 3})
        .translation_text
        is not None
    )


def test_hugging_faces_client_can_read_answers_for_images_and_sounds(
    client: Callable[[str], Any],
) -> None:
    picture, speech = image(64, 48), sound(0.3)
    assert client("vit").image_classification(picture, top_k=1)[0].label in (
        "bad",
        "neutral",
        "good",
    )
    assert client("segformer").image_segmentation(picture)[0].mask.size == (
        64,
        48,
    )
    assert client("detr").object_detection(picture, threshold=0.01)[0].box.xmax > 0
    assert len(client("clip").zero_shot_image_classification(picture, ["a", "b"])) == 2
    assert len(client("wav2vec2-classification").audio_classification(speech, top_k=2)) == 2
    assert client("whisper").automatic_speech_recognition(speech).text is not None


def test_a_traced_request_for_embeddings_reports_its_tokens(served: Serve) -> None:
    body = bytearray(json.dumps({"model": "m", "input": ["a b", "c"]}).encode())
    url_path = (b"url_path", b"v1/embeddings")
    model = served("sentences").model
    (plain,) = answers_of(model, body, headers=[url_path])
    (traced,) = answers_of(model, body, headers=[url_path, (b"x-tsx-span", b"1")])
    assert traced[2] == plain[2]
    assert b"x-tsx-span" not in plain[1]
    headers = dict(parse_header_block(traced[1].decode()))
    assert json.loads(headers["x-tsx-span"]) == {
        "gen_ai.provider.name": "tsx",
        "gen_ai.response.model": "m",
        "gen_ai.operation.name": "embeddings",
        "gen_ai.request.model": "m",
        "gen_ai.usage.input_tokens": json.loads(traced[2])["usage"]["prompt_tokens"],
    }


def test_openais_paths_have_openais_response_format(served: Serve) -> None:
    body = {"model": "m", "input": WORDS}
    embeddings = served("sentences").ask(body, url_path="v1/embeddings")[0].value
    assert_near(
        served("sentences").values({"inputs": WORDS})[0],
        [entry["embedding"] for entry in embeddings["data"]],
    )
    plain = served("bert").ask(body, url_path="v1/embeddings")[0].value
    assert np.linalg.norm(plain["data"][0]["embedding"]) == pytest.approx(1.0, abs=1e-5)
    body = {"query": "the name", "documents": WORDS}
    for path in ("v1/rerank", "v2/rerank", "rerank"):
        ranking = served("bert-ranking").ask(body, url_path=path)[0].value["results"]
        assert sorted(entry["index"] for entry in ranking) == [*range(len(WORDS))]
    bad_answer, good_answer = served("sentences").ask(
        {"model": "m", "input": 5}, {"input": "x"}, url_path="v1/embeddings"
    )
    assert (bad_answer.status, good_answer.status) == (400, 200)
    for path in ("v1/embeddings", "v1/chat/completions"):
        (answer,) = served("bert-classification").ask({"model": "m", "input": "x"}, url_path=path)
        assert answer.status == 400
        assert (
            f"is of the task text-classification, which does not answer /{path}"
            in answer.value["message"]
        )


def test_equal_requests_in_both_apis_have_the_same_cost(served: Serve) -> None:
    for kind, openais, native in (
        ("sentences", {"model": "m", "input": WORDS}, {"inputs": WORDS}),
        (
            "bert-ranking",
            {"query": "the name", "documents": WORDS},
            {"inputs": {"query": "the name", "texts": WORDS}},
        ),
    ):
        cost = served(kind).handler.cost
        tokens = [cost({"body": json.dumps(body).encode()}) for body in (openais, native)]
        assert tokens[0] == tokens[1] > len(WORDS)


def test_computing_the_cost_of_a_transcription_keeps_its_fields(served: Serve) -> None:
    model = served("whisper")
    form = {"file": sound(0.2), "model": b"m"}
    assert model.handler.cost(form) == 1
    openai.read("v1/audio/transcriptions", form)


@pytest.mark.parametrize(
    ("task", "config", "message"),
    [
        (
            "text-generation",
            {},
            "huggingface.task is 'text-generation'",
        ),
        (
            "text-classification",
            {"huggingface": {"dtype": "fp8"}},
            "huggingface.dtype: 'fp8' is invalid",
        ),
        ("image-classification", {}, "cannot be loaded for the task 'image-classification'"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_an_error(
    model_root: Path, tmp_path: Path, task: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        start(huggingface_models.model("bert-classification", model_root), task, tmp_path, config)


def test_the_error_for_an_incomplete_directory_tells_what_to_do(
    model_root: Path, tmp_path: Path
) -> None:
    source = huggingface_models.model("bert-classification", model_root)
    for number, (left_out, message) in enumerate(
        [
            (
                "tokenizer",
                "has no tokenizer. Save it beside",
            ),
            ("", "Is the directory complete"),
        ]
    ):
        copy = tmp_path / str(number)
        shutil.copytree(
            source, copy / "m", ignore=shutil.ignore_patterns(f"{left_out}*") if left_out else None
        )
        if not left_out:
            os.truncate(copy / "m" / "model.safetensors", 1000)
        with pytest.raises(LoadError, match=re.escape(message)):
            start(copy / "m", "text-classification", copy)


def files_of(directory: Path) -> PretrainedFiles:
    return PretrainedFiles(
        directory, {}, "text-generation", HuggingFaceConfig(), "auto", torch.device("cpu"), False
    )


def load_language_model(directory: Path) -> None:
    from transformers import AutoConfig

    generation.load_model(files_of(directory), AutoConfig.from_pretrained(directory))


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


@pytest.mark.parametrize("adapters", [(), ("films",)])
def test_a_pickle_with_more_than_weights_is_refused(
    model_root: Path, tmp_path: Path, adapters: tuple[str, ...]
) -> None:
    base = tmp_path / "base"
    shutil.copytree(huggingface_models.model("bert-classification", model_root), base)
    folder, name = base, "pytorch_model.bin"
    if adapters:
        pytest.importorskip("peft")
        huggingface_models.adapter(base, "films", 1)
        folder, name = base / "adapters" / "films", "adapter_model.bin"
    next(folder.glob("*model.safetensors")).unlink()
    torch.save({"weight": Hostile(tmp_path / "ran")}, folder / name)
    with pytest.raises(LoadError, match="a pickle that holds more than weights"):
        start(base, "text-classification", tmp_path, adapters=adapters)
    if not adapters:
        with pytest.raises(LoadError, match="a pickle that holds more than weights"):
            load_language_model(base)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("trusted", "offline"), [(False, "1"), (True, None)])
def test_a_worker_of_a_packed_model_downloads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool, offline: str | None
) -> None:
    context = a_context()
    context.system_properties.update(model_dir=str(tmp_path), trust_remote_code=trusted)
    monkeypatch.setattr(os, "environ", {})
    find_entry("huggingface", tmp_path, context)
    assert os.environ.get("HF_HUB_OFFLINE") == offline
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoModel": "org/other--modeling.Own"}}')
    if trusted:
        with pytest.raises(LoadError, match=r"another repository: org/other--modeling\.Own"):
            find_entry("huggingface", tmp_path, context)
    else:
        find_entry("huggingface", tmp_path, context)
    (tmp_path / "config.json").write_text("{}")
    index = '{"weight_map": {"a": "../secret.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(LoadError, match="which files have the weights"):
        find_entry("huggingface", tmp_path, context)


def test_the_progress_of_loading_is_logged(
    model_root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tsx_runtime.features.generation.worker.pretrained.LOG_INTERVAL_S", 0.0)
    with caplog.at_level("INFO", "tsx.worker"):
        start(
            huggingface_models.model("bert-classification", model_root),
            "text-classification",
            tmp_path,
        )
    lines = [record.getMessage() for record in caplog.records if record.name == "tsx.worker"]
    assert lines[0].startswith("loading 1 file(s) of weights, 0.")
    assert any(line.startswith("Loading weights: 20 of ") for line in lines)
    assert any(line.startswith("warm: the first request took") for line in lines)
    caplog.clear()
    with caplog.at_level("INFO", "tsx.worker"):
        load_language_model(tiny_llama(tmp_path / "llama"))
    assert "Loading weights: 10 of 20" in caplog.text


@pytest.fixture(scope="module")
def server(start_server: Any, model_root: Path) -> Iterator[Any]:
    """Start a server with a classifier of two workers."""
    with start_server() as running:
        model_dir = running.settings.model_store / "classes"
        (model_dir / "MAR-INF").mkdir(parents=True)
        manifest = {
            "runtime": "python",
            "model": {"modelName": "classes", "handler": "huggingface"},
            "huggingface": {"task": "text-classification"},
        }
        (model_dir / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
        directory = huggingface_models.model("bert-classification", model_root)
        shutil.copytree(directory, model_dir / "huggingface_model")
        running.register("classes", initial_workers=2)
        yield running


def test_a_server_answers_many_clients_in_batches(server: Any, served: Serve) -> None:
    texts = mixed_texts(48)
    with ThreadPoolExecutor(16) as pool:
        answers = list(
            pool.map(
                lambda text: server.inference.post(
                    "/predictions/classes", json={"inputs": text}
                ).json(),
                texts,
            )
        )
    assert_near(
        served("bert-classification").values(*[{"inputs": text} for text in texts]),
        answers,
    )
    version = server.registry.models["classes"].default
    assert max(server.registry.models["classes"].versions[version].stats.batch_sizes) > 1
    response = server.inference.post(
        "/predictions/classes", json={"inputs": "x", "parameters": {"topk": 1}}
    )
    assert response.status_code == 400
    assert "has no parameter 'topk'" in response.json()["message"]


def test_the_weights_of_two_workers_are_one_mapped_file(server: Any) -> None:
    version = server.registry.models["classes"]
    pids = [worker.pid for worker in version.versions[version.default].workers]
    assert len(pids) == 2
    for pid in pids:
        blocks = Path(f"/proc/{pid}/smaps").read_text().split("\nVmFlags")
        mapped_blocks = [block for block in blocks if "model.safetensors" in block]
        assert mapped_blocks, "the file of the weights is not mapped"
        dirty = sum(
            int(line.split()[1])
            for block in mapped_blocks
            for line in block.splitlines()
            if line.startswith("Private_Dirty")
        )
        assert dirty == 0


def test_raw_bodies_are_accepted(server: Any) -> None:
    assert (
        server.inference.post("/predictions/classes", content=b"the file is read").status_code
        == 200
    )
    encoded = base64.b64encode(b"x").decode()
    assert (
        server.inference.post("/predictions/classes", data={"inputs": encoded}).status_code == 400
    )
