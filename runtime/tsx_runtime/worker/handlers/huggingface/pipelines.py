"""Tasks by transformers' own pipelines: inputs are prepared and outputs read as there, and the
model runs them together.

Here are those of images and sounds; `classification.py` has those of text.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from tsx_runtime.worker.exceptions import InvalidInput
from tsx_runtime.worker.generation import chat_templates
from tsx_runtime.worker.generation.interface import TaskRequest
from tsx_runtime.worker.handlers.huggingface import requests as read
from tsx_runtime.worker.handlers.huggingface.loading import Loaded
from tsx_runtime.worker.handlers.huggingface.media import (
    ImageReader,
    SoundReader,
    need_soundfile,
    plain,
)
from tsx_runtime.worker.handlers.huggingface.requests import Reader
from tsx_runtime.worker.handlers.huggingface.tasks import Fields, Request, Task, Unit

PADDED = (
    "input_values",
    "input_features",
    "attention_mask",
)  # along their second dimension, where the model masks what is added
LONGEST_UNIT = 15_000  # vectors of a sound, about five minutes: a model compares each with each
THRESHOLD: Mapping[str, Reader] = {"threshold": read.number(0, 1)}
IMAGES: Mapping[str, Mapping[str, Reader]] = {
    "depth-estimation": {},
    "image-classification": read.FUNCTION,
    "image-segmentation": {
        **THRESHOLD,
        "mask_threshold": read.number(0, 1),
        "overlap_mask_area_threshold": read.number(0, 1),
        "subtask": read.one_of("instance", "panoptic", "semantic"),
    },
    "object-detection": THRESHOLD,
    "zero-shot-image-classification": {
        "candidate_labels": read.labels,
        "hypothesis_template": read.template,
    },
}


class PipelineTask(Task):
    media = True
    most_parts = 1000  # images and parts of sounds are large

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        from transformers.pipelines.base import ChunkPipeline  # an extra

        self.pipeline = loaded.pipeline
        self._in_parts = isinstance(
            self.pipeline, ChunkPipeline
        )  # whether an input may be several units

    def use(self, model: Any) -> None:
        self.model = self.pipeline.model = model

    def units_of(self, position: int, request: Request) -> list[Unit]:
        from transformers.pipelines.base import PipelineException  # an extra

        units: list[Unit] = []
        try:
            before, forward, after = self.pipeline._sanitize_parameters(**self.options(request))
            forward = {**self.pipeline._forward_params, **forward}
            after = {**self.pipeline._postprocess_params, **after}
            options = {**self.pipeline._preprocess_params, **before}
            for number, given in enumerate(request.inputs):
                chat_templates.begin()
                found = self.pipeline.preprocess(given, **options)
                for tensors in found if isinstance(found, Iterator) else (found,):
                    key = self.key(tensors, before), repr(sorted(forward.items()))
                    self.check_parts(len(units) + 1)
                    units.append(
                        Unit(position, number, tensors, self.length(tensors), key, (forward, after))
                    )
        except (
            ValueError,
            TypeError,
            KeyError,
            PipelineException,
        ) as error:  # transformers' words about what it was given
            raise ValueError(f"The input cannot be prepared: {error}") from error
        return units

    def options(self, request: Request) -> dict[str, Any]:
        """The pipeline's own arguments."""
        return {name: value for name, value in request.parameters.items() if name != "adapter"}

    def key(self, tensors: Fields, before: Fields) -> Hashable:
        """Units of one key fit into one call of the model, whose outputs are those of each alone.
        `before`: how they were prepared.
        """
        padded = PADDED if self.masks(tensors) else ()
        shapes = [
            (name, value.shape[2 if name in padded else 1 :] if torch.is_tensor(value) else None)
            for name, value in sorted(tensors.items())
        ]
        return *shapes, repr(sorted(before.items()))

    def masks(self, tensors: Fields) -> bool:
        """Whether units of other lengths may be padded to the longest."""
        return False

    def length(self, tensors: Fields) -> int:
        """Of samples of a sound the model makes a vector for each few hundred."""
        samples = tensors.get("input_values")
        return 1 if samples is None or samples.ndim != 2 else 1 + samples.shape[1] // 320

    def cost(self, request: Request) -> int:
        return len(request.inputs)

    def run(self, units: Sequence[Unit]) -> Sequence[Any]:
        outputs = self.forward([unit.tensors for unit in units], dict(units[0].options[0]))
        return [(output, unit.options[1]) for output, unit in zip(outputs, units, strict=True)]

    def forward(self, tensors: Sequence[dict[str, Any]], options: dict[str, Any]) -> list[Any]:
        from transformers.pipelines.base import pad_collate_fn  # an extra
        from transformers.pipelines.pt_utils import PipelineIterator

        if len(tensors) == 1:
            return [self.pipeline.forward(dict(tensors[0]), **options)]
        collate = pad_collate_fn(
            self.pipeline.tokenizer,
            self.pipeline.feature_extractor or self.pipeline.image_processor,
        )
        return list(
            PipelineIterator([collate(tensors)], self.pipeline.forward, options, len(tensors))
        )

    def output(self, request: Request, parts: list[list[Any]]) -> Any:
        return request.shaped([self.postprocessed(each) for each in parts])

    def postprocessed(self, parts: list[Any]) -> Any:
        """Of one input.

        Raises ValueError, in transformers' words, for a parameter that does not fit the model.
        """
        outputs, (_, after) = [output for output, _ in parts], parts[0]
        return plain(self.pipeline.postprocess(outputs if self._in_parts else outputs[0], **after))


