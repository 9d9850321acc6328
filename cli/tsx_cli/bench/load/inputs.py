"""The inputs of a benchmark: given files, an archive's samples, generated data, or prompts.

Prompts consist of common words; a distribution gives their number. They are requests of Hugging
Face's inference API, `{"inputs", "parameters": {"max_new_tokens"}, "stream": true}`. The module
`protocols` converts them for OpenAI's protocols.
"""

from __future__ import annotations

import ast
import io
import json
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tsx_archiver import Inspection, inspect_archive, read_member
from tsx_archiver.limits import MIB
from tsx_archiver.metadata.huggingface import GENERATION_HANDLER
from tsx_archiver.pretrained import EXAMPLE
from tsx_cli.bench.load.payloads import MAX_PAYLOAD_BYTES, Payload, is_header, read_payloads
from tsx_cli.common.failure import UsageError
from tsx_cli.common.inputs import SAMPLES
from tsx_cli.common.options import archive_limits
from tsx_runtime.recordings import SUFFIX
from tsx_runtime.shared.content_types import guess_content_type

# A server may have a repeated prompt in its prefix cache, so there are many different prompts.
PROMPT_COUNT = 256
MAX_TOKENS = 1 << 17
_LENGTHS = re.compile(r"(?:(constant|uniform|lognormal):)?(\d+)(?:,(\d+(?:\.\d+)?))?")


class Lengths(NamedTuple):
    """A distribution of lengths in tokens.

    It is `constant:64`, `uniform:16,256` (both ends included) or `lognormal:64,0.6` (the median,
    and the sigma of the logarithm).
    """

    kind: str
    first: int
    second: float = 0.0

    def draw(self, chance: random.Random) -> int:
        if self.kind == "uniform":
            return chance.randint(self.first, int(self.second))
        length = (
            self.first * math.exp(chance.gauss(0.0, self.second))
            if self.kind == "lognormal"
            else self.first
        )
        return min(max(1, round(length)), MAX_TOKENS)


def parse_lengths(text: str, option: str) -> Lengths:
    """Parse a distribution of lengths.

    Raises:
        UsageError: The text is not a distribution.
    """
    match = _LENGTHS.fullmatch(text.strip())
    kind, first, second = (
        (match[1] or "constant", int(match[2]), match[3]) if match else ("", 0, None)
    )
    is_invalid = not 1 <= first <= MAX_TOKENS or (second is None) != (kind == "constant")
    if is_invalid or (
        kind == "uniform"
        and not (str(second).isdigit() and first <= int(second or 0) <= MAX_TOKENS)
    ):
        raise UsageError(
            f"{option}: '{text}' is not a length in tokens; give a number, uniform:16,256 or"
            f" lognormal:64,0.6 (median and sigma), from 1 to {MAX_TOKENS}"
        )
    return Lengths(kind, first, float(second or 0.0))


def prompts(
    lengths: Lengths,
    answers: Lengths,
    vocabulary: Sequence[str],
    count: int = PROMPT_COUNT,
    seed: int = 0,
) -> list[Payload]:
    """Return prompts; the same seed gives the same prompts.

    Most tokenizers make one token of a common word, so a number of words stands for a number of
    tokens.
    """
    chance = random.Random(seed)
    payloads = []
    for _ in range(count):
        text = " ".join(chance.choices(vocabulary, k=lengths.draw(chance)))
        body = {
            "inputs": text,
            "parameters": {"max_new_tokens": answers.draw(chance)},
            "stream": True,
        }
        payloads.append(
            Payload(json.dumps(body, separators=(",", ":")).encode(), "application/json")
        )
    return payloads


