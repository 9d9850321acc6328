"""Tasks for images and sounds that use transformers' pipelines.

The pipelines prepare inputs and convert outputs, and the model runs the inputs of all requests
together. `classification.py` has the tasks for texts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from tsx_runtime.features.generation.worker import chat_templates
from tsx_runtime.features.generation.worker.interface import TaskRequest
from tsx_runtime.features.generation.worker.media_files import (
    ImageReader,
    SoundReader,
    check_soundfile,
    to_json_value,
)
from tsx_runtime.features.huggingface.worker import requests as read
from tsx_runtime.features.huggingface.worker.loading import Loaded
from tsx_runtime.features.huggingface.worker.requests import Reader
from tsx_runtime.features.huggingface.worker.tasks import Fields, Request, Task, Unit
from tsx_runtime.worker.exceptions import InvalidInput

# Inputs that are padded along their second dimension, if the model masks padding.
PADDED_INPUTS = ("input_values", "input_features", "attention_mask")
# About five minutes of sound. A limit, since models compare all vectors of a sound with each other.
MAX_UNIT_VECTORS = 15_000
THRESHOLD_PARAMETER: Mapping[str, Reader] = {"threshold": read.number(0, 1)}
IMAGE_TASKS: Mapping[str, Mapping[str, Reader]] = {
    "depth-estimation": {},
    "image-classification": read.FUNCTION,
    "image-segmentation": {
        **THRESHOLD_PARAMETER,
        "mask_threshold": read.number(0, 1),
        "overlap_mask_area_threshold": read.number(0, 1),
        "subtask": read.one_of("instance", "panoptic", "semantic"),
    },
    "object-detection": THRESHOLD_PARAMETER,
    "zero-shot-image-classification": {
        "candidate_labels": read.labels,
        "hypothesis_template": read.template,
    },
}


class PipelineTask(Task):
    """A task that uses a pipeline to prepare inputs and to convert outputs."""

    media = True
    max_parts = 1000  # a lower limit than for texts, since images and parts of sounds are large

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        from transformers.pipelines.base import ChunkPipeline  # an extra

        self.pipeline = loaded.pipeline
        # Whether the pipeline may split an input into several units.
        self._is_chunked = isinstance(self.pipeline, ChunkPipeline)

    def use(self, model: Any) -> None:
        self.model = self.pipeline.model = model

    def units_of(self, position: int, request: Request) -> list[Unit]:
        from transformers.pipelines.base import PipelineException  # an extra

        units: list[Unit] = []
        try:
            preprocess_options, forward_options, postprocess_options = (
                self.pipeline._sanitize_parameters(**self.options(request))
            )
            forward_options = {**self.pipeline._forward_params, **forward_options}
            postprocess_options = {**self.pipeline._postprocess_params, **postprocess_options}
            options = {**self.pipeline._preprocess_params, **preprocess_options}
            for number, value in enumerate(request.inputs):
                chat_templates.limit_next_rendering()
                prepared = self.pipeline.preprocess(value, **options)
                for tensors in prepared if isinstance(prepared, Iterator) else (prepared,):
                    key = (
                        self.key(tensors, preprocess_options),
                        repr(sorted(forward_options.items())),
                    )
                    self.check_parts(len(units) + 1)
                    units.append(
                        Unit(
                            position,
                            number,
                            tensors,
                            self.length(tensors),
                            key,
                            (forward_options, postprocess_options),
                        )
                    )
        # transformers raises these errors for invalid inputs.
        except (ValueError, TypeError, KeyError, PipelineException) as error:
            raise ValueError(f"The input cannot be prepared: {error}") from error
        return units

    def options(self, request: Request) -> dict[str, Any]:
        """Return the arguments of the pipeline."""
        return {name: value for name, value in request.parameters.items() if name != "adapter"}

    def key(self, tensors: Fields, preprocess_options: Fields) -> Hashable:
        """Return a key. Units with equal keys can run in one call with the same outputs.

        `preprocess_options` are the options with which they were prepared.
        """
        padded_inputs = PADDED_INPUTS if self.masks(tensors) else ()
        shapes = [
            (
                name,
                value.shape[2 if name in padded_inputs else 1 :]
                if torch.is_tensor(value)
                else None,
            )
            for name, value in sorted(tensors.items())
        ]
        return *shapes, repr(sorted(preprocess_options.items()))

    def masks(self, tensors: Fields) -> bool:
        """Tell whether units may be padded to the length of the longest one."""
        return False

    def length(self, tensors: Fields) -> int:
        """Estimate the number of vectors; a model makes about one of 320 samples."""
        samples = tensors.get("input_values")
        return 1 if samples is None or samples.ndim != 2 else 1 + samples.shape[1] // 320

    def cost(self, request: Request) -> int:
        return len(request.inputs)

    def run(self, units: Sequence[Unit]) -> Sequence[Any]:
        outputs = self.forward([unit.tensors for unit in units], dict(units[0].options[0]))
        return [(output, unit.options[1]) for output, unit in zip(outputs, units, strict=True)]

    def forward(self, tensors: Sequence[dict[str, Any]], options: dict[str, Any]) -> list[Any]:
        """Run the model once, and return an output for each of the inputs."""
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
        return request.shaped([self.postprocessed(results) for results in parts])

    def postprocessed(self, parts: list[Any]) -> Any:
        """Convert the results of one input to its output.

        Raises:
            ValueError: A parameter does not fit the model; transformers has written the message.
        """
        outputs, (_, postprocess_options) = [output for output, _ in parts], parts[0]
        return to_json_value(
            self.pipeline.postprocess(
                outputs if self._is_chunked else outputs[0], **postprocess_options
            )
        )


class ImageTask(PipelineTask):
    input_kind = "image"

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self.parameters = IMAGE_TASKS[loaded.task]
        self.required = tuple({"candidate_labels"} & self.parameters.keys())

    def read_inputs(self, inputs: list[Any], parameters: Fields) -> Sequence[Any]:
        return [*map(ImageReader(), inputs)]

    def example(self) -> TaskRequest:
        parameters = (
            {"candidate_labels": ["light", "dark"]} if "candidate_labels" in self.parameters else {}
        )
        return TaskRequest(
            [
                to_json_value(
                    Image.fromarray(np.arange(64 * 48 * 3, dtype=np.uint8).reshape(48, 64, 3))
                )
            ]
            * 2,
            parameters,
        )


class SoundTask(PipelineTask):
    """The classification of sounds, and the base of speech recognition."""

    input_kind = "file"
    parameters = read.FUNCTION

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        check_soundfile()

    def read_inputs(self, inputs: list[Any], parameters: Fields) -> Sequence[Any]:
        return [*map(SoundReader(self.pipeline.feature_extractor.sampling_rate), inputs)]

    def units_of(self, position: int, request: Request) -> list[Unit]:
        output_length = getattr(self.loaded.model, "_get_feat_extract_output_lengths", None)
        units = super().units_of(position, request)
        if any(unit.length > MAX_UNIT_VECTORS for unit in units):
            raise ValueError(
                "The sound is too long to be read at once. Send less, or set `chunk_length_s`,"
                " where the task has it."
            )
        for samples in (unit.tensors.get("input_values") for unit in units):
            if (
                output_length is not None
                and samples is not None
                and int(output_length(torch.tensor(samples.shape[-1]))) < 1
            ):
                raise ValueError(
                    f"The sound, or a part of it, has {samples.shape[-1]} samples, which are too"
                    " few for the model."
                )
        return units

    def masks(self, tensors: Fields) -> bool:
        """Tell whether padding leaves the output unchanged.

        The output would change without a mask, or if the model normalizes over the whole length.
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
        self._is_generative = self.pipeline.type not in ("ctc", "ctc_with_lm")
        self._output_length = (
            getattr(loaded.model, "_get_feat_extract_output_lengths", None)
            if self.pipeline.type == "ctc"
            else None
        )
        max_tokens = getattr(loaded.model.config, "max_target_positions", None) or 1024
        self._generation_parameters = read.generation(max_tokens) | {
            "language": read.string,
            "task": read.one_of("transcribe", "translate"),
        }
        timestamps = {"return_timestamps": read.one_of(True, False, "word", "char")}
        chunks = {"chunk_length_s": read.number(1, 600), "stride_length_s": read.number(0, 300)}
        self.parameters = {
            **timestamps,
            **chunks,
            **(self._generation_parameters if self._is_generative else {}),
        }

    def options(self, request: Request) -> dict[str, Any]:
        options = super().options(request)
        if not options.get("return_timestamps"):
            options.pop("return_timestamps", None)
        if options.get("stride_length_s", 0) > (
            max_stride_s := 0.45 * options.get("chunk_length_s", 0)
        ):
            raise ValueError(
                f"`stride_length_s` is {options['stride_length_s']}: it is at most"
                f" {max_stride_s:g}, 0.45 of `chunk_length_s`."
            )
        return options

    def forward(self, tensors: Sequence[dict[str, Any]], options: dict[str, Any]) -> list[Any]:
        """Run the model, and remove the padding from the output of a CTC model."""
        if self._is_generative or self._output_length is None:
            return super().forward(tensors, options)
        # The masks are read first, since the call removes them.
        masks = [unit_tensors.get("attention_mask") for unit_tensors in tensors]
        counts = [None if mask is None else int(self._output_length(mask.sum())) for mask in masks]
        outputs = zip(super().forward(tensors, options), counts, strict=True)
        return [{**output, "tokens": output["tokens"][:, :count]} for output, count in outputs]

    def masks(self, tensors: Fields) -> bool:
        return super().masks(tensors) and (self._is_generative or self._output_length is not None)

    def example(self) -> TaskRequest:
        parameters = {"max_new_tokens": 4} if self._is_generative else {}
        return super().example()._replace(parameters=parameters)


