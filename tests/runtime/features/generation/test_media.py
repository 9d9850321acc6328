"""Chats with images and sounds, whose answers must equal those of `generate`."""

from __future__ import annotations

import asyncio
import copy
import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.generation.continuous_batching.requests import RequestState

from tests.runtime.features.generation.conftest import Run
from tests.support.multimodal_models import DECODER, png, qwen2_vl, tiny_model, wav
from tsx_archiver.metadata.modelconfig import HuggingFaceConfig
from tsx_runtime.features.generation.worker import media as media_module
from tsx_runtime.features.generation.worker.engines import transformers_engine
from tsx_runtime.features.generation.worker.engines.transformers_engine import TransformersEngine
from tsx_runtime.features.generation.worker.generator import TextGenerator
from tsx_runtime.features.generation.worker.interface import Prompt, Sampling, Tokens
from tsx_runtime.features.generation.worker.loading import load_model
from tsx_runtime.features.generation.worker.media import (
    MediaFile,
    SequenceEmbeddings,
    embed_prompt,
)
from tsx_runtime.features.generation.worker.pretrained import PretrainedFiles
from tsx_runtime.worker.codecs.bodies import RefusedField
from tsx_runtime.worker.exceptions import InvalidInput, LoadError

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = {"llava": "image", "idefics3": "image", "qwen2_audio": "audio"}
FILES = {
    "image": [png(color, size) for color in ("red", "lime") for size in ((40, 30), (70, 90))],
    "audio": [wav(frequency, seconds) for frequency in (300, 900) for seconds in (0.4, 1.3)],
}
SAMPLING = Sampling(max_tokens=12, temperature=0.0, logprobs=True, top_logprobs=2)
END = int(DECODER["eos_token_id"])


class Served:
    """A loaded model, its engine and its generator of prompts."""

    def __init__(self, directory: Path, run: Run, **limits: Any) -> None:
        config = AutoConfig.from_pretrained(directory)
        settings = HuggingFaceConfig(**limits)
        files = PretrainedFiles(directory, {}, "", settings, "auto", DEVICE, False)
        self.model, media = load_model(files, config)
        assert media is not None
        self.media, self.run = media, run
        self.engine = TransformersEngine(self.model, {}, settings, [END])
        run(self.engine.start())
        metrics: Any = None
        tokenizer = media.processor.tokenizer
        self.generator = TextGenerator(
            tokenizer, self.engine, None, len(tokenizer), metrics, self.media
        )

    def prompt(self, text: str, *files: bytes) -> Prompt:
        kind = next(iter(self.media._samples))
        content: list[dict[str, Any]] = [{"type": kind, kind: ""} for _ in files]
        chat = [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
        media_files = [MediaFile(kind, data, f"files[{index}]") for index, data in enumerate(files)]
        return self.generator.encode_chat(chat, files=media_files)

    def expected(self, prompt: Prompt) -> tuple[list[int], list[float]]:
        """Return the tokens and their log probabilities from `generate`, for one prompt alone."""
        features = dict(prompt.media.features) if prompt.media else {}
        for name in ("attention_mask", "token_type_ids"):
            features.pop(name, None)
        ids = torch.tensor([prompt.token_ids], device=DEVICE)
        result = self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **{name: value.to(DEVICE) for name, value in features.items()},
            max_new_tokens=SAMPLING.max_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            eos_token_id=END,
        )
        tokens = result.sequences[0, len(prompt.token_ids) :].tolist()
        rows = zip(result.logits, tokens, strict=True)
        return tokens, [row[0].log_softmax(-1)[token].item() for row, token in rows]

    async def answer(self, prompt: Prompt, sampling: Sampling = SAMPLING) -> list[Tokens]:
        async with aclosing(
            self.engine.generate(prompt.token_ids, sampling, prompt.media)
        ) as stream:
            return [tokens async for tokens in stream]

    def answers(self, prompts: Sequence[Prompt]) -> list[tuple[list[int], list[float]]]:
        async def answer_all() -> Any:
            return await asyncio.gather(*map(self.answer, prompts))

        return [
            (
                [token for part in parts for token in part.token_ids],
                [entry.logprob for part in parts for entry in part.logprobs],
            )
            for parts in self.run(answer_all())
        ]