KINDS = ("image", "png", "text", "json", "file", "chat")
# The default distributions of lengths.
DEFAULT_PROMPT_TOKENS, DEFAULT_ANSWER_TOKENS = "lognormal:64,0.6", "64"
INPUT_COUNT = 32  # number of different generated inputs
IMAGE_SHAPE = (3, 480, 640)
FILE_SHAPE = (64 * 1024,)  # bytes
MAX_SHAPE_SIZE = 1 << 26  # maximum number of elements
KINDS_BY_HANDLER = {
    "image_classifier": "image",
    "image_segmenter": "image",
    "object_detector": "image",
    "text_classifier": "text",
    GENERATION_HANDLER: "chat",
}
KINDS_BY_CLASS = {
    "ImageClassifier": "image",
    "ImageSegmenter": "image",
    "ObjectDetector": "image",
    "VisionHandler": "image",
}
KINDS_BY_CLASS |= {"TextClassifier": "text", "TextHandler": "text"}
# Common words, which are in every vocabulary.
WORDS = (
    "the of and to in a is that for it was on are as with they be at one have this from by had not"
    " but what all were when we there can an your which their said if do will each about how up out"
    " them then she many some so these would other into has more her two like him see time could no"
    " make than first been its who now people my made over did down only way find use may water"
    " long little very after words called just where most know good new great market world price"
    " team game company year money oil computer science report"
)


def choose_payloads(
    archive: Path | None,
    sources: Sequence[Path] = (),
    *,
    kind: str | None = None,
    shape: Sequence[int] | None = None,
    count: int = INPUT_COUNT,
    seed: int = 0,
    content_type: str | None = None,
    prompt_tokens: str | None = None,
    max_tokens: str | None = None,
) -> tuple[list[Payload], str]:
    """Return the payloads and a description of their source.

    The first source that exists is used: the given files, data of `kind`, the archive's samples,
    its warm-up files, or data for its handler. `prompt_tokens` requests prompts of these lengths,
    and `max_tokens` limits the answers to these lengths.

    Raises:
        CliError: A file cannot be read.
        UsageError: There is no source, or the options do not fit together.
        ArchiveError: The archive cannot be read.
    """
    answers = parse_lengths(max_tokens or DEFAULT_ANSWER_TOKENS, "--max-tokens")
    if prompt_tokens is not None or kind == "chat":
        if sources or shape is not None or kind not in (None, "chat"):
            raise UsageError(
                "--prompt-tokens makes prompts; leave --input, --input-kind and --input-shape out,"
                " or it"
            )
        return _prompts(prompt_tokens, answers, seed)
    if max_tokens is not None:
        raise UsageError(
            "--max-tokens is for generated prompts: give --prompt-tokens as well; other inputs say"
            " it themselves"
        )
    if content_type is not None and not is_header("content-type", content_type):
        raise UsageError(
            f"--content-type: '{content_type}' is not a content type; one looks like image/png"
        )
    if sources:
        if kind is not None or shape is not None:
            raise UsageError(
                "--input sends existing inputs, and --input-kind and --input-shape generate them;"
                " give only one of them"
            )
        return read_payloads(sources, content_type=content_type), ", ".join(
            source.name or str(source) for source in sources
        )
    if content_type is not None:
        raise UsageError(
            "--content-type applies to --input only; samples of an archive and generated inputs"
            " have their own"
        )
    if kind is None and shape is not None:
        kind = "json"
    if kind is None and archive is not None:
        inspection = inspect_archive(archive, limits=archive_limits())
        kind = kind_of(inspection)
        has_example_only = inspection.manifest.handler == GENERATION_HANDLER and samples_of(
            inspection
        ) == [f"{SAMPLES}/{EXAMPLE}"]
        # A single example is not used, because one repeated prompt says little about generation.
        if not has_example_only and (archive_payloads := payloads_of_archive(inspection)):
            return archive_payloads
    if kind == "chat":
        return _prompts(None, answers, seed)
    if kind is None:
        raise UsageError(
            f"{archive or 'the model'} has no samples, and its input type is not known: give"
            f" --input FILE, or --input-kind ({', '.join(KINDS)}), or --prompt-tokens 64 for text"
            " generation, or --input-shape 1,28,28 for rows of numbers; tsx archive includes the"
            " directory samples/"
        )
    payloads = generate_payloads(kind, count, seed, shape)
    return (
        payloads,
        (
            f"generated: {len(payloads)} different"
            f" {'images' if kind in ('image', 'png') else kind + ' requests'}"
        ),
    )


