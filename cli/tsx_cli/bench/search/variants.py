"""The model directory of a configuration: links to the archive's files, and a changed config file.

Other keys and comments of model-config.yaml are kept.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tsx_archiver import OpenArchive
from tsx_archiver.metadata.forms import (
    FORMS_DIRECTORY,
    FORMS_FILE,
    REFERENCE,
    FormIndex,
    FormRecord,
    InvalidForms,
    parse_forms,
)
from tsx_archiver.names import MANIFEST_PATH
from tsx_archiver.opening import DEFAULT_CONFIG
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.common.failure import CliError
from tsx_runtime.core.models.benchmark_record import FILE as MEASURED

PT2_KEYS = ("compile", "export")
# PyYAML writes these characters unescaped, but reads them as ends of lines.
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")


def changes(configuration: Configuration, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys to set, or to remove if None; `raw` is the content of model-config.yaml."""
    keys = configuration.keys() | {"slo": None}  # The configuration sets the batch size.
    if "pt2" in keys:
        keys["pt2"] = _pt2_setting(raw.get("pt2"), enable=configuration.compiled is True)
    return {key: value for key, value in keys.items() if value is not None or key in raw}


def _pt2_setting(pt2: Any, *, enable: bool) -> dict[str, Any] | None:
    """Return `pt2` with compilation on or off; other keys are kept.

    `pt2` may also be the name of a backend, or the arguments of torch.compile.
    """
    if isinstance(pt2, str):
        pt2 = {"compile": {"backend": pt2}}
    elif isinstance(pt2, Mapping) and pt2 and not any(kind in pt2 for kind in PT2_KEYS):
        pt2 = {"compile": dict(pt2)}
    other_options = dict(pt2) if isinstance(pt2, Mapping) else {}
    options = other_options.pop("compile", None)
    if enable:
        compile_options = dict(options) if isinstance(options, Mapping) else {}
        return {**other_options, "compile": {**compile_options, "enable": True}}
    return other_options or None


def with_keys(text: str, changed_keys: Mapping[str, Any]) -> str:
    """Return a YAML document with these keys set, or removed if they are None.

    The other lines are kept. A document that cannot be changed line by line (in braces, with
    aliases) is rewritten without its comments.
    """
    old_document = yaml.safe_load(text)
    old_keys = dict(old_document) if isinstance(old_document, dict) else {}
    new_keys = {
        key: value
        for key, value in {**old_keys, **changed_keys}.items()
        if value is not None or (key not in changed_keys and key in old_keys)
    }
    edited_text = _edit_lines(text, changed_keys)
    try:
        if edited_text is not None and (yaml.safe_load(edited_text) or {}) == new_keys:
            return edited_text
    except yaml.YAMLError:
        pass
    return _dump_yaml(new_keys)


def _edit_lines(text: str, changed_keys: Mapping[str, Any]) -> str | None:
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
    replaced_keys = set()
    for key, value in reversed(pairs):
        if key.value in changed_keys:
            replaced_keys.add(key.value)
            first, last = key.start_mark.line, _last_line(lines, key.start_mark.line, value)
            comment = _comment(lines[first], value) if first == last else ""
            lines[first : last + 1] = [_yaml_line(key.value, changed_keys[key.value], comment)]
    added_lines = [
        _yaml_line(key, value, "")
        for key, value in changed_keys.items()
        if key not in replaced_keys
    ]
    return "".join([*lines, *added_lines])


def _last_line(lines: list[str], first: int, value: yaml.Node) -> int:
    """Return the last line of a block; comments and empty lines after it belong to the next."""
    last = value.end_mark.line if value.end_mark.column else value.end_mark.line - 1
    last = min(max(first, last), len(lines) - 1)
    while last > first and (not lines[last].strip() or lines[last].lstrip().startswith("#")):
        last -= 1
    return last


def _comment(line: str, value: yaml.Node) -> str:
    tail = line[value.end_mark.column :] if value.end_mark.line == value.start_mark.line else ""
    return "  " + tail.strip() if tail.strip().startswith("#") else ""


def _yaml_line(key: str, value: Any, comment: str) -> str:
    if value is None:
        return ""
    text = _dump_yaml({key: value})
    return f"{text[:-1]}{comment}\n" if text.count("\n") == 1 else text


def _dump_yaml(value: Mapping[str, Any]) -> str:
    if not value:
        return ""
    text = yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True, width=120)
    return (
        yaml.safe_dump(dict(value), sort_keys=False, width=120) if _LINE_ENDS.search(text) else text
    )


# The default length of the queue, which exceeds the connections of a closed loop.
QUEUE_SIZE = 4096


def lay_out(
    archive: OpenArchive,
    configuration: Configuration,
    parent: Path,
    *,
    forms: FormIndex | None = None,
) -> Path:
    """Make a directory of the model in `parent`, which loads like the archive.

    `forms` replace the archive's forms and determine their order. The caller creates the directory
    FORMS_DIRECTORY with the files of the forms.
    """
    directory = parent / archive.manifest.model_name
    directory.mkdir(parents=True)
    config = config_name(archive)
    excluded = {Path(MANIFEST_PATH).parts[0], config, MEASURED, "__pycache__"} | (
        set() if forms is None else {FORMS_FILE, FORMS_DIRECTORY}
    )
    for file in archive.directory.iterdir():
        if file.name not in excluded:
            _copy_or_link(file, directory / file.name)
    keys = changes(configuration, archive.config.raw)
    if archive.config.job_queue_size is None:
        keys["jobQueueSize"] = QUEUE_SIZE
    if archive.config.cache is not None:
        keys["cache"] = None  # Requests repeat, and a cache would answer them instead of the model.
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
        data = {key: value for key, value in archive.manifest.data.items() if key != "sha256"}
        model = {**(data.get("model") or {}), "configFile": config}
        manifest.write_text(json.dumps({**data, "model": model}), encoding="utf-8")
    return directory


def _copy_or_link(source: Path, target: Path) -> None:
    """Copy code, because the server runs no code behind a link; link all other files."""
    if source.is_dir():
        target.mkdir()
        for file in source.iterdir():
            if file.name != "__pycache__":
                _copy_or_link(file, target / file.name)
    elif source.suffix == ".py":
        shutil.copyfile(source, target)
    else:
        target.symlink_to(source)


def kept_forms(
    archive: OpenArchive, requested: str | None
) -> tuple[Sequence[FormRecord], str | None]:
    """Return the archive's forms to measure, and the reason if they are out of date.

    `requested` is the value of --forms.

    Raises:
        CliError: The record of the forms is invalid, or requested forms are out of date.
    """
    path = archive.directory / FORMS_FILE
    try:
        stored = parse_forms(path.read_bytes()) if path.is_file() else FormIndex()
    except InvalidForms as error:
        raise CliError(f"{archive.source}: {error}") from error
    changed_file = stored.stale_since(archive.manifest.checksums)
    if changed_file is None:
        return stored.forms, None
    outdated_text = (
        f"its forms are not measured, as {changed_file} has changed since they were built: run tsx"
        " optimize again"
    )
    if requested not in (None, REFERENCE):
        raise CliError(f"--forms {requested}: {outdated_text}")
    return (), outdated_text


def config_name(archive: OpenArchive) -> str:
    return archive.manifest.config_file or DEFAULT_CONFIG


def config_text(archive: OpenArchive) -> str:
    path = archive.directory / config_name(archive)
    return path.read_text(encoding="utf-8-sig") if path.is_file() else ""
