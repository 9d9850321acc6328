"""`tsx serve --reload`: a model is packed and loaded again when one of its files has changed."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from traceback import format_exception

from watchfiles import awatch

from tsx_archiver.errors import ArchiveError
from tsx_archiver.storage.private_directory import scratch_directory
from tsx_cli.common.failure import CliError
from tsx_runtime.core.concurrency.periodic import running
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import LoadFailed, TsxError
from tsx_runtime.server.startup import StartModel

CODE_SUFFIXES = (".py", ".yaml")
LINKED_BYTES = 1 << 20  # Larger files of a directory are linked; they are no code.
SETTLE_S = 0.05  # pause of an editor between two steps of a save
MAX_NAMES = 3

Stamps = dict[Path, tuple[int, int, int]]

logger = logging.getLogger("tsx.reload")


class ReloadedModel:
    """A model of the command line, with the state in which its files were loaded last."""

    def __init__(self, build: Callable[..., StartModel], stack: ExitStack) -> None:
        """Build the first version.

        Args:
            build: Packs the model: `find_model` with its source. The argument is the stack of the
                version's directories.
            stack: The stack that is closed after the server has ended.
        """
        self._build, self._stack = build, stack
        self._directories = stack.enter_context(ExitStack())
        self.start = self._build_copy(self._directories)
        self._loaded, _ = survey(self.start.files)

    async def follow(self, registry: Registry) -> None:
        """Replace the model's version whenever its files have changed."""
        version = next(
            version for version in registry.versions() if version.archive.source == self.start.path
        )
        version.archive.on_close = self._directories.close
        while True:
            await self._wait_for_change()
            # A save after this, which the build may miss, is another change.
            before, self._loaded = self._loaded, await self._settled_stamps()
            changes = before.items() ^ self._loaded.items()
            if names := sorted({path.name for path, _ in changes})[:MAX_NAMES]:
                url = self.start.order.url
                logger.info("%s changed: loading %s ...", ", ".join(names), url)
                version = await self._replace(registry, version)

    async def _wait_for_change(self) -> None:
        changed = asyncio.Event()
        while True:
            _, directories = await self._survey()
            async with running("files are not watched", _watch(directories, changed)):
                await asyncio.sleep(0)  # From now on, a save sets `changed`.
                stamps, _ = await self._survey()
                if stamps != self._loaded:
                    return
                await changed.wait()
                changed.clear()

    async def _settled_stamps(self) -> Stamps:
        """Return the states of the files once nothing writes to them."""
        stamps, _ = await self._survey()
        while True:
            await asyncio.sleep(SETTLE_S)
            before, (stamps, _) = stamps, await self._survey()
            if stamps == before:
                return stamps

    async def _survey(self) -> tuple[Stamps, set[Path]]:
        return await asyncio.to_thread(survey, self.start.files)

    async def _replace(self, registry: Registry, old: ModelVersion) -> ModelVersion:
        """Return the version that serves afterwards: the new one, or the old one after a fault."""
        name = self.start.order.url
        directories = self._stack.enter_context(ExitStack())
        try:
            start = await asyncio.to_thread(self._build_copy, directories, quiet=True)
            assert start.path is not None
            order = replace(start.order, replaces=True, must_load=True)
            version = await registry.register_path(start.path, order)
        except Exception as error:  # the boundary to the user's files
            directories.close()
            _report(name, old, error)
            return old
        version.archive.on_close = directories.close
        self.start = start
        new_stamps, _ = await self._survey()
        self._loaded = {path: self._loaded.get(path, stamp) for path, stamp in new_stamps.items()}
        logger.info("%s: model %s serves the new version", name, version.name)
        return version

    def _build_copy(self, directories: ExitStack, *, quiet: bool = False) -> StartModel:
        """Build the model; a directory that would be served in place is copied.

        The version before needs its own files as long as it runs.
        """
        start = self._build(directories, quiet=quiet)
        [source, *_] = start.files
        if start.path != source or not source.is_dir():
            return start
        # The directory's name is that of a model without a manifest.
        copy = directories.enter_context(scratch_directory("tsx-model-")).resolve()
        copy /= source.resolve().name
        files = [Path(parent, name) for parent, names in walk(source) for name in names]
        for file in files:
            target = copy / file.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            if file.stat().st_size < LINKED_BYTES or file.suffix in CODE_SUFFIXES:
                shutil.copyfile(file, target)
            else:
                target.symlink_to(file.absolute())
        return replace(start, path=copy, files=(source, *files))


def reloading(
    models: Sequence[ReloadedModel], registry: Registry
) -> AbstractAsyncContextManager[None]:
    """Return a context that is open while changed models are reloaded."""
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    return running("changed files are not loaded", *(model.follow(registry) for model in models))


def survey(files: Iterable[Path]) -> tuple[Stamps, set[Path]]:
    """Return the states of files, and the directories in which they may change.

    A directory stands for the code and the configuration below it.
    """
    stamps: Stamps = {}
    directories = set()
    for path in files:
        for parents in (path.absolute().parents, path.resolve().parents):
            directories.add(next(parent for parent in parents if parent.is_dir()))
        candidates = [path]
        for parent, names in walk(path):
            directories.add(Path(parent))
            candidates += [Path(parent, name) for name in names if name.endswith(CODE_SUFFIXES)]
        for candidate in candidates:
            with suppress(OSError):  # It may be missing.
                status = candidate.stat()
                if stat.S_ISREG(status.st_mode):
                    stamps[candidate] = status.st_mtime_ns, status.st_size, status.st_ino
    return stamps, directories


def walk(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the directories of a tree with the names of their files.

    Hidden directories, environments and caches of compiled code are left out.
    """
    for parent, names, files in os.walk(directory):
        names[:] = [
            name
            for name in names
            if not name.startswith((".", "__pycache__"))
            and not Path(parent, name, "pyvenv.cfg").exists()
        ]
        yield parent, files


async def _watch(directories: Iterable[Path], changed: asyncio.Event) -> None:
    try:
        async for _ in awatch(*directories, watch_filter=None, recursive=False):
            changed.set()
    except FileNotFoundError:  # A directory was removed meanwhile.
        changed.set()


def _report(name: str, old: ModelVersion, error: Exception) -> None:
    if isinstance(error, LoadFailed):  # The registry has logged and noted its message.
        logger.error("%s does not load:\n%s", name, error.traceback or error.message)
        return
    is_expected = isinstance(error, CliError | TsxError | ArchiveError | OSError)
    trace = getattr(error, "traceback", None) or (
        "" if is_expected else "".join(format_exception(error))
    )
    message = f"{name} does not load: {getattr(error, 'message', error)}"
    old.note_failed_replacement(message, trace)
    logger.error("%s goes on: %s\n%s", old.label, message, trace)
