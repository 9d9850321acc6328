"""Images and sounds, by transformers' own pipelines: inputs are prepared and outputs read as there, and the model runs them together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from tsx_runtime.worker.exceptions import BadRows, InvalidInput
from tsx_runtime.worker.generation.interface import TaskRequest, TaskResult
from tsx_runtime.worker.handlers.huggingface import requests as read
from tsx_runtime.worker.handlers.huggingface.batches import run_batched
from tsx_runtime.worker.handlers.huggingface.loading import Loaded
from tsx_runtime.worker.handlers.huggingface.media import need_soundfile, plain, read_image, read_sound
from tsx_runtime.worker.handlers.huggingface.requests import Reader
from tsx_runtime.worker.handlers.huggingface.tasks import BaseTask, Request

PADDED = ("input_values", "input_features", "attention_mask")  # along their second dimension, where the model masks what is added
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
    "zero-shot-image-classification": {"candidate_labels": read.labels, "hypothesis_template": read.template},
}


class _Unit(NamedTuple):
    """What the model is given for one input, or for a part of one."""

    request: int
    input: int
    tensors: dict[str, Any]
    before: dict[str, Any]  # how it was prepared
    options: dict[str, Any]  # of this call of the model


class PipelineTask(BaseTask):
    media = True

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self.pipeline = loaded.pipeline

    def answer(self, requests: Sequence[Request]) -> list[TaskResult]:
        chosen, units = self._prepared(requests)
        parts: list[list[list[Any]]] = [[[] for _ in request.inputs] for request in requests]
        keys = [self._key(unit, requests[unit.request].adapter) for unit in units]

        def run(positions: list[int]) -> list[Any]:
            self.loaded.adapters.apply(requests[units[positions[0]].request].adapter)
            try:
                return self._run([units[position] for position in positions])
            except ValueError as error:  # as above, of what `generate` cannot do, or of a text that is too long
                raise InvalidInput(f"The model cannot take the input: {error}") from error

        for unit, output in zip(units, run_batched([_length(unit) for unit in units], keys, self.loaded.budget, run), strict=True):
            parts[unit.request][unit.input].append(output)
        results, faults = list[TaskResult](), dict[int, str]()
        for position, (request, found, (_, _, after)) in enumerate(zip(requests, parts, chosen, strict=True)):
            options = {**self.pipeline._postprocess_params, **after}
            try:
                results.append(TaskResult(request.shaped([plain(self._output(each, options)) for each in found])))
            except ValueError as error:  # a parameter that does not fit the model, in transformers' words
                faults[position] = str(error)
        if faults:
            raise BadRows(faults)
        return results

    def _prepared(self, requests: Sequence[Request]) -> tuple[list[tuple[Any, Any, Any]], list[_Unit]]:
        chosen: list[tuple[Any, Any, Any]] = []
        units: list[_Unit] = []
        faults: dict[int, str] = {}
        for position, request in enumerate(requests):
            try:
                before, options, after = self.pipeline._sanitize_parameters(**self.options(request))
                chosen.append((before, options, after))
                for number, given in enumerate(request.inputs):
                    for tensors in self._units(given, before):
                        units.append(_Unit(position, number, tensors, before, {**self.pipeline._forward_params, **options}))
            except (ValueError, TypeError, KeyError) as error:  # transformers' words about what it was given
                faults[position] = f"The input cannot be prepared: {error}"
        if faults:
            raise BadRows(faults)
        return chosen, units

    def options(self, request: Request) -> dict[str, Any]:
        """The pipeline's own arguments."""
        return {name: value for name, value in request.parameters.items() if name != "adapter"}

    def _units(self, given: Any, before: dict[str, Any]) -> Iterator[dict[str, Any]]:
        found = self.pipeline.preprocess(given, **{**self.pipeline._preprocess_params, **before})
        yield from (found if isinstance(found, Iterator) else (found,))

    def _key(self, unit: _Unit, adapter: str | None) -> Hashable:
        """Units of one key fit into one call of the model, whose outputs are those of each alone."""
        masked = self.masks(unit)
        shapes = tuple(
            (name, value.shape[2:] if masked and name in PADDED else value.shape[1:])
            for name, value in sorted(unit.tensors.items())
            if isinstance(value, torch.Tensor)
        )
        return adapter, shapes, repr(sorted(unit.options.items())), repr(sorted(unit.before.items())), repr(sorted(unit.tensors))

    def masks(self, unit: _Unit) -> bool:
        """Whether units of other lengths may be padded to the longest."""
        return False

    def _run(self, units: Sequence[_Unit]) -> list[Any]:
        from transformers.pipelines.base import pad_collate_fn  # an extra
        from transformers.pipelines.pt_utils import PipelineIterator

        options = dict(units[0].options)
        if len(units) == 1:
            return [self.pipeline.forward(dict(units[0].tensors), **options)]
        collate = pad_collate_fn(self.pipeline.tokenizer, self.pipeline.feature_extractor or self.pipeline.image_processor)
        together = collate([unit.tensors for unit in units])
        return list(PipelineIterator([together], self.pipeline.forward, options, len(units)))

    def _output(self, parts: list[Any], options: dict[str, Any]) -> Any:
        return self.pipeline.postprocess(parts[0], **options)


