"""Directories of Hugging Face's `save_pretrained`: their task, and the files that serving needs.

Both are derived from file names and small JSON files, without transformers. Therefore this also
works for listings of repositories on the Hub.
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

# The model's directory in an archive; PEFT adapters are in its subdirectories adapters/NAME.
DIRECTORY = "huggingface_model"
ADAPTERS = "adapters"
# The manifest's key for task, architecture, source, revision, adapters and chat.
MANIFEST_KEY = "huggingface"
CONFIG, MODULES, ADAPTER_CONFIG = "config.json", "modules.json", "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
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

_EMBEDDINGS = ("feature-extraction", "sentence-similarity")
# The pipeline, or the engine for chats.
_IMAGE_CHATS = ("image-text-to-text", GENERATION)
# Suffix of an architecture's name -> its tasks, the usual task first.
_TASKS_BY_SUFFIX: Mapping[str, tuple[str, ...]] = {
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
    "ForImageTextToText": _IMAGE_CHATS,
    "ForCTC": ("automatic-speech-recognition",),
    "ForSpeechSeq2Seq": ("automatic-speech-recognition",),
    "SpeechEncoderDecoderModel": ("automatic-speech-recognition",),
    "ForAudioClassification": ("audio-classification",),
}
_TRANSLATION = re.compile(r"translation_[\w-]+_to_[\w-]+", re.ASCII)
# Values of `model_type` whose ForConditionalGeneration recognizes speech.
_SPEECH = ("whisper", "speech_to_text", "moonshine", "seamless_m4t", "seamless_m4t_v2")
_AUDIO_TYPES = re.compile(
    "wav2vec2|hubert|wavlm|unispeech|sew|data2vec-audio|audio-spectrogram|whisper"
)
_TRANSLATION_TYPES = ("m2m_100", "fsmt", "mbart", "nllb-moe")
_SUMMARIZATION_TYPES = ("pegasus", "bigbird_pegasus", "pegasus_x", "led")

_WEIGHTS = re.compile(
    r"(?:(?P<safe>(?:adapter_)?model(?:-\d+-of-\d+)?\.safetensors)|(?:pytorch_|adapter_)model(?:-\d+-of-\d+)?\.bin)"
)
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_OTHER_FILES = re.compile(
    r".*\.(?:json|txt|model|jinja|py|tiktoken|spm|bpe)|README\.md|(?:LICEN[CS]E|NOTICE).*",
    re.IGNORECASE,
)
_UNNEEDED = re.compile(r"trainer_state\.json|all_results\.json|requirements\.txt|(?:tf_|flax_).*")
# Folders of a sentence-transformers model, and of chat templates.
_SUBFOLDERS = re.compile(r"(?:\w+_)?\d+_\w+|(?:additional_)?chat_templates")
# A line in the front matter of a model card.
_PIPELINE_TAG = re.compile(r"^pipeline_tag:[ \t]*([\w-]+)[ \t]*$", re.MULTILINE)
_EXTERNAL_CODE = re.compile(r'[^"]*--[^"]*')
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def is_huggingface(path: Path) -> bool:
    """Tell whether a path is the directory of a model or an adapter, not of an unpacked archive."""
    if not path.is_dir() or any((path / name).exists() for name in MANIFEST_DIRECTORIES):
        return False
    if (path / ADAPTER_CONFIG).is_file():
        return True
    try:
        config = read_object(path / CONFIG)
    except CannotPack:  # Packing will report the error.
        return (path / CONFIG).is_file() and any(
            _WEIGHTS.fullmatch(file.name) for file in path.iterdir()
        )
    return "architectures" in config or "model_type" in config


@dataclass(frozen=True)
class Pretrained:
    """A model's directory; its properties raise CannotPack for an unreadable file.

    Attributes:
        directory: The directory.
        names: The names of all files, as POSIX paths.
    """

    directory: Path
    names: Collection[str]

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_object(self.directory / CONFIG)

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures")
        return str(names[0]) if isinstance(names, list) and names else ""

    @property
    def code(self) -> list[str]:
        """The files with the model's own code."""
        return [name for name in self.needed if name.endswith(".py")]

    @cached_property
    def needed(self) -> list[str]:
        """The files to pack, with all weights in one format."""
        index = next((name for name in _INDEXES if name in self.names), None)
        shards = (
            ()
            if index is None or "model.safetensors" in self.names
            else shards_of(self.directory / index)
        )
        if missing := [name for name in shards if name not in self.names]:
            examples = f"{missing[0]}" + (
                f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            )
            raise CannotPack(
                f"{self.directory} lacks weights that {index} names: {examples}. Download or save"
                " the model again."
            )
        return needed_files(self.names, shards, str(self.directory))

    @property
    def pickles(self) -> list[str]:
        return [name for name in self.needed if name.endswith(".bin")]

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer or the processor has a chat template."""
        if any(name == "chat_template.json" or name.endswith(".jinja") for name in self.names):
            return True
        return "tokenizer_config.json" in self.names and "chat_template" in read_object(
            self.directory / "tokenizer_config.json"
        )

    @property
    def mask(self) -> str:
        """The token that a fill-mask model fills."""
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            token = (
                read_object(self.directory / name).get("mask_token") if name in self.names else None
            )
            if token:
                return str(token.get("content") if isinstance(token, dict) else token)
        return "[MASK]"

    def task(self, name: str | None = None) -> str:
        """Check a task, or derive it from the model card, the layout and the architecture.

        Raises:
            CannotPack: The architecture cannot do the task, or the task is not clear.
        """
        tasks = self._tasks()
        if name is not None:
            task = checked_task(name)
            if tasks and family(task) not in tasks:
                raise CannotPack(
                    f"{self.directory}: a {self.architecture} does {' or '.join(tasks)}, not"
                    f" {task}. Name one of these."
                )
            if name == "chat" and not self.has_chat_template:
                raise CannotPack(
                    f"{self.directory} has no chat template, so it cannot chat. Use --task"
                    f" {GENERATION}, or save one with it."
                )
            return task
        tag = self._pipeline_tag()
        if tag in tasks:
            return _EMBEDDINGS[0] if tag in _EMBEDDINGS else str(tag)
        default_task = self._default_task(tasks)
        if default_task is None:
            hint = (
                f"the architecture {self.architecture}"
                if self.architecture
                else "no architecture in its config.json"
            )
            raise CannotPack(
                f"{self.directory} has {hint}, which does not tell its task. Name it with --task,"
                f" which is one of {', '.join(tasks or TASKS)}."
            )
        return default_task

    def _tasks(self) -> tuple[str, ...]:
        """Return the tasks of the architecture; empty if they are unknown."""
        name, kind = self.architecture, str(self.config.get("model_type", ""))
        if name.endswith("ForSequenceClassification") and _AUDIO_TYPES.match(kind):
            return ("audio-classification",)
        if name.endswith("ForConditionalGeneration"):
            if kind in _SPEECH:
                return ("automatic-speech-recognition",)
            if "vision_config" in self.config:
                return _IMAGE_CHATS
            if "audio_config" in self.config:
                return (GENERATION,) if self.has_chat_template else ()
            return ("summarization", "translation", "text2text-generation")
        if name.endswith("ForObjectDetection") and "text_config" in self.config:
            # No task covers such a model, which detects the objects that a request names.
            return ()
        by_suffix = _TASKS_BY_SUFFIX.items()
        tasks = next((tasks for suffix, tasks in by_suffix if name.endswith(suffix)), ())
        if tasks or not name.endswith("Model"):
            return tasks
        if "text_config" in self.config and "vision_config" in self.config:
            return ("zero-shot-image-classification",)
        has_tokenizer = any(
            file in self.names for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
        )
        return (
            (*_EMBEDDINGS, "text-ranking")
            if has_tokenizer and "preprocessor_config.json" not in self.names
            else ()
        )

    def _default_task(self, tasks: tuple[str, ...]) -> str | None:
        kind = str(self.config.get("model_type", ""))
        labels = [str(label).lower() for label in (self.config.get("id2label") or {}).values()]
        if MODULES in self.names and _EMBEDDINGS[0] in tasks:
            return _EMBEDDINGS[0]
        if "zero-shot-classification" in tasks:
            has_entailment = any(label.startswith("entail") for label in labels)
            return (
                "zero-shot-classification"
                if has_entailment
                else "text-ranking"
                if len(labels) == 1
                else tasks[0]
            )
        if "summarization" in tasks:
            params: dict[str, Any] = self.config.get("task_specific_params") or {}
            candidates = {"summarization", "translation"} & {
                name.partition("_")[0] for name in params
            }
            if len(candidates) == 1:
                return next(iter(candidates))
            return (
                "translation"
                if kind in _TRANSLATION_TYPES
                else "summarization"
                if kind in _SUMMARIZATION_TYPES
                else None
            )
        return tasks[0] if tasks else None

    def _pipeline_tag(self) -> str | None:
        if "README.md" not in self.names:
            return None
        with (self.directory / "README.md").open(encoding="utf-8", errors="replace") as card:
            front_matter = card.read(1 << 16).split("\n---", 1)[0]
        match = _PIPELINE_TAG.search(front_matter) if front_matter.startswith("---") else None
        return str(match[1]) if match else None


def extras_of(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the extras of tsx-serve that an archive with this manifest needs."""
    facts = manifest.get(MANIFEST_KEY)
    if not isinstance(facts, dict):
        return ()
    conditions = {
        "transformers": True,
        "peft": packed_adapters(manifest),
        "audio": facts.get("task") in AUDIO_TASKS,
    }
    return tuple(extra for extra, is_needed in conditions.items() if is_needed)