def _prompts(lengths: str | None, answers: Lengths, seed: int) -> tuple[list[Payload], str]:
    lengths_text = lengths or DEFAULT_PROMPT_TOKENS
    payloads = prompts(
        parse_lengths(lengths_text, "--prompt-tokens"), answers, WORDS.split(), seed=seed
    )
    return payloads, f"generated: {len(payloads)} different prompts of {lengths_text} words"


def samples_of(inspection: Inspection) -> list[str]:
    names = [member.name for member in inspection.members]
    return sorted(
        name
        for name in names
        if name.startswith(f"{SAMPLES}/")
        and name.count("/") == 1
        and not name.split("/")[1].startswith(".")
    )


def payloads_of_archive(inspection: Inspection) -> tuple[list[Payload], str] | None:
    sizes = {member.name: member.size for member in inspection.members}
    if samples := samples_of(inspection):
        return [_member(inspection, name, None) for name in samples], f"{SAMPLES}/ of the archive"
    warm_ups = [
        request
        for request in inspection.config.warmup or ()
        if request.file in sizes and not request.file.endswith(SUFFIX)
    ]
    if warm_ups:
        return [
            _member(inspection, request.file, request.content_type) for request in warm_ups
        ], "the warm-up requests of the archive"
    return None


def kind_of(inspection: Inspection) -> str | None:
    """Return the kind of input that the handler of an archive takes, if it is known.

    It is derived from the handler's name, or from its source: either from `input_kind`
    (docs/guides/handlers.md) or from a base class.
    """
    handler = inspection.manifest.handler
    if handler in KINDS_BY_HANDLER:
        return KINDS_BY_HANDLER[handler]
    file = inspection.manifest.handler_file
    name = file if file.endswith(".py") else f"{file}.py"
    code = (
        read_member(inspection.source, name, most=MIB, limits=archive_limits())
        if any(member.name == name for member in inspection.members)
        else None
    )
    try:
        tree = ast.parse(code or b"")
    except (SyntaxError, ValueError):  # The server reports invalid code.
        return None
    kind_of_base: str | None = None
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and node.value.value in KINDS
        ):
            if any(
                isinstance(target, ast.Name) and target.id == "input_kind"
                for target in node.targets
            ):
                return str(node.value.value)
        elif isinstance(node, ast.ClassDef):
            bases = [
                base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
                for base in node.bases
            ]
            kind_of_base = next(
                (KINDS_BY_CLASS[base] for base in bases if base in KINDS_BY_CLASS), kind_of_base
            )
    return kind_of_base


def _member(inspection: Inspection, name: str, content_type: str | None) -> Payload:
    body = (
        read_member(
            inspection.source, name, most=min(MAX_PAYLOAD_BYTES, 256 * MIB), limits=archive_limits()
        )
        or b""
    )
    return Payload(body, content_type or guess_content_type(name, body))