class ImageTask(PipelineTask):
    input_kind = "image"

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self.parameters = IMAGES[loaded.task]
        self.required = tuple({"candidate_labels"} & self.parameters.keys())

    def read_inputs(self, inputs: list[Any], parameters: Fields) -> Sequence[Any]:
        return [*map(ImageReader(), inputs)]

    def example(self) -> TaskRequest:
        parameters = (
            {"candidate_labels": ["light", "dark"]} if "candidate_labels" in self.parameters else {}
        )
        return TaskRequest(
            [plain(Image.fromarray(np.arange(64 * 48 * 3, dtype=np.uint8).reshape(48, 64, 3)))] * 2,
            parameters,
        )


class SoundTask(PipelineTask):
    """Classification of sounds, and the base of speech recognition."""

    input_kind = "file"
    parameters = read.FUNCTION

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        need_soundfile()

    def read_inputs(self, inputs: list[Any], parameters: Fields) -> Sequence[Any]:
        return [*map(SoundReader(self.pipeline.feature_extractor.sampling_rate), inputs)]

    def units_of(self, position: int, request: Request) -> list[Unit]:
        lengths = getattr(self.loaded.model, "_get_feat_extract_output_lengths", None)
        units = super().units_of(position, request)
        if any(unit.length > LONGEST_UNIT for unit in units):
            raise ValueError(
                "The sound is too long to be read at once. Send less, or set `chunk_length_s`,"
                " where the task has it."
            )
        for samples in (unit.tensors.get("input_values") for unit in units):
            if (
                lengths is not None
                and samples is not None
                and int(lengths(torch.tensor(samples.shape[-1]))) < 1
            ):
                raise ValueError(
                    f"The sound, or a part of it, has {samples.shape[-1]} samples, which are too"
                    " few for the model."
                )
        return units

    def masks(self, tensors: Fields) -> bool:
        """Without a mask, and where a model normalises over all of the time, what is added would
        change the answer.
        """
        return (
            "attention_mask" in tensors
            and getattr(self.loaded.model.config, "feat_extract_norm", "layer") != "group"
        )

    def example(self) -> TaskRequest:
        return TaskRequest({"array": [0.0, 0.1, 0.0, -0.1] * 4000, "sampling_rate": 16000}, {})


