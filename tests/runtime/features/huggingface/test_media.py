"""Tasks for images and sounds: answers equal transformers' pipelines; bad requests are refused."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.runtime.features.huggingface.conftest import (
    Serve,
    assert_near,
    assert_refused_alone,
)
from tests.support.huggingface_models import image, sound
from tsx_runtime.features.generation.worker.media_files import resample, to_json_value

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


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(("kind", "parameters"), VISION)
def test_answers_for_images_equal_the_pipelines(
    served: Serve, kind: str, parameters: dict[str, Any]
) -> None:
    model = served(kind)
    pipeline = model.pipeline()
    expected = [to_json_value(pipeline(decoded(data), **parameters)) for data in IMAGES]
    assert_near(
        expected,
        model.values(*[{"inputs": base64_of(data), "parameters": parameters} for data in IMAGES]),
        1e-3,
    )
    assert_near(
        expected[:2],
        model.values(
            {"inputs": [base64_of(data) for data in IMAGES[:2]], "parameters": parameters}
        )[0],
        1e-3,
    )


def test_an_image_may_be_bytes_or_a_data_url(served: Serve) -> None:
    model = served("vit")
    bytes_answer, url = model.values(
        IMAGES[0], {"inputs": f"data:image/png;base64,{base64_of(IMAGES[0])}"}
    )
    assert_near(bytes_answer, url)


def test_zero_shot_labels_and_templates_may_differ_between_requests(served: Serve) -> None:
    model = served("clip")
    pipeline = model.pipeline()
    labels = ["the file", "a name"]
    calls = [
        (IMAGES[0], {"candidate_labels": labels}),
        (IMAGES[1], {"candidate_labels": ["a value", "an error", "the class"]}),
        (IMAGES[2], {"candidate_labels": labels, "hypothesis_template": "an {} error"}),
    ]
    answers = model.values(
        *[{"inputs": base64_of(data), "parameters": options} for data, options in calls]
    )
    assert_near([pipeline(decoded(data), **options) for data, options in calls], answers)


def test_a_small_file_that_decodes_to_a_long_sound_is_refused(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsx_runtime.features.generation.worker.media_files.MAX_SAMPLES", 1000)
    assert "at most 1000 are taken" in served("whisper").ask(SOUNDS[0])[0].message


def test_the_total_size_of_a_requests_images_is_limited(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, chatting = served("vit"), served("llava")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40 * 33)
    images = [base64_of(IMAGES[0])] * 2
    good_answer, bad_answer, single_answer = model.ask(
        {"inputs": images}, {"inputs": [*images, images[0]]}, IMAGES[0]
    )
    assert (good_answer.status, bad_answer.status, single_answer.status) == (200, 400, 200)
    assert "more than 2640 pixels together" in bad_answer.message
    content = [{"type": "image", "image": data} for data in [*images, images[0]]]
    (chat,) = chatting.ask({"messages": [{"role": "user", "content": content}]})
    assert (chat.status, chat.message) == (400, bad_answer.message)


def test_the_number_of_chunks_of_a_sound_is_limited(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, body = (
        served("whisper"),
        {"array": [0.1] * 1500, "sampling_rate": 1000},
    )
    monkeypatch.setattr(model.handler.task, "max_parts", 3)
    (bad_answer,) = model.ask(
        {"inputs": body, "parameters": {"chunk_length_s": 1, "stride_length_s": 0.45}}
    )
    assert bad_answer.status == 400
    assert "more than 3 parts" in bad_answer.message


def test_the_total_length_of_a_requests_sounds_is_limited(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsx_runtime.features.generation.worker.media_files.MAX_SOUND_S", 1)
    good_answer, bad_answer = served("wav2vec2-classification").ask(
        {"inputs": [base64_of(SOUNDS[0]), base64_of(SOUNDS[1])]},
        {"inputs": [base64_of(SOUNDS[0])] * 3},
    )
    assert (good_answer.status, bad_answer.status) == (200, 400)
    assert "has 2 s of sound; at most 1 s" in bad_answer.message


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
def test_answers_for_sounds_equal_the_pipelines(
    served: Serve, kind: str, parameters: dict[str, Any]
) -> None:
    import soundfile

    model = served(kind)
    pipeline = model.pipeline()
    expected = [
        to_json_value(pipeline(soundfile.read(io.BytesIO(data), dtype="float32")[0], **parameters))
        for data in SOUNDS
    ]
    assert_near(
        expected,
        model.values(*[{"inputs": base64_of(data), "parameters": parameters} for data in SOUNDS]),
    )
    if not parameters:
        assert_near(expected, model.values(*SOUNDS))


def test_speech_may_be_generated_with_parameters(served: Serve) -> None:
    model = served("whisper")
    pipeline = model.pipeline()
    import soundfile

    options = {"max_new_tokens": 5, "num_beams": 1, "language": "de", "task": "translate"}
    expected = pipeline(
        soundfile.read(io.BytesIO(SOUNDS[0]), dtype="float32")[0], generate_kwargs=dict(options)
    )
    assert (
        model.values(
            {"inputs": base64_of(SOUNDS[0]), "parameters": {"generation_parameters": options}}
        )[0]
        == expected
    )


def test_a_sound_of_another_rate_is_resampled() -> None:
    times = np.arange(44100) / 44100
    expected = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    samples = resample(np.sin(2 * np.pi * 440 * times).astype(np.float32), 44100, 16000)
    assert len(samples) == 16000
    assert np.abs(samples - expected).max() < 1e-3


@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 6}, {"max_new_tokens": 6, "return_full_text": True}]
)
def test_texts_about_images_equal_the_pipeline(served: Serve, options: dict[str, Any]) -> None:
    model = served("llava")
    pipeline = model.pipeline()
    prompts = ["<image> the file is", "<image> a name", "<image> the file is"]
    cases = list(zip(IMAGES[:3], prompts, strict=True))
    bodies = [
        {"inputs": {"image": base64_of(data), "text": prompt}, "parameters": options}
        for data, prompt in cases
    ]
    arguments = {"return_full_text": False, **options}
    expected = [
        pipeline(images=decoded(data), text=prompt, **arguments)[0]["generated_text"]
        for data, prompt in cases
    ]
    assert [answer[0]["generated_text"] for answer in model.values(*bodies)] == expected


def test_a_chat_may_contain_images(served: Serve) -> None:
    model = served("llava")
    url = f"data:image/png;base64,{base64_of(IMAGES[0])}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "the file"},
    ]
    chat = [
        {"role": "user", "content": [{"type": "image", "image": decoded(IMAGES[0])}, content[1]]}
    ]
    expected = model.pipeline()(text=chat, max_new_tokens=4, return_full_text=False)
    answer = model.values(
        {"messages": [{"role": "user", "content": content}], "parameters": {"max_new_tokens": 4}}
    )[0]
    assert [entry["generated_text"] for entry in answer] == [
        entry["generated_text"] for entry in expected
    ]


def test_a_chat_template_that_writes_without_end_is_refused(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = served("llava")
    monkeypatch.setattr(
        model.handler.task.pipeline.processor,
        "chat_template",
        "{{ messages[0].role * 1000000000 }}",
    )
    content = [{"type": "image", "image": base64_of(IMAGES[0])}]
    (bad_answer,) = model.ask({"messages": [{"role": "user", "content": content}]})
    assert bad_answer.status == 400
    assert "much more than the model's context holds" in bad_answer.message


IMAGE, SOUND = base64_of(IMAGES[0]), base64_of(SOUNDS[0])
BAD = {
    "vit": [
        (b"no image at all", "are not a readable image"),
        ({"inputs": "http://169.254.169.254/latest"}, "The input is a URL"),
        ({"inputs": "file:///etc/passwd"}, "The input is a URL"),
        ({"inputs": "no base64!"}, "not base64"),
        ({"inputs": 7}, "no image"),
    ],
    "clip": [
        (IMAGES[0], "needs the parameter 'candidate_labels'"),
        (
            {"inputs": IMAGE, "parameters": {"candidate_labels": ["the " * 300]}},
            "must be less than",
        ),
    ],
    "segformer": [
        (
            {"inputs": IMAGE, "parameters": {"subtask": "panoptic"}},
            "Subtask panoptic is not supported",
        ),
    ],
    "wav2vec2-classification": [
        (b"no sound at all", "are no sound that can be read"),
        ({"inputs": {"array": [], "sampling_rate": 16000}}, "empty"),
    ],
    "wav2vec2-speech": [
        ({"inputs": SOUND, "parameters": {"return_timestamps": True}}, "timestamps"),
        ({"inputs": {"array": [0.1], "sampling_rate": 16000}}, "too few for the model"),
        ({"inputs": SOUND, "parameters": {"num_beams": 2}}, "has no parameter 'num_beams'"),
        ({"inputs": {"array": [0] * 310_000, "sampling_rate": 1000}}, "too long to be read at"),
    ],
    "whisper": [
        ({"inputs": SOUND, "parameters": {"language": "xx"}}, "Unsupported language"),
        ({"inputs": SOUND, "parameters": {"stride_length_s": 3}}, "0.45 of `chunk_length_s`"),
    ],
    "llava": [
        ({"inputs": {"text": "the file"}}, "`inputs` must be"),
        (
            {"inputs": {"image": base64_of(IMAGES[0]), "text": "no place for it"}},
            "cannot be prepared",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "`messages` must be"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "body", "message"), [(kind, *row) for kind, rows in BAD.items() for row in rows]
)
def test_an_invalid_request_fails_alone(served: Serve, kind: str, body: Any, message: str) -> None:
    assert_refused_alone(served(kind), body, message)