def generate_payloads(
    input_kind: str, count: int = INPUT_COUNT, seed: int = 0, shape: Sequence[int] | None = None
) -> list[Payload]:
    """Return generated payloads; the same seed gives the same payloads.

    `shape` is the channels, height and width of an image (JPEG; PNG for `png`), the shape of the
    numbers in a JSON body, the number of words of a text, or the number of bytes of a file.

    Raises:
        UsageError: The kind is unknown, or cannot have such a shape.
    """
    if input_kind not in KINDS:
        raise UsageError(
            f"--input-kind: '{input_kind}' is unknown; choose one of {', '.join(KINDS)}"
        )
    if input_kind == "chat":
        return _prompts(None, parse_lengths(DEFAULT_ANSWER_TOKENS, "--max-tokens"), seed)[0][:count]
    size = 1
    for length in shape or ():
        size *= length
    # During generation a number or a word takes many bytes, so their maximum is smaller.
    max_size = MAX_SHAPE_SIZE >> (4 if input_kind in ("text", "json") else 0)
    if size < 1 or size > max_size:
        shape_text = ",".join(map(str, shape or ()))
        raise UsageError(
            f"--input-shape {shape_text}: each number is 1 or more, and all together {max_size} at"
            f" most ({input_kind})"
        )
    count = min(count, max(1, max_size // size))
    chance = random.Random(seed)
    if input_kind in ("image", "png"):
        channels, height, width = _image_shape(shape)
        return [
            _image(
                chance.randrange(1 << 32),
                channels,
                height,
                width,
                "PNG" if input_kind == "png" else "JPEG",
            )
            for _ in range(count)
        ]
    if input_kind == "text":
        return [_text(chance, size if shape else None) for _ in range(count)]
    if input_kind == "json":
        if not shape:
            raise UsageError(
                "--input-kind json needs the shape of the numbers: --input-shape 1,28,28"
            )
        return [
            Payload(
                json.dumps(_numbers(chance, shape), separators=(",", ":")).encode(),
                "application/json",
            )
            for _ in range(count)
        ]
    return [
        Payload(chance.randbytes(size if shape else FILE_SHAPE[0]), "application/octet-stream")
        for _ in range(count)
    ]


def parse_shape(text: str) -> tuple[int, ...]:
    """Parse a shape such as `1,28,28`.

    Raises:
        UsageError: The text is not a shape.
    """
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise UsageError(
            f"--input-shape: '{text}' is not a shape; give whole numbers from 1 on, such as 1,28,28"
        )
    return shape


def _image_shape(shape: Sequence[int] | None) -> tuple[int, int, int]:
    image_shape = tuple(shape or IMAGE_SHAPE)
    if len(image_shape) == 2:
        image_shape = (3, *image_shape)
    if len(image_shape) != 3 or image_shape[0] not in (1, 3):
        raise UsageError(
            "--input-shape of an image is channels,height,width with 1 or 3 channels, such as"
            " 3,480,640, or height,width"
        )
    return image_shape[0], image_shape[1], image_shape[2]


def _image(seed: int, channels: int, height: int, width: int, image_format: str) -> Payload:
    """Return an image of noise whose amplitude falls with the frequency, as in photographs.

    It is as large as a photograph, and takes as long to decode.
    """
    import numpy as np
    from PIL import Image

    chance = np.random.default_rng(seed)
    frequency = np.hypot(
        np.fft.fftfreq(height)[:, None] * height, np.fft.rfftfreq(width)[None, :] * width
    )
    frequency[0, 0] = 1.0
    shared_noise = chance.standard_normal((height, width))
    planes = []
    for _ in range(channels):
        plane = np.fft.irfft2(
            np.fft.rfft2(shared_noise + 0.3 * chance.standard_normal((height, width)))
            / frequency**1.1,
            s=(height, width),
        )
        planes.append(np.clip(128 + 50 * plane / (plane.std() or 1.0), 0, 255).astype(np.uint8))
    image = Image.fromarray(planes[0] if channels == 1 else np.stack(planes, axis=-1))
    file = io.BytesIO()
    image.save(file, image_format)
    return Payload(file.getvalue(), f"image/{image_format.lower()}")


def _text(chance: random.Random, word_count: int | None) -> Payload:
    count, vocabulary = word_count or chance.randint(8, 60), WORDS.split()
    return Payload(
        " ".join(chance.choice(vocabulary) for _ in range(count)).encode(),
        "text/plain; charset=utf-8",
    )


def _numbers(chance: random.Random, shape: Sequence[int]) -> object:
    if not shape:
        return round(chance.gauss(0, 1), 4)
    return [_numbers(chance, shape[1:]) for _ in range(shape[0])]
