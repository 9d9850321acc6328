"""The inputs of a benchmark: given ones, the samples of the archive, generated ones, or prompts of
text generation.

Prompts are plain words, as many as a distribution says. They are requests of Hugging Face's
inference API, `{"inputs", "parameters": {"max_new_tokens"}, "stream": true}`; the protocols of
OpenAI make their own of them (`protocols`).
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
from tsx_cli.bench.load.payloads import MOST_BYTES, Payload, is_header, read_payloads
from tsx_cli.common.failure import UsageError
from tsx_cli.common.inputs import SAMPLES
from tsx_cli.common.options import archive_limits
from tsx_runtime.recordings import SUFFIX
from tsx_runtime.shared.content_types import guess_content_type

# different prompts: one that comes again may be in a server's prefix cache
PROMPTS_MADE = 256
LONGEST = 1 << 17  # tokens
_LENGTHS = re.compile(r"(?:(constant|uniform|lognormal):)?(\d+)(?:,(\d+(?:\.\d+)?))?")


class Lengths(NamedTuple):
    """`constant:64`, `uniform:16,256` (both ends) or `lognormal:64,0.6` (median, and sigma of the
    logarithm), in tokens.
    """

    kind: str
    first: int
    second: float = 0.0

    def draw(self, chance: random.Random) -> int:
        if self.kind == "uniform":
            return chance.randint(self.first, int(self.second))
        drawn = (
            self.first * math.exp(chance.gauss(0.0, self.second))
            if self.kind == "lognormal"
            else self.first
        )
        return min(max(1, round(drawn)), LONGEST)


def parse_lengths(text: str, option: str) -> Lengths:
    """Raises UsageError."""
    found = _LENGTHS.fullmatch(text.strip())
    kind, first, second = (
        (found[1] or "constant", int(found[2]), found[3]) if found else ("", 0, None)
    )
    wrong = not 1 <= first <= LONGEST or (second is None) != (kind == "constant")
    if wrong or (
        kind == "uniform" and not (str(second).isdigit() and first <= int(second or 0) <= LONGEST)
    ):
        raise UsageError(
            f"{option}: '{text}' is not a length in tokens; give a number, uniform:16,256 or"
            f" lognormal:64,0.6 (median and sigma), from 1 to {LONGEST}"
        )
    return Lengths(kind, first, float(second or 0.0))


def prompts(
    lengths: Lengths,
    answers: Lengths,
    words: Sequence[str],
    count: int = PROMPTS_MADE,
    seed: int = 0,
) -> list[Payload]:
    """The same for the same seed.

    A common word is one token for most tokenizers, so their number is near that of the tokens.
    """
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        text = " ".join(chance.choices(words, k=lengths.draw(chance)))
        body = {
            "inputs": text,
            "parameters": {"max_new_tokens": answers.draw(chance)},
            "stream": True,
        }
        made.append(Payload(json.dumps(body, separators=(",", ":")).encode(), "application/json"))
    return made


KINDS = ("image", "png", "text", "json", "file", "chat")
PROMPT_TOKENS, ANSWER_TOKENS = "lognormal:64,0.6", "64"  # of prompts where nothing is said
COUNT = 32  # different ones that are made up
IMAGE_SHAPE = (3, 480, 640)
FILE_SHAPE = (64 * 1024,)  # bytes
LARGEST_SHAPE = 1 << 26  # numbers
OF_HANDLERS = {
    "image_classifier": "image",
    "image_segmenter": "image",
    "object_detector": "image",
    "text_classifier": "text",
    GENERATION_HANDLER: "chat",
}
OF_CLASSES = {
    "ImageClassifier": "image",
    "ImageSegmenter": "image",
    "ObjectDetector": "image",
    "VisionHandler": "image",
}
OF_CLASSES |= {"TextClassifier": "text", "TextHandler": "text"}
WORDS = (  # common ones, which any vocabulary has
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
    count: int = COUNT,
    seed: int = 0,
    content_type: str | None = None,
    prompt_tokens: str | None = None,
    max_tokens: str | None = None,
) -> tuple[list[Payload], str]:
    """(payloads, where they are from, in words): what was given, else what `kind` says, else the
    archive's samples, else the files that it is warmed up with, else made up for its handler.
    `prompt_tokens`: prompts of such lengths; `max_tokens`: of the answers.

    Raises CliError, UsageError, ArchiveError.
    """
    answers = parse_lengths(max_tokens or ANSWER_TOKENS, "--max-tokens")
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
        made_up = inspection.manifest.handler == GENERATION_HANDLER and samples_of(inspection) == [
            f"{SAMPLES}/{EXAMPLE}"
        ]
        if not made_up and (
            found := of_archive(inspection)
        ):  # one prompt again and again says little of text generation
            return found
    if kind == "chat":
        return _prompts(None, answers, seed)
    if kind is None:
        raise UsageError(
            f"{archive or 'the model'} has no samples, and its input type is not known: give"
            f" --input FILE, or --input-kind ({', '.join(KINDS)}), or --prompt-tokens 64 for text"
            " generation, or --input-shape 1,28,28 for rows of numbers; tsx archive includes the"
            " directory samples/"
        )
    made = generated(kind, count, seed, shape)
    return (
        made,
        (
            f"generated: {len(made)} different"
            f" {'images' if kind in ('image', 'png') else kind + ' requests'}"
        ),
    )


def _prompts(lengths: str | None, answers: Lengths, seed: int) -> tuple[list[Payload], str]:
    known = lengths or PROMPT_TOKENS
    made = prompts(parse_lengths(known, "--prompt-tokens"), answers, WORDS.split(), seed=seed)
    return made, f"generated: {len(made)} different prompts of {known} words"


def samples_of(inspection: Inspection) -> list[str]:
    names = [member.name for member in inspection.members]
    return sorted(
        name
        for name in names
        if name.startswith(f"{SAMPLES}/")
        and name.count("/") == 1
        and not name.split("/")[1].startswith(".")
    )


def of_archive(inspection: Inspection) -> tuple[list[Payload], str] | None:
    sizes = {member.name: member.size for member in inspection.members}
    if samples := samples_of(inspection):
        return [_member(inspection, name, None) for name in samples], f"{SAMPLES}/ of the archive"
    warm = [
        each
        for each in inspection.config.warmup or ()
        if each.file in sizes and not each.file.endswith(SUFFIX)
    ]
    if warm:
        return [
            _member(inspection, each.file, each.content_type) for each in warm
        ], "the warm-up requests of the archive"
    return None


def kind_of(inspection: Inspection) -> str | None:
    """What its handler takes, by its name, or by the text of its file: `input_kind`
    (docs/guides/handlers.md), or the class it extends.
    """
    handler = inspection.manifest.handler
    if handler in OF_HANDLERS:
        return OF_HANDLERS[handler]
    file = inspection.manifest.handler_file
    name = file if file.endswith(".py") else f"{file}.py"
    code = (
        read_member(inspection.source, name, most=MIB, limits=archive_limits())
        if any(member.name == name for member in inspection.members)
        else None
    )
    try:
        tree = ast.parse(code or b"")
    except (SyntaxError, ValueError):  # the server will say so
        return None
    extended: str | None = None
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
            extended = next((OF_CLASSES[base] for base in bases if base in OF_CLASSES), extended)
    return extended


def _member(inspection: Inspection, name: str, content_type: str | None) -> Payload:
    body = (
        read_member(
            inspection.source, name, most=min(MOST_BYTES, 256 * MIB), limits=archive_limits()
        )
        or b""
    )
    return Payload(body, content_type or guess_content_type(name, body))


def generated(
    input_kind: str, count: int = COUNT, seed: int = 0, shape: Sequence[int] | None = None
) -> list[Payload]:
    """The same for the same seed.

    `shape`: channels, height and width of an image (JPEG; PNG for `png`), of the numbers of a JSON
    body, words of a text, bytes of a file. Raises UsageError.
    """
    if input_kind not in KINDS:
        raise UsageError(
            f"--input-kind: '{input_kind}' is unknown; choose one of {', '.join(KINDS)}"
        )
    if input_kind == "chat":
        return _prompts(None, parse_lengths(ANSWER_TOKENS, "--max-tokens"), seed)[0][:count]
    size = 1
    for length in shape or ():
        size *= length
    largest = LARGEST_SHAPE >> (
        4 if input_kind in ("text", "json") else 0
    )  # each takes many bytes while it is made
    if size < 1 or size > largest:
        given = ",".join(map(str, shape or ()))
        raise UsageError(
            f"--input-shape {given}: each number is 1 or more, and all together {largest} at most"
            f" ({input_kind})"
        )
    count = min(count, max(1, largest // size))
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
    """`1,28,28`; raises UsageError."""
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
    given = tuple(shape or IMAGE_SHAPE)
    if len(given) == 2:
        given = (3, *given)
    if len(given) != 3 or given[0] not in (1, 3):
        raise UsageError(
            "--input-shape of an image is channels,height,width with 1 or 3 channels, such as"
            " 3,480,640, or height,width"
        )
    return given[0], given[1], given[2]


def _image(seed: int, channels: int, height: int, width: int, form: str) -> Payload:
    """Noise whose amplitude falls with the frequency, as that of photographs does: it takes as many
    bytes, and as long to decode.
    """
    import numpy as np
    from PIL import Image

    chance = np.random.default_rng(seed)
    frequency = np.hypot(
        np.fft.fftfreq(height)[:, None] * height, np.fft.rfftfreq(width)[None, :] * width
    )
    frequency[0, 0] = 1.0
    shared = chance.standard_normal((height, width))
    planes = []
    for _ in range(channels):
        plane = np.fft.irfft2(
            np.fft.rfft2(shared + 0.3 * chance.standard_normal((height, width))) / frequency**1.1,
            s=(height, width),
        )
        planes.append(np.clip(128 + 50 * plane / (plane.std() or 1.0), 0, 255).astype(np.uint8))
    image = Image.fromarray(planes[0] if channels == 1 else np.stack(planes, axis=-1))
    file = io.BytesIO()
    image.save(file, form)
    return Payload(file.getvalue(), f"image/{form.lower()}")


def _text(chance: random.Random, words: int | None) -> Payload:
    count, known = words or chance.randint(8, 60), WORDS.split()
    return Payload(
        " ".join(chance.choice(known) for _ in range(count)).encode(), "text/plain; charset=utf-8"
    )


def _numbers(chance: random.Random, shape: Sequence[int]) -> object:
    if not shape:
        return round(chance.gauss(0, 1), 4)
    return [_numbers(chance, shape[1:]) for _ in range(shape[0])]