def assert_equal_answers(served: Served, prompts: Sequence[Prompt]) -> None:
    for prompt, (tokens, logprobs) in zip(prompts, served.answers(prompts), strict=True):
        expected_tokens, expected_logprobs = served.expected(prompt)
        assert tokens == expected_tokens
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)


@contextmanager
def serving(directory: Path, run: Run, **limits: Any) -> Iterator[Served]:
    served = Served(directory, run, **limits)
    yield served
    run(served.engine.close())


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: tiny_model(root / kind, kind) for kind in KINDS}


@pytest.fixture(
    scope="module",
    params=["llava", pytest.param("idefics3", marks=pytest.mark.nightly), "qwen2_audio"],
)
def served(request: Any, directories: dict[str, Path], run: Run) -> Iterator[Served]:
    with serving(directories[request.param], run) as served:
        yield served


@pytest.fixture(scope="module")
def llava(directories: dict[str, Path], run: Run) -> Iterator[Served]:
    with serving(directories["llava"], run) as served:
        yield served


def files_of(served: Served) -> list[bytes]:
    return FILES[next(iter(served.media._samples))]


def test_an_answer_equals_generate(served: Served) -> None:
    assert_equal_answers(served, [served.prompt("What is it?", files_of(served)[0])])


def test_answers_in_a_batch_with_texts_equal_generate(served: Served) -> None:
    files = files_of(served)
    assert_equal_answers(
        served,
        [
            served.prompt("Beautiful is better"),
            *(served.prompt("What is it?", file) for file in files),
            served.prompt("Which differs?", *files[:3]),
            served.prompt("a"),
            served.prompt("What is it?", files[0]),
        ],
    )


def test_files_of_equal_size_have_answers_of_their_own(served: Served) -> None:
    files = files_of(served)
    prompts = [served.prompt("Now is better than never. " * 4, files[i]) for i in (0, 2)]
    first, second = prompts
    assert first.token_ids == second.token_ids
    assert first.media
    assert second.media
    assert first.media.digest != second.media.digest
    assert_equal_answers(served, [first])
    assert_equal_answers(served, [second])
    assert served.answers([first])[0][0] != served.answers([second])[0][0]


