"""The model directory of a configuration: links to the archive's files, and a changed
model-config.yaml.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

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
from tsx_cli.bench.measure.modelconfig import changes, with_keys
from tsx_cli.bench.model.configuration import Configuration
from tsx_cli.common.failure import CliError
from tsx_runtime.core.models.benchmark_record import FILE as MEASURED

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