def packed_adapters(manifest: Mapping[str, Any]) -> list[str]:
    """Return the names of the adapters in an archive with this manifest, which may be anything."""
    facts = manifest.get(MANIFEST_KEY)
    names = facts.get("adapters") if isinstance(facts, dict) else None
    return [str(name) for name in names] if isinstance(names, list) else []


def family(task: str) -> str:
    """Return the general task: `translation` for `translation_en_to_de`."""
    return "translation" if _TRANSLATION.fullmatch(task) else task


def checked_task(text: str) -> str:
    """Resolve an alias, and check that the task exists.

    Raises:
        CannotPack: There is no such task.
    """
    task = ALIASES.get(text, text)
    if family(task) not in TASKS:
        raise CannotPack(
            f"There is no task {text!r}{_suggestion(text, (*TASKS, *ALIASES))}. The tasks are"
            f" {', '.join(TASKS)}."
        )
    return task


def needed_files(names: Iterable[str], shards: Collection[str], source: str) -> list[str]:
    """Select the files that serving needs.

    Args:
        names: The names of all files.
        shards: The weights that the index names.
        source: The name of the model, for errors.

    Raises:
        CannotPack: There are no weights.
    """
    needed, weights, all_names = [], dict[str, list[str]](), list(names)
    for name in all_names:
        path = PurePosixPath(name)
        folder = str(path.parent)
        if any(part.startswith(".") for part in path.parts) or not (
            folder == "." or _SUBFOLDERS.fullmatch(folder) or path.suffix == ".py"
        ):
            continue
        if (folder == "." and shards and name in shards) or (
            not (folder == "." and shards) and _WEIGHTS.fullmatch(path.name)
        ):
            weights.setdefault(folder, []).append(name)
        elif (
            _OTHER_FILES.fullmatch(path.name)
            and not _UNNEEDED.fullmatch(path.name)
            and not path.name.endswith(_INDEXES)
        ):
            needed.append(name)
    if "." not in weights:
        unsupported = [
            name
            for name in all_names
            if name.endswith(
                (".safetensors", ".bin", ".h5", ".msgpack", ".gguf", ".ckpt", ".pt", ".pth")
            )
        ]
        hint = f" that are served (it has {', '.join(unsupported[:3])})" if unsupported else ""
        raise CannotPack(
            f"{source} has no weights{hint}. Save the model with save_pretrained, as"
            " model.safetensors."
        )
    for files in weights.values():
        safetensors = [name for name in files if name.endswith(".safetensors")]
        needed += safetensors or files
    if shards:
        needed.append(_INDEXES[0] if next(iter(shards)).endswith(".safetensors") else _INDEXES[1])
    return sorted(needed)


