"""Directories that Hugging Face's `save_pretrained` wrote: their task and the files that serving
needs, found without transformers.

Functions of names and of small JSON files, so that they hold for a directory as for the listing of
a repository.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from tsx_archiver.errors import CannotPack
from tsx_archiver.metadata.safejson import load_json
from tsx_archiver.names import MANIFEST_DIRECTORIES

# of an archive: the model's directory as it was saved; PEFT adapters are in adapters/NAME of it
DIRECTORY = "huggingface_model"
ADAPTERS = "adapters"
# of an archive's manifest: task, architecture, source, revision, adapters, and chat where it has a
# template
MANIFEST_KEY = "huggingface"
CONFIG, MODULES, ADAPTER_CONFIG = "config.json", "modules.json", "adapter_config.json"
HANDLER, GENERATION_HANDLER = "huggingface", "huggingface_generation"
GENERATION = "text-generation"
TASKS = (
    *(
        "text-classification",
        "token-classification",
        "question-answering",
        "fill-mask",
        "zero-shot-classification",
    ),
    *(
        "summarization",
        "translation",
        "text2text-generation",
        "feature-extraction",
        "sentence-similarity",
        "text-ranking",
    ),
    *(
        "image-classification",
        "image-segmentation",
        "object-detection",
        "depth-estimation",
        "zero-shot-image-classification",
    ),
    *("automatic-speech-recognition", "audio-classification", GENERATION, "image-text-to-text"),
)
ALIASES = {"chat": GENERATION, "rerank": "text-ranking"}
AUDIO_TASKS = ("automatic-speech-recognition", "audio-classification")

# By the end of the architecture's name, what it can do, the usual task first.
_EMBEDDINGS = ("feature-extraction", "sentence-similarity")
_BY_END: Mapping[str, tuple[str, ...]] = {
    "ForSequenceClassification": (
        "text-classification",
        "zero-shot-classification",
        "text-ranking",
    ),
    "ForTokenClassification": ("token-classification",),
    "ForQuestionAnswering": ("question-answering",),
    "ForMaskedLM": ("fill-mask", *_EMBEDDINGS),
    "ForCausalLM": (GENERATION, *_EMBEDDINGS),
    "LMHeadModel": (GENERATION, *_EMBEDDINGS),
    "MarianMTModel": ("translation",),
    "ForImageClassification": ("image-classification",),
    "Segmentation": ("image-segmentation",),
    "ForObjectDetection": ("object-detection",),
    "ForDepthEstimation": ("depth-estimation",),
    "ForImageTextToText": ("image-text-to-text",),
    "ForCTC": ("automatic-speech-recognition",),
    "ForSpeechSeq2Seq": ("automatic-speech-recognition",),
    "SpeechEncoderDecoderModel": ("automatic-speech-recognition",),
    "ForAudioClassification": ("audio-classification",),
}
_TRANSLATION = re.compile(r"translation_[\w-]+_to_[\w-]+", re.ASCII)
_SPEECH = (
    "whisper",
    "speech_to_text",
    "moonshine",
    "seamless_m4t",
    "seamless_m4t_v2",
)  # kinds of ForConditionalGeneration
_HEARS = re.compile("wav2vec2|hubert|wavlm|unispeech|sew|data2vec-audio|audio-spectrogram|whisper")
_TRANSLATES = ("m2m_100", "fsmt", "mbart", "nllb-moe")
_SUMMARIZES = ("pegasus", "bigbird_pegasus", "pegasus_x", "led")

_WEIGHTS = re.compile(
    r"(?:(?P<safe>(?:adapter_)?model(?:-\d+-of-\d+)?\.safetensors)|(?:pytorch_|adapter_)model(?:-\d+-of-\d+)?\.bin)"
)
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_OTHERS = re.compile(
    r".*\.(?:json|txt|model|jinja|py|tiktoken|spm|bpe)|README\.md|(?:LICEN[CS]E|NOTICE).*",
    re.IGNORECASE,
)
_NOT_NEEDED = re.compile(r"trainer_state\.json|all_results\.json|requirements\.txt|(?:tf_|flax_).*")
_PARTS = re.compile(
    r"(?:\w+_)?\d+_\w+|(?:additional_)?chat_templates"
)  # folders: of a sentence-transformers model, and of templates
_PIPELINE_TAG = re.compile(
    r"^pipeline_tag:[ \t]*([\w-]+)[ \t]*$", re.MULTILINE
)  # in the head of a model card
_CODE_ELSEWHERE = re.compile(r'[^"]*--[^"]*')
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def is_huggingface(path: Path) -> bool:
    """A directory of a model or of an adapter, and no archive that was unpacked."""
    if not path.is_dir() or any((path / name).exists() for name in MANIFEST_DIRECTORIES):
        return False
    if (path / ADAPTER_CONFIG).is_file():
        return True
    try:
        config = _read_object(path / CONFIG)
    except CannotPack:  # said where the model is packed
        return (path / CONFIG).is_file() and any(
            _WEIGHTS.fullmatch(file.name) for file in path.iterdir()
        )
    return "architectures" in config or "model_type" in config


@dataclass(frozen=True)
class Pretrained:
    """A model's directory. Raises CannotPack where a file of it cannot be read."""

    directory: Path
    names: Collection[str]  # of all files, as POSIX paths

    @cached_property
    def config(self) -> dict[str, Any]:
        return _read_object(self.directory / CONFIG)

    @property
    def architecture(self) -> str:
        named = self.config.get("architectures")
        return str(named[0]) if isinstance(named, list) and named else ""

    @property
    def code(self) -> list[str]:
        """The files that would run as the model's own code."""
        return [name for name in self.needed if name.endswith(".py")]

    @cached_property
    def needed(self) -> list[str]:
        """The files to pack; all weights in one format. Raises CannotPack where there are none."""
        index = next((name for name in _INDEXES if name in self.names), None)
        shards = (
            ()
            if index is None or "model.safetensors" in self.names
            else shards_of(self.directory / index)
        )
        if missing := [name for name in shards if name not in self.names]:
            some = f"{missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            raise CannotPack(
                f"{self.directory} lacks weights that {index} names: {some}. Download or save the"
                " model again."
            )
        return needed_files(self.names, shards, str(self.directory))

    @property
    def pickles(self) -> list[str]:
        return [name for name in self.needed if name.endswith(".bin")]

    @property
    def has_chat_template(self) -> bool:
        """The tokenizer's own, or the processor's."""
        if any(name == "chat_template.json" or name.endswith(".jinja") for name in self.names):
            return True
        return "tokenizer_config.json" in self.names and "chat_template" in _read_object(
            self.directory / "tokenizer_config.json"
        )

    @property
    def mask(self) -> str:
        """The token of a fill-mask model that is filled."""
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            token = (
                _read_object(self.directory / name).get("mask_token")
                if name in self.names
                else None
            )
            if token:
                return str(token.get("content") if isinstance(token, dict) else token)
        return "[MASK]"

    def task(self, asked: str | None = None) -> str:
        """`asked`, if the architecture can do that; else by the model card, the layout and the
        architecture. Raises CannotPack.
        """
        able = self._able()
        if asked is not None:
            task = checked_task(asked)
            if able and family(task) not in able:
                raise CannotPack(
                    f"{self.directory}: a {self.architecture} does {' or '.join(able)}, not {task}."
                    " Name one of these."
                )
            if asked == "chat" and not self.has_chat_template:
                raise CannotPack(
                    f"{self.directory} has no chat template, so it cannot chat. Use --task"
                    f" {GENERATION}, or save one with it."
                )
            return task
        tagged = self._tagged()
        if tagged in able:
            return _EMBEDDINGS[0] if tagged in _EMBEDDINGS else str(tagged)
        usual = self._usual(able)
        if usual is None:
            what = (
                f"the architecture {self.architecture}"
                if self.architecture
                else "no architecture in its config.json"
            )
            tasks = ", ".join(able or TASKS)
            raise CannotPack(
                f"{self.directory} has {what}, which does not tell its task. Name it with --task,"
                f" which is one of {tasks}."
            )
        return usual

    def _able(self) -> tuple[str, ...]:
        """What the architecture can do; empty where that is not known."""
        name, kind = self.architecture, str(self.config.get("model_type", ""))
        if name.endswith("ForSequenceClassification") and _HEARS.match(kind):
            return ("audio-classification",)
        if name.endswith("ForConditionalGeneration"):
            if kind in _SPEECH:
                return ("automatic-speech-recognition",)
            if "vision_config" in self.config:
                return ("image-text-to-text",)
            return (
                ()
                if "audio_config" in self.config
                else ("summarization", "translation", "text2text-generation")
            )
        if name.endswith("ForObjectDetection") and "text_config" in self.config:
            return ()  # of words that a request names
        found = next((tasks for end, tasks in _BY_END.items() if name.endswith(end)), ())
        if found or not name.endswith("Model"):
            return found
        if "text_config" in self.config and "vision_config" in self.config:
            return ("zero-shot-image-classification",)
        reads = any(
            file in self.names for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
        )
        return (
            (*_EMBEDDINGS, "text-ranking")
            if reads and "preprocessor_config.json" not in self.names
            else ()
        )

    def _usual(self, able: tuple[str, ...]) -> str | None:
        kind = str(self.config.get("model_type", ""))
        labels = [str(label).lower() for label in (self.config.get("id2label") or {}).values()]
        if MODULES in self.names and _EMBEDDINGS[0] in able:
            return _EMBEDDINGS[0]
        if "zero-shot-classification" in able:
            entails = any(label.startswith("entail") for label in labels)
            return (
                "zero-shot-classification"
                if entails
                else "text-ranking"
                if len(labels) == 1
                else able[0]
            )
        if "summarization" in able:
            named: dict[str, Any] = self.config.get("task_specific_params") or {}
            told = {"summarization", "translation"} & {name.partition("_")[0] for name in named}
            if len(told) == 1:
                return next(iter(told))
            return (
                "translation"
                if kind in _TRANSLATES
                else "summarization"
                if kind in _SUMMARIZES
                else None
            )
        return able[0] if able else None

    def _tagged(self) -> str | None:
        if "README.md" not in self.names:
            return None
        with (self.directory / "README.md").open(encoding="utf-8", errors="replace") as card:
            head = card.read(1 << 16).split("\n---", 1)[0]
        found = _PIPELINE_TAG.search(head) if head.startswith("---") else None
        return str(found[1]) if found else None