class ImageTextToText(PipelineTask):
    """The generation of text for a prompt with images, or for a chat with images."""

    fields = frozenset({"image", "images", "text", "messages"})
    input_kind = "json"

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self._generation_parameters = read.generation(4096)
        self.parameters = {
            **self._generation_parameters,
            "return_full_text": read.flag,
            "text": read.string,
        }

    def as_list(self, inputs: Any) -> tuple[list[Any], bool]:
        if isinstance(inputs, list) and all(
            isinstance(message, dict) and "role" in message for message in inputs
        ):
            return [{"messages": inputs}], True
        return super().as_list(inputs)

    def read_inputs(self, inputs: list[Any], parameters: Fields) -> Sequence[Any]:
        from transformers.pipelines.base import Chat  # an extra

        prompts, read_image = list[Any](), ImageReader()
        for value in inputs:
            fields = value if isinstance(value, dict) else {"image": value}
            images = fields.get("images", [fields["image"]] if "image" in fields else None)
            text = fields.get("text", parameters.get("text", ""))
            if "messages" in fields:
                try:
                    prompts.append(
                        Chat(
                            [_decode_images(message, read_image) for message in fields["messages"]]
                        )
                    )
                except (TypeError, ValueError, KeyError, AttributeError) as error:
                    raise InvalidInput(
                        f"`messages` must be a list of objects with role and content: {error}"
                    ) from None
            elif isinstance(images, list) and images and isinstance(text, str):
                prompts.append({"images": [*map(read_image, images)], "text": text})
            else:
                raise InvalidInput(
                    '`inputs` must be {"image": "base64", "text": "..."}, or a list of messages.'
                )
        return prompts

    def options(self, request: Request) -> dict[str, Any]:
        generate = {
            name: value
            for name, value in request.parameters.items()
            if name in self._generation_parameters
        }
        return {
            "generate_kwargs": generate,
            "return_full_text": request.parameters.get("return_full_text", False),
        }

    def example(self) -> TaskRequest:
        image = to_json_value(Image.new("RGB", (64, 48)))
        processor = self.pipeline.processor
        if getattr(processor, "chat_template", None):
            content = [{"type": "image", "image": image}, {"type": "text", "text": "Warm-up"}]
            return TaskRequest([{"role": "user", "content": content}], {"max_new_tokens": 4})
        token = getattr(processor, "image_token", "")
        return TaskRequest({"image": image, "text": f"{token} Warm-up"}, {"max_new_tokens": 4})


def _decode_images(message: dict[str, Any], read_image: ImageReader) -> dict[str, Any]:
    """Decode the images of a message.

    An image is `{"type": "image", "image": base64}`, or OpenAI's `image_url` with a data URL.

    Raises:
        ValueError: A part is neither text nor an image.
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