class ImageTask(PipelineTask):
    input_kind = "image"

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self.parameters = IMAGES[loaded.task]
        self.required = tuple({"candidate_labels"} & self.parameters.keys())

    def read_input(self, given: Any, parameters: dict[str, Any]) -> Image.Image:
        return read_image(given)

    def example(self) -> TaskRequest:
        parameters = {"candidate_labels": ["light", "dark"]} if "candidate_labels" in self.parameters else {}
        return TaskRequest([plain(Image.fromarray(np.arange(64 * 48 * 3, dtype=np.uint8).reshape(48, 64, 3)))] * 2, parameters)


class SoundTask(PipelineTask):
    """Classification of sounds, and the base of speech recognition."""

    input_kind = "file"
    parameters: Mapping[str, Reader] = read.FUNCTION

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        need_soundfile()

    def read_input(self, given: Any, parameters: dict[str, Any]) -> np.ndarray[Any, Any]:
        return read_sound(given, self.pipeline.feature_extractor.sampling_rate)

    def _units(self, given: Any, before: dict[str, Any]) -> Iterator[dict[str, Any]]:
        lengths = getattr(self.loaded.model, "_get_feat_extract_output_lengths", None)
        for tensors in super()._units(given, before):
            samples = tensors.get("input_values")
            if lengths is not None and samples is not None and int(lengths(torch.tensor(samples.shape[-1]))) < 1:
                raise ValueError(f"the sound, or a part of it, has {samples.shape[-1]} samples, which are too few for the model")
            yield tensors

    def masks(self, unit: _Unit) -> bool:
        """Without a mask, and where a model normalises over all of the time, what is added would change the answer."""
        return "attention_mask" in unit.tensors and getattr(self.loaded.model.config, "feat_extract_norm", "layer") != "group"

    def example(self) -> TaskRequest:
        return TaskRequest({"array": [0.0, 0.1, 0.0, -0.1] * 4000, "sampling_rate": 16000}, {})


class SpeechRecognition(SoundTask):
    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self._generates = self.pipeline.type != "ctc" and self.pipeline.type != "ctc_with_lm"
        most = getattr(loaded.model.config, "max_target_positions", None) or 1024
        self._generation = read.generation(most) | {"language": read.string, "task": read.one_of("transcribe", "translate")}
        timestamps = {"return_timestamps": read.one_of(True, False, "word", "char")}
        chunks = {"chunk_length_s": read.number(1, 600), "stride_length_s": read.number(0, 300)}
        self.parameters = {**timestamps, **chunks, **(self._generation if self._generates else {})}

    def options(self, request: Request) -> dict[str, Any]:
        options = super().options(request)
        if not options.get("return_timestamps"):
            options.pop("return_timestamps", None)
        if options.get("stride_length_s", 0) > (most := 0.45 * options.get("chunk_length_s", 0)):
            raise ValueError(f"`stride_length_s` is {options['stride_length_s']}: it is at most {most:g}, 0.45 of `chunk_length_s`")
        return options

    def _run(self, units: Sequence[_Unit]) -> list[Any]:
        if self.pipeline.type != "ctc":
            return super()._run(units)
        lengths = [self._frames(unit) for unit in units]  # before the call, which takes the mask away
        outputs = super()._run(units)
        return [{**output, "tokens": output["tokens"][:, :count]} for output, count in zip(outputs, lengths, strict=True)]

    def _frames(self, unit: _Unit) -> int | None:
        """Of the model's output that are the sound's own, and not of the padding."""
        lengths = getattr(self.loaded.model, "_get_feat_extract_output_lengths", None)
        return None if lengths is None or "attention_mask" not in unit.tensors else int(lengths(unit.tensors["attention_mask"].sum()))

    def masks(self, unit: _Unit) -> bool:
        return super().masks(unit) and (self.pipeline.type != "ctc" or hasattr(self.loaded.model, "_get_feat_extract_output_lengths"))

    def _output(self, parts: list[Any], options: dict[str, Any]) -> Any:
        return self.pipeline.postprocess(parts, **options)

    def example(self) -> TaskRequest:
        return super().example()._replace(parameters={"max_new_tokens": 4} if self._generates else {})