def test_a_long_prompt_is_read_in_several_steps(
    directories: dict[str, Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_engine, "CPU_STEP_TOKENS", 7)
    with serving(directories["llava"], run, max_sequences=2) as served:
        lengths = set[int]()
        io = served.engine._engines[None]._manager.batch_processor.inputs_and_outputs
        prepare = io.prepare_batch_tensors

        def record(requests_in_batch: Any, **options: Any) -> None:
            lengths.update(request.query_length for request in requests_in_batch)
            prepare(requests_in_batch, **options)

        monkeypatch.setattr(io, "prepare_batch_tensors", record)
        long_text = "In the face of ambiguity, refuse the temptation to guess. " * 3
        prompts = [served.prompt(long_text, *FILES["image"][:3]), served.prompt("a", png("blue"))]
        assert_equal_answers(served, prompts)
        assert max(lengths) <= 7


def test_a_sequence_that_lost_its_cache_keeps_its_embeddings() -> None:
    embeddings = SequenceEmbeddings(torch.zeros(1, 1))
    assert copy.deepcopy(embeddings) is embeddings


@pytest.mark.nightly
def test_a_sequence_that_lost_its_cache_reads_its_media_again(
    directories: dict[str, Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = Sampling(max_tokens=90, temperature=0.0, logprobs=True)
    monkeypatch.setattr("tests.runtime.features.generation.test_media.SAMPLING", sampling)
    with serving(directories["llava"], run, cache_memory=71_000, max_sequences=4) as served:
        resets, reset = list[Any](), RequestState.create_equivalent_initial_request

        def count_resets(state: Any) -> Any:
            resets.append(None)
            return reset(state)

        monkeypatch.setattr(RequestState, "create_equivalent_initial_request", count_resets)
        prompts = [served.prompt("Count to ten. " * 3, file) for file in FILES["image"]]

        async def answer_all() -> Any:
            return await asyncio.gather(*(served.answer(prompt, sampling) for prompt in prompts))

        answers = run(answer_all())
        for prompt, parts in zip(prompts, answers, strict=True):
            tokens = [token for part in parts for token in part.token_ids]
            assert tokens == served.expected(prompt)[0]
        assert resets


def test_the_choices_of_a_request_share_embeddings_that_end_with_them(
    llava: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded = list[Any]()

    def embed(*arguments: Any) -> torch.Tensor:
        rows = embed_prompt(*arguments)
        embedded.append(weakref.ref(rows))
        return rows

    monkeypatch.setattr(
        "tsx_runtime.features.generation.worker.engines.transformers_engine.embed_prompt", embed
    )
    prompt = llava.prompt("What is it?", png("navy"))

    async def leave() -> None:
        sampling = Sampling(max_tokens=200, temperature=0.0)
        async with aclosing(
            llava.engine.generate(prompt.token_ids, sampling, prompt.media)
        ) as stream:
            async for _ in stream:
                return

    assert len({tuple(tokens) for tokens, _ in llava.answers([prompt] * 4)}) == 1
    llava.run(leave())
    gc.collect()
    assert len(embedded) == 2
    assert [reference() for reference in embedded] == [None, None]


def test_media_that_do_not_fit_the_text_are_refused(llava: Served) -> None:
    prompt = llava.prompt("What is it?", png())
    with pytest.raises(InvalidInput, match="does not fit its images"):
        llava.run(llava.answer(prompt._replace(token_ids=prompt.token_ids[2:])))
    assert llava.engine.stats()[:2] == (0, 0)
    assert_equal_answers(llava, [prompt])
    with pytest.raises(InvalidInput, match=r"processor refuses this chat|does not fit"):
        llava.run(llava.answer(llava.prompt("two <image> here <image>", png())))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GIF89a no image", "not a readable image"),
        (png()[:60], "not a readable image"),
        (png(size=(60, 70)), "more than 5000 pixels together"),
    ],
)
def test_a_file_that_is_no_usable_image_is_refused_with_its_field(
    llava: Served, data: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2500)
    with pytest.raises(RefusedField, match=reason) as exc_info:
        llava.prompt("What is it?", png(), data)
    assert exc_info.value.param == "files[1]"


def test_a_sound_that_is_too_long_is_refused(directories: dict[str, Path], run: Run) -> None:
    with serving(directories["qwen2_audio"], run) as served, pytest.raises(InvalidInput):
        run(served.answer(served.prompt("What is it?", wav(seconds=2.5))))


def load(directory: Path) -> tuple[Any, Any]:
    files = PretrainedFiles(directory, {}, "", HuggingFaceConfig(), "auto", DEVICE, False)
    return load_model(files, AutoConfig.from_pretrained(directory))


def test_a_model_whose_images_cannot_be_read_is_loaded_for_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, media = load(tiny_model(tmp_path, "gemma3"))
    assert media is None
    assert "attention that is not causal" in caplog.text
    assert "in embed_prompt" in caplog.text  # a frame of the traceback
    assert type(model).__name__ == "Gemma3ForConditionalGeneration"
    (tmp_path / "processor_config.json").write_text(
        '{"processor_class": "Gemma3Processor", "x": 1}'
    )
    assert load(tmp_path)[1] is None


def test_a_model_without_a_place_for_images_is_not_loaded(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path, "llava")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    with pytest.raises(
        LoadError, match=r"0 <image> tokens and 1 image.* --task image-text-to-text"
    ) as exc_info:
        load(directory)
    assert isinstance(exc_info.value.__cause__, ValueError)  # for the log


@pytest.mark.nightly
def test_positions_of_several_dimensions_are_refused() -> None:
    model = qwen2_vl().eval()
    media_module.capture_language_inputs(model)
    config = model.config
    pad, start, end = (
        config.image_token_id,
        config.vision_start_token_id,
        config.vision_end_token_id,
    )
    features = {
        "pixel_values": torch.zeros(16, 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": torch.tensor([[0, 0, 1, 1, 1, 1, 0]]),
    }
    with pytest.raises(InvalidInput, match="positions of its own"):
        embed_prompt(model, [5, start, pad, pad, pad, pad, end], features)