def extras_of(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """The extras of tsx-serve without which an archive of this manifest cannot be served."""
    facts = manifest.get(MANIFEST_KEY)
    if not isinstance(facts, dict):
        return ()
    needs = {
        "transformers": True,
        "peft": facts.get("adapters"),
        "audio": facts.get("task") in AUDIO_TASKS,
    }
    return tuple(extra for extra, needed in needs.items() if needed)


def family(task: str) -> str:
    """`translation` of `translation_en_to_de`."""
    return "translation" if _TRANSLATION.fullmatch(task) else task


def checked_task(text: str) -> str:
    """Raises CannotPack."""
    task = ALIASES.get(text, text)
    if family(task) not in TASKS:
        raise CannotPack(
            f"There is no task {text!r}{_meant(text, (*TASKS, *ALIASES))}. The tasks are"
            f" {', '.join(TASKS)}."
        )
    return task


def needed_files(names: Iterable[str], shards: Collection[str], source: str) -> list[str]:
    """Of all files, those that serving needs.

    `shards`: those that the index names. Raises CannotPack where no weights are among them.
    """
    kept, weights, found = [], dict[str, list[str]](), list(names)
    for name in found:
        path = PurePosixPath(name)
        folder = str(path.parent)
        if any(part.startswith(".") for part in path.parts) or not (
            folder == "." or _PARTS.fullmatch(folder) or path.suffix == ".py"
        ):
            continue
        if (folder == "." and shards and name in shards) or (
            not (folder == "." and shards) and _WEIGHTS.fullmatch(path.name)
        ):
            weights.setdefault(folder, []).append(name)
        elif (
            _OTHERS.fullmatch(path.name)
            and not _NOT_NEEDED.fullmatch(path.name)
            and not path.name.endswith(_INDEXES)
        ):
            kept.append(name)
    if "." not in weights:
        others = [
            name
            for name in found
            if name.endswith(
                (".safetensors", ".bin", ".h5", ".msgpack", ".gguf", ".ckpt", ".pt", ".pth")
            )
        ]
        has = f" that are served (it has {', '.join(others[:3])})" if others else ""
        raise CannotPack(
            f"{source} has no weights{has}. Save the model with save_pretrained, as"
            " model.safetensors."
        )
    for each in weights.values():
        safe = [name for name in each if name.endswith(".safetensors")]
        kept += safe or each
    if shards:
        kept.append(_INDEXES[0] if next(iter(shards)).endswith(".safetensors") else _INDEXES[1])
    return sorted(kept)


def weights_size(archive: Path) -> int:
    """Bytes of the weights in an unpacked archive."""
    return sum(
        file.stat().st_size
        for file in (archive / DIRECTORY).glob("*")
        if _WEIGHTS.fullmatch(file.name)
    )


def shards_of(index: Path) -> tuple[str, ...]:
    """The files that an index of weights names. Raises CannotPack."""
    found = _read_object(index, most_bytes=64 << 20, most_values=2_000_000).get("weight_map")
    if (
        not isinstance(found, dict)
        or not found
        or any("/" in str(name) or not isinstance(name, str) for name in found.values())
    ):
        raise CannotPack(
            f"{index} does not say which files have the weights. Download or save the model again."
        )
    return tuple(sorted(set(found.values())))


def check_references(directory: Path) -> None:
    """Check that no index and no processor names weights outside of the model. Raises
    CannotPack.
    """
    for index in directory.rglob("*.index.json"):
        shards_of(index)
    for path in (directory / "processor_config.json", directory / "audio_tokenizer_config.json"):
        if path.exists() and "audio_tokenizer_name_or_path" in json.dumps(_read_object(path)):
            raise CannotPack(
                f"{path} names another model (audio_tokenizer_name_or_path), which is not loaded."
                " Remove that key."
            )


def read_adapter(name: str, directory: Path) -> tuple[str, str]:
    """Of a PEFT adapter, its kind, such as LORA, and the model that it was made for.

    Raises CannotPack.
    """
    if not _ADAPTER_NAME.fullmatch(name):
        raise CannotPack(
            f"An adapter cannot be called {name!r}: letters, digits, '_', '-' and '.' only, a"
            " letter or digit first."
        )
    if not (directory / ADAPTER_CONFIG).is_file():
        raise CannotPack(
            f"{directory} is no PEFT adapter: it has no {ADAPTER_CONFIG}. Name the directory that"
            " its save_pretrained wrote."
        )
    config = _read_object(directory / ADAPTER_CONFIG)
    kind, base = config.get("peft_type"), config.get("base_model_name_or_path")
    if not isinstance(kind, str) or not isinstance(base, str | None):
        raise CannotPack(
            f"{directory / ADAPTER_CONFIG} describes no adapter: it has no peft_type. Save the"
            " adapter again with PEFT."
        )
    return kind, base or "a model that it does not name"


def external_code(directory: Path) -> str | None:
    """A class of another repository of the Hub that a file of the model names, as
    ORG/OTHER--module.Class. Raises CannotPack.
    """
    for path in sorted(directory.glob("*config.json")):
        config = _read_object(path)
        if found := _CODE_ELSEWHERE.search(
            json.dumps([config.get("auto_map"), config.get("custom_pipelines")])
        ):
            return f"{found[0]} of {path.name}"
    return None


def _read_object(
    path: Path, *, most_bytes: int = 4 << 20, most_values: int = 500_000
) -> dict[str, Any]:
    """Raises CannotPack."""
    try:
        found = load_json(path.read_bytes(), most_bytes=most_bytes, most_values=most_values)
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise CannotPack(
            f"{path} cannot be read: {error}. Save the model again with save_pretrained."
        ) from error
    return found


def _meant(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