class ImageTextToText(PipelineTask):
    """A text about images, by `generate`: of a prompt with its images, or of a chat whose messages hold them."""

    fields = frozenset({"image", "images", "text", "messages"})
    input_kind = "json"

    def __init__(self, loaded: Loaded) -> None:
        super().__init__(loaded)
        self._generation = read.generation(4096)
        self.parameters = {**self._generation, "return_full_text": read.flag, "text": read.string}

    def listed(self, inputs: Any) -> tuple[list[Any], bool]:
        if isinstance(inputs, list) and all(isinstance(each, dict) and "role" in each for each in inputs):
            return [{"messages": inputs}], True
        return super().listed(inputs)

    def read_input(self, given: Any, parameters: dict[str, Any]) -> Any:
        from transformers.pipelines.base import Chat  # an extra

        if not isinstance(given, dict):
            given = {"image": given, "text": parameters.get("text", "")}
        if "messages" in given:
            try:
                return Chat([_with_images(message) for message in given["messages"]])
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                raise InvalidInput(f"`messages` must be a list of objects with role and content: {error}") from None
        images = given.get("images", [given["image"]] if "image" in given else None)
        text = given.get("text", parameters.get("text", ""))
        if not isinstance(images, list) or not images or not isinstance(text, str):
            raise InvalidInput('`inputs` must be {"image": "base64", "text": "..."}, or a list of messages.')
        return {"images": [read_image(image) for image in images], "text": text}

    def options(self, request: Request) -> dict[str, Any]:
        generate = {name: value for name, value in request.parameters.items() if name in self._generation}
        return {"generate_kwargs": generate, "return_full_text": request.parameters.get("return_full_text", False)}

    def example(self) -> TaskRequest:
        image = plain(Image.new("RGB", (64, 48)))
        processor = self.pipeline.processor
        if getattr(processor, "chat_template", None):
            content = [{"type": "image", "image": image}, {"type": "text", "text": "Warm-up"}]
            return TaskRequest([{"role": "user", "content": content}], {"max_new_tokens": 4})
        token = getattr(processor, "image_token", "")
        return TaskRequest({"image": image, "text": f"{token} Warm-up"}, {"max_new_tokens": 4})


def _with_images(message: dict[str, Any]) -> dict[str, Any]:
    """The message, its images decoded: `{"type": "image", "image": base64}`, or OpenAI's `image_url` with a data URL."""
    content = message["content"]
    if isinstance(content, str):
        return {"role": message["role"], "content": [{"type": "text", "text": content}]}
    parts: list[dict[str, Any]] = []
    for part in content:
        if part["type"] == "text":
            parts.append({"type": "text", "text": str(part["text"])})
        elif part["type"] in ("image", "image_url"):
            given = part.get("image") or part.get("base64") or part.get("url") or part.get("image_url")
            parts.append({"type": "image", "image": read_image(given["url"] if isinstance(given, dict) else given)})
        else:
            raise ValueError(f"a part has the type {part['type']!r}, and not text or image")
    return {"role": message["role"], "content": parts}


def _length(unit: _Unit) -> int:
    """For the budget of a call: of samples of a sound the model makes a vector for each few hundred."""
    samples = unit.tensors.get("input_values")
    return 1 if samples is None or samples.ndim != 2 else 1 + samples.shape[1] // 320