class SpeechRecognition(SoundTask):
    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self._generates = self.pipeline.type not in ("ctc", "ctc_with_lm")
        self._lengths = (
            getattr(loaded.model, "_get_feat_extract_output_lengths", None)
            if self.pipeline.type == "ctc"
            else None
        )
        most = getattr(loaded.model.config, "max_target_positions", None) or 1024
        self._generation = read.generation(most) | {
            "language": read.string,
            "task": read.one_of("transcribe", "translate"),
        }
        timestamps = {"return_timestamps": read.one_of(True, False, "word", "char")}
        chunks = {"chunk_length_s": read.number(1, 600), "stride_length_s": read.number(0, 300)}
        self.parameters = {**timestamps, **chunks, **(self._generation if self._generates else {})}

    def options(self, request: Request) -> dict[str, Any]:
        options = super().options(request)
        if not options.get("return_timestamps"):
            options.pop("return_timestamps", None)
        if options.get("stride_length_s", 0) > (most := 0.45 * options.get("chunk_length_s", 0)):
            raise ValueError(
                f"`stride_length_s` is {options['stride_length_s']}: it is at most {most:g}, 0.45"
                " of `chunk_length_s`."
            )
        return options

    def forward(self, tensors: Sequence[dict[str, Any]], options: dict[str, Any]) -> list[Any]:
        """Of what a CTC model gives for a padded sound, only what is the sound's own."""
        if self._generates or self._lengths is None:
            return super().forward(tensors, options)
        masks = [
            each.get("attention_mask") for each in tensors
        ]  # before the call, which takes them away
        counts = [None if mask is None else int(self._lengths(mask.sum())) for mask in masks]
        outputs = zip(super().forward(tensors, options), counts, strict=True)
        return [{**output, "tokens": output["tokens"][:, :count]} for output, count in outputs]

    def masks(self, tensors: Fields) -> bool:
        return super().masks(tensors) and (self._generates or self._lengths is not None)

    def example(self) -> TaskRequest:
        parameters = {"max_new_tokens": 4} if self._generates else {}
        return super().example()._replace(parameters=parameters)


class ImageTextToText(PipelineTask):
    """A text about images, by `generate`: of a prompt with its images, or of a chat whose messages
    hold them.
    """

    fields = frozenset({"image", "images", "text", "messages"})
    input_kind = "json"

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self._generation = read.generation(4096)
        self.parameters = {**self._generation, "return_full_text": read.flag, "text": read.string}

    def listed(self, inputs: Any) -> tuple[list[Any], bool]:
        if isinstance(inputs, list) and all(
            isinstance(each, dict) and "role" in each for each in inputs
        ):
            return [{"messages": inputs}], True
        return super().listed(inputs)

    def read_inputs(self, inputs: list[Any], parameters: Fields) -> Sequence[Any]:
        from transformers.pipelines.base import Chat  # an extra

        found, read_image = list[Any](), ImageReader()
        for each in inputs:
            given = each if isinstance(each, dict) else {"image": each}
            images = given.get("images", [given["image"]] if "image" in given else None)
            text = given.get("text", parameters.get("text", ""))
            if "messages" in given:
                try:
                    found.append(
                        Chat([_with_images(message, read_image) for message in given["messages"]])
                    )
                except (TypeError, ValueError, KeyError, AttributeError) as error:
                    raise InvalidInput(
                        f"`messages` must be a list of objects with role and content: {error}"
                    ) from None
            elif isinstance(images, list) and images and isinstance(text, str):
                found.append({"images": [*map(read_image, images)], "text": text})
            else:
                raise InvalidInput(
                    '`inputs` must be {"image": "base64", "text": "..."}, or a list of messages.'
                )
        return found

    def options(self, request: Request) -> dict[str, Any]:
        generate = {
            name: value for name, value in request.parameters.items() if name in self._generation
        }
        return {
            "generate_kwargs": generate,
            "return_full_text": request.parameters.get("return_full_text", False),
        }

    def example(self) -> TaskRequest:
        image = plain(Image.new("RGB", (64, 48)))
        processor = self.pipeline.processor
        if getattr(processor, "chat_template", None):
            content = [{"type": "image", "image": image}, {"type": "text", "text": "Warm-up"}]
            return TaskRequest([{"role": "user", "content": content}], {"max_new_tokens": 4})
        token = getattr(processor, "image_token", "")
        return TaskRequest({"image": image, "text": f"{token} Warm-up"}, {"max_new_tokens": 4})


def _with_images(message: dict[str, Any], read_image: ImageReader) -> dict[str, Any]:
    """The message, its images decoded: `{"type": "image", "image": base64}`, or OpenAI's
    `image_url` with a data URL.
    """
    content = message["content"]
    if isinstance(content, str):
        return {"role": message["role"], "content": [{"type": "text", "text": content}]}
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] == "text":
            parts.append({"type": "text", "text": str(part["text"])})
        elif part["type"] in ("image", "image_url"):
            image = next(filter(None, map(part.get, ("image", "base64", "url", "image_url"))), None)
            file = image["url"] if isinstance(image, dict) else image
            parts.append({"type": "image", "image": read_image(file)})
        else:
            raise ValueError(f"a part has the type {part['type']!r}, and not text or image")
    return {"role": message["role"], "content": parts}
