"""The model directory of a configuration: links to the archive's files, and a changed
model-config.yaml, whose other keys and comments stay.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tsx_archiver import OpenArchive
from tsx_archiver.metadata.forms import (
    FORMS_DIRECTORY,
    FORMS_FILE,
    InvalidForms,
    KeptForms,
    parse_forms,
)
from tsx_archiver.metadata.huggingface import GENERATION_HANDLER
from tsx_archiver.names import MANIFEST_PATH
from tsx_archiver.opening import DEFAULT_CONFIG
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.common.failure import CliError
from tsx_runtime.core.models.benchmark_record import FILE as MEASURED

KINDS_OF_PT2 = ("compile", "export")
_ENDS_OF_LINES = re.compile(
    "[\x85\u2028\u2029]"
)  # PyYAML reads them as such where it has written them as they are


def changes(configuration: Configuration, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that are to be set, None for those that are to go; `raw` is what the archive's own
    configuration says.
    """
    keys = configuration.keys() | {"slo": None}  # a batch size of its own is measured
    if "pt2" in keys:
        keys["pt2"] = _compiled(raw.get("pt2"), enable=configuration.compiled is True)
    return {key: value for key, value in keys.items() if value is not None or key in raw}


def _compiled(own: Any, *, enable: bool) -> dict[str, Any] | None:
    """`pt2` with compilation on or off; its other words stay.

    It may also be a backend's name, or torch.compile's arguments themselves.
    """
    if isinstance(own, str):
        own = {"compile": {"backend": own}}
    elif isinstance(own, Mapping) and own and not any(kind in own for kind in KINDS_OF_PT2):
        own = {"compile": dict(own)}
    kept = dict(own) if isinstance(own, Mapping) else {}
    options = kept.pop("compile", None)
    if enable:
        words = dict(options) if isinstance(options, Mapping) else {}
        return {**kept, "compile": {**words, "enable": True}}
    return kept or None


def with_keys(text: str, changed: Mapping[str, Any]) -> str:
    """The document with these keys at its top set, or removed where they are None; what else there
    is stays as it is written.

    Where that cannot be done line by line (a document in braces, aliases), the whole file is
    rewritten, without its comments.
    """
    before = yaml.safe_load(text)
    known = dict(before) if isinstance(before, dict) else {}
    after = {
        key: value
        for key, value in {**known, **changed}.items()
        if value is not None or (key not in changed and key in known)
    }
    edited = _edited(text, changed)
    try:
        if edited is not None and (yaml.safe_load(edited) or {}) == after:
            return edited
    except yaml.YAMLError:
        pass
    return _dumped(after)


def _edited(text: str, changed: Mapping[str, Any]) -> str | None:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return None
    if root is not None and (not isinstance(root, yaml.MappingNode) or root.flow_style):
        return None
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    done = set()
    for key, value in reversed(pairs):
        if key.value in changed:
            done.add(key.value)
            first, last = key.start_mark.line, _last_line(lines, key.start_mark.line, value)
            comment = _comment(lines[first], value) if first == last else ""
            lines[first : last + 1] = [_written(key.value, changed[key.value], comment)]
    fresh = [_written(key, value, "") for key, value in changed.items() if key not in done]
    return "".join([*lines, *fresh])


def _last_line(lines: list[str], first: int, value: yaml.Node) -> int:
    """A block ends where the next thing begins: comments and empty lines between belong to that."""
    last = value.end_mark.line if value.end_mark.column else value.end_mark.line - 1
    last = min(max(first, last), len(lines) - 1)
    while last > first and (not lines[last].strip() or lines[last].lstrip().startswith("#")):
        last -= 1
    return last


def _comment(line: str, value: yaml.Node) -> str:
    rest = line[value.end_mark.column :] if value.end_mark.line == value.start_mark.line else ""
    return "  " + rest.strip() if rest.strip().startswith("#") else ""


def _written(key: str, value: Any, comment: str) -> str:
    if value is None:
        return ""
    text = _dumped({key: value})
    return f"{text[:-1]}{comment}\n" if text.count("\n") == 1 else text


def _dumped(value: Mapping[str, Any]) -> str:
    if not value:
        return ""
    text = yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True, width=120)
    return (
        yaml.safe_dump(dict(value), sort_keys=False, width=120)
        if _ENDS_OF_LINES.search(text)
        else text
    )


# requests that may wait where the archive does not say: more than a closed loop has connections
QUEUE = 4096


def lay_out(
    archive: OpenArchive,
    configuration: Configuration,
    place: Path,
    *,
    forms: KeptForms | None = None,
) -> Path:
    """A directory called as the model is, new in `place`, which `tsx serve` and a worker take as
    they take the archive.

    `forms` replace those of the archive, in their order; the caller makes the directory
    FORMS_DIRECTORY with their files.
    """
    directory = place / archive.manifest.model_name
    directory.mkdir(parents=True)
    config = config_name(archive)
    left_out = {Path(MANIFEST_PATH).parts[0], config, MEASURED, "__pycache__"} | (
        set() if forms is None else {FORMS_FILE, FORMS_DIRECTORY}
    )
    for file in archive.directory.iterdir():
        if file.name not in left_out:
            _place(file, directory / file.name)
    keys = changes(configuration, archive.config.raw)
    if archive.config.job_queue_size is None:
        keys["jobQueueSize"] = QUEUE
    if archive.config.cache is not None:
        keys["cache"] = None  # the model is measured, with the same requests again and again
    if forms is not None:
        keys["forms"] = [form.name for form in forms.forms] or None
        (directory / FORMS_FILE).write_bytes(forms.content())
    text = config_text(archive)
    if "/" in config:
        config = DEFAULT_CONFIG
        (directory / config).unlink(missing_ok=True)
    (directory / config).write_text(with_keys(text, keys), encoding="utf-8")
    if archive.manifest.data:
        manifest = directory / MANIFEST_PATH
        manifest.parent.mkdir()
        kept = {key: value for key, value in archive.manifest.data.items() if key != "sha256"}
        model = {**(kept.get("model") or {}), "configFile": config}
        manifest.write_text(json.dumps({**kept, "model": model}), encoding="utf-8")
    return directory


def _place(source: Path, target: Path) -> None:
    """Code is copied, since the server runs none that a link leads to; all else is linked."""
    if source.is_dir():
        target.mkdir()
        for file in source.iterdir():
            if file.name != "__pycache__":
                _place(file, target / file.name)
    elif source.suffix == ".py":
        shutil.copyfile(source, target)
    else:
        target.symlink_to(source)


def kept_forms(archive: OpenArchive) -> KeptForms:
    """Raises CliError."""
    path = archive.directory / FORMS_FILE
    try:
        return parse_forms(path.read_bytes()) if path.is_file() else KeptForms()
    except InvalidForms as error:
        raise CliError(f"{archive.source}: {error}") from error


def takes_batches(archive: OpenArchive) -> bool:
    """Whether the server puts requests together for it: some workers take requests while they work
    on others.
    """
    config = archive.config
    return not (
        config.async_communication
        or config.continuous_batching
        or archive.manifest.handler == GENERATION_HANDLER
    )


def config_name(archive: OpenArchive) -> str:
    return archive.manifest.config_file or DEFAULT_CONFIG


def config_text(archive: OpenArchive) -> str:
    path = archive.directory / config_name(archive)
    return path.read_text(encoding="utf-8-sig") if path.is_file() else ""
