"""Images and sounds: answers equal transformers' own pipelines, whoever shares the batch; what is
none is refused alone.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.runtime.worker.handlers.huggingface.conftest import Serve, near, refuses_alone
from tests.support.huggingface_models import image, sound
from tsx_runtime.worker.handlers.huggingface.media import plain, resampled

SIZES = [(40, 33), (64, 64), (40, 33), (90, 32)]
IMAGES = [image(*size, seed=number) for number, size in enumerate(SIZES)]
SOUNDS = [sound(seconds, pitch) for seconds, pitch in ((0.5, 440), (0.2, 300), (0.9, 700))]
VISION = [
    ("vit", {}),
    ("vit", {"top_k": 2, "function_to_apply": "sigmoid"}),
    ("segformer", {}),
    ("detr", {"threshold": 0.05}),
    ("glpn", {}),
    (
        "clip",
        {"candidate_labels": ["the file", "a name of the list"]},
    ),
]


def decoded(data: bytes) -> Any:
    return Image.open(io.BytesIO(data)).convert("RGB")


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(("kind", "parameters"), VISION)
def test_images_are_answered_as_by_the_pipeline(
    served: Serve, kind: str, parameters: dict[str, Any]
) -> None:
    model = served(kind)
    pipeline = model.pipeline()
    wanted = [plain(pipeline(decoded(data), **parameters)) for data in IMAGES]
    near(
        wanted,
        model.ok(*[{"inputs": text(data), "parameters": parameters} for data in IMAGES]),
        1e-3,
    )
    near(
        wanted[:2],
        model.ok({"inputs": [text(data) for data in IMAGES[:2]], "parameters": parameters})[0],
        1e-3,
    )


def test_an_image_may_come_as_bytes_or_as_a_data_url(served: Serve) -> None:
    model = served("vit")
    raw, url = model.ok(IMAGES[0], {"inputs": f"data:image/png;base64,{text(IMAGES[0])}"})
    near(raw, url)


def test_labels_and_templates_of_zero_shot_may_differ_between_requests(served: Serve) -> None:
    model = served("clip")
    pipeline = model.pipeline()
    labels = ["the file", "a name"]
    calls = [
        (IMAGES[0], {"candidate_labels": labels}),
        (IMAGES[1], {"candidate_labels": ["a value", "an error", "the class"]}),
        (IMAGES[2], {"candidate_labels": labels, "hypothesis_template": "an {} error"}),
    ]
    answers = model.ok(*[{"inputs": text(data), "parameters": options} for data, options in calls])
    near([pipeline(decoded(data), **options) for data, options in calls], answers)


def test_a_small_file_of_much_silence_is_refused(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsx_runtime.worker.handlers.huggingface.media.MOST_SAMPLES", 1000)
    assert "at most 1000 are taken" in served("whisper").ask(SOUNDS[0])[0].message


def test_the_images_of_a_request_are_bounded_together(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, chatting = served("vit"), served("llava")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40 * 33)
    several = [text(IMAGES[0])] * 2
    fit, bad, alone = model.ask({"inputs": several}, {"inputs": [*several, several[0]]}, IMAGES[0])
    assert (fit.status, bad.status, alone.status) == (200, 400, 200)
    assert "more than 2640 pixels together" in bad.message
    content = [{"type": "image", "image": each} for each in [*several, several[0]]]
    (chat,) = chatting.ask({"messages": [{"role": "user", "content": content}]})
    assert (chat.status, chat.message) == (400, bad.message)


def test_the_parts_of_a_sound_are_bounded(served: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    model, body = (
        served("whisper"),
        {"array": [0.1] * 1500, "sampling_rate": 1000},
    )
    monkeypatch.setattr(model.handler.task, "most_parts", 3)
    (bad,) = model.ask(
        {"inputs": body, "parameters": {"chunk_length_s": 1, "stride_length_s": 0.45}}
    )
    assert bad.status == 400
    assert "more than 3 parts" in bad.message


def test_the_sounds_of_a_request_are_bounded_together(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsx_runtime.worker.handlers.huggingface.media.LONGEST", 1)
    fit, bad = served("wav2vec2-classification").ask(
        {"inputs": [text(SOUNDS[0]), text(SOUNDS[1])]}, {"inputs": [text(SOUNDS[0])] * 3}
    )
    assert (fit.status, bad.status) == (200, 400)
    assert "has 2 s of sound; at most 1 s" in bad.message


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("wav2vec2-classification", {}),
        ("wav2vec2-speech", {}),
        ("wav2vec2-speech", {"return_timestamps": "char"}),
        ("wav2vec2-speech", {"chunk_length_s": 1}),
        ("whisper", {}),
        ("whisper", {"return_timestamps": True}),
    ],
)
def test_sounds_are_answered_as_by_the_pipeline(
    served: Serve, kind: str, parameters: dict[str, Any]
) -> None:
    import soundfile

    model = served(kind)
    pipeline = model.pipeline()
    wanted = [
        plain(pipeline(soundfile.read(io.BytesIO(data), dtype="float32")[0], **parameters))
        for data in SOUNDS
    ]
    near(wanted, model.ok(*[{"inputs": text(data), "parameters": parameters} for data in SOUNDS]))
    if not parameters:
        near(wanted, model.ok(*SOUNDS))


def test_speech_may_be_generated_with_parameters(served: Serve) -> None:
    model = served("whisper")
    pipeline = model.pipeline()
    import soundfile

    options = {"max_new_tokens": 5, "num_beams": 1, "language": "de", "task": "translate"}
    wanted = pipeline(
        soundfile.read(io.BytesIO(SOUNDS[0]), dtype="float32")[0], generate_kwargs=dict(options)
    )
    assert (
        model.ok({"inputs": text(SOUNDS[0]), "parameters": {"generation_parameters": options}})[0]
        == wanted
    )


def test_a_sound_of_another_rate_is_resampled() -> None:
    times = np.arange(44100) / 44100
    wanted = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    found = resampled(np.sin(2 * np.pi * 440 * times).astype(np.float32), 44100, 16000)
    assert len(found) == 16000
    assert np.abs(found - wanted).max() < 1e-3


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 6}, {"max_new_tokens": 6, "return_full_text": True}]
)
def test_texts_about_images_equal_the_pipeline(served: Serve, options: dict[str, Any]) -> None:
    model = served("llava")
    pipeline = model.pipeline()
    prompts = ["<image> the file is", "<image> a name", "<image> the file is"]
    asked = list(zip(IMAGES[:3], prompts, strict=True))
    bodies = [
        {"inputs": {"image": text(data), "text": prompt}, "parameters": options}
        for data, prompt in asked
    ]
    own = {"return_full_text": False, **options}
    wanted = [
        pipeline(images=decoded(data), text=prompt, **own)[0]["generated_text"]
        for data, prompt in asked
    ]
    assert [found[0]["generated_text"] for found in model.ok(*bodies)] == wanted


def test_a_chat_holds_its_images(served: Serve) -> None:
    model = served("llava")
    url = f"data:image/png;base64,{text(IMAGES[0])}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "the file"},
    ]
    chat = [
        {"role": "user", "content": [{"type": "image", "image": decoded(IMAGES[0])}, content[1]]}
    ]
    wanted = model.pipeline()(text=chat, max_new_tokens=4, return_full_text=False)
    found = model.ok(
        {"messages": [{"role": "user", "content": content}], "parameters": {"max_new_tokens": 4}}
    )[0]
    assert [each["generated_text"] for each in found] == [each["generated_text"] for each in wanted]


def test_a_chat_template_that_writes_without_bound_is_refused(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served("llava")
    monkeypatch.setattr(
        model.handler.task.pipeline.processor,
        "chat_template",
        "{{ messages[0].role * 1000000000 }}",
    )
    content = [{"type": "image", "image": text(IMAGES[0])}]
    (bad,) = model.ask({"messages": [{"role": "user", "content": content}]})
    assert bad.status == 400
    assert "much more than the model's context holds" in bad.message


IMAGE, SOUND = text(IMAGES[0]), text(SOUNDS[0])
BAD = [
    ("vit", b"no image at all", "are not a readable image"),
    (
        "vit",
        {"inputs": "http://169.254.169.254/latest"},
        "this server fetches none",
    ),
    ("vit", {"inputs": "file:///etc/passwd"}, "this server fetches none"),
    ("vit", {"inputs": "no base64!"}, "not base64"),
    ("vit", {"inputs": 7}, "no image"),
    ("clip", IMAGES[0], "needs the parameter 'candidate_labels'"),
    (
        "segformer",
        {"inputs": IMAGE, "parameters": {"subtask": "panoptic"}},
        "Subtask panoptic is not supported",
    ),
    (
        "wav2vec2-classification",
        b"no sound at all",
        "are no sound that can be read",
    ),
    (
        "wav2vec2-classification",
        {"inputs": {"array": [], "sampling_rate": 16000}},
        "empty",
    ),
    (
        "wav2vec2-speech",
        {"inputs": SOUND, "parameters": {"return_timestamps": True}},
        "timestamps",
    ),
    (
        "wav2vec2-speech",
        {"inputs": {"array": [0.1], "sampling_rate": 16000}},
        "too few for the model",
    ),
    (
        "whisper",
        {"inputs": SOUND, "parameters": {"language": "xx"}},
        "Unsupported language",
    ),
    (
        "clip",
        {"inputs": IMAGE, "parameters": {"candidate_labels": ["the " * 300]}},
        "must be less than",
    ),
    (
        "whisper",
        {"inputs": SOUND, "parameters": {"stride_length_s": 3}},
        "0.45 of `chunk_length_s`",
    ),
    (
        "wav2vec2-speech",
        {"inputs": SOUND, "parameters": {"num_beams": 2}},
        "has no parameter 'num_beams'",
    ),
    (
        "wav2vec2-speech",
        {"inputs": {"array": [0] * 310_000, "sampling_rate": 1000}},
        "too long to be read at",
    ),
    ("llava", {"inputs": {"text": "the file"}}, "`inputs` must be"),
    (
        "llava",
        {"inputs": {"image": text(IMAGES[0]), "text": "no place for it"}},
        "cannot be prepared",
    ),
    (
        "llava",
        {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
        "`messages` must be",
    ),
]


@pytest.mark.parametrize(("kind", "body", "message"), BAD)
def test_a_bad_request_is_refused_alone(served: Serve, kind: str, body: Any, message: str) -> None:
    refuses_alone(served(kind), body, message)