def weights_size(archive: Path) -> int:
    """Return the size of the weights in an unpacked archive, in bytes."""
    return sum(
        file.stat().st_size
        for file in (archive / DIRECTORY).glob("*")
        if _WEIGHTS.fullmatch(file.name)
    )


def shards_of(index: Path) -> tuple[str, ...]:
    """Return the files that an index of weights names.

    Raises:
        CannotPack: The index cannot be used.
    """
    shards = read_object(index, most_bytes=64 << 20, most_values=2_000_000).get("weight_map")
    if (
        not isinstance(shards, dict)
        or not shards
        or any("/" in str(name) or not isinstance(name, str) for name in shards.values())
    ):
        raise CannotPack(
            f"{index} does not say which files have the weights. Download or save the model again."
        )
    return tuple(sorted(set(shards.values())))


def check_references(directory: Path) -> None:
    """Check that no index and no processor names weights outside the model.

    Raises:
        CannotPack: One of them does.
    """
    for index in directory.rglob("*.index.json"):
        shards_of(index)
    for path in (directory / "processor_config.json", directory / "audio_tokenizer_config.json"):
        if path.exists() and "audio_tokenizer_name_or_path" in json.dumps(read_object(path)):
            raise CannotPack(
                f"{path} names another model (audio_tokenizer_name_or_path), which is not loaded."
                " Remove that key."
            )


def read_adapter(name: str, directory: Path) -> tuple[str, str]:
    """Return the kind of a PEFT adapter, such as LORA, and its base model.

    Raises:
        CannotPack: The directory does not contain an adapter, or the name cannot be used.
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
    config = read_object(directory / ADAPTER_CONFIG)
    kind, base = config.get("peft_type"), config.get("base_model_name_or_path")
    if not isinstance(kind, str) or not isinstance(base, str | None):
        raise CannotPack(
            f"{directory / ADAPTER_CONFIG} describes no adapter: it has no peft_type. Save the"
            " adapter again with PEFT."
        )
    return kind, base or "a model that it does not name"


def external_code(directory: Path) -> str | None:
    """Return a class of another repository that a file names as ORG/OTHER--module.Class, or None.

    Raises:
        CannotPack: A file of the model cannot be read.
    """
    for path in sorted(directory.glob("*config.json")):
        config = read_object(path)
        if match := _EXTERNAL_CODE.search(
            json.dumps([config.get("auto_map"), config.get("custom_pipelines")])
        ):
            return f"{match[0]} of {path.name}"
    return None


def read_object(
    path: Path, *, most_bytes: int = 4 << 20, most_values: int = 500_000
) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CannotPack: The file cannot be read, or is not a JSON object.
    """
    try:
        content = load_json(path.read_bytes(), most_bytes=most_bytes, most_values=most_values)
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        raise CannotPack(
            f"{path} cannot be read: {error}. Save the model again with save_pretrained."
        ) from error
    return content


def _suggestion(name: str, known: Iterable[str]) -> str:
    similar = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {similar[0]}?)" if similar else ""
