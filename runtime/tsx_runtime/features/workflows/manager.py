"""The workflows of a server, which can be registered (atomically), found and unregistered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tsx_archiver import (
    ArchiveError,
    ArchiveNotFound,
    Manifest,
    ModelConfig,
    OpenArchive,
    is_model_name,
)
from tsx_archiver.workflow import SEPARATOR, CycleInSpec, OpenWorkflow, open_workflow
from tsx_archiver.workflow import Node as SpecNode
from tsx_runtime.core.concurrency.daemon_threads import DaemonThreads
from tsx_runtime.core.models.model import ModelVersion
from tsx_runtime.core.models.plan import RegisterOrder
from tsx_runtime.core.registry.downloads import MAX_DOWNLOADS
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.errors import (
    BadRequest,
    CleanupTimeout,
    Conflict,
    InvalidDag,
    InvalidWorkflow,
    LoadFailed,
    ModelNotFound,
    TsxError,
    WorkflowFailed,
    WorkflowNotFound,
)
from tsx_runtime.features.workflows.execution import run
from tsx_runtime.features.workflows.node import RunningNode, WorkflowRequest
from tsx_runtime.features.workflows.schedule import Output, row_positions
from tsx_runtime.features.workflows.settings import WorkflowsSettings
from tsx_runtime.settings.schema import Settings
from tsx_runtime.shared.redaction import redacted
from tsx_runtime.shared.suggestions import suggestion_among_many
from tsx_runtime.sources import Fetcher, Trust, in_store, is_url

SUFFIX = ".war"
DEFAULT_RETRIES = 1
DEFAULT_TIMEOUT_MS = 10_000

logger = logging.getLogger("tsx.workflows")


@dataclass(frozen=True)
class WorkflowOrder:
    """The parameters of a registration; for None, the archive or the settings decide."""

    url: str
    name: str | None = None
    response_timeout: int | None = None  # seconds
    startup_timeout: int | None = None  # seconds
    s3_sse_kms: bool = False
    loaded_at_startup: bool = False


@dataclass
class Workflow:
    """A registered workflow."""

    name: str
    url: str
    archive: OpenWorkflow
    nodes: dict[str, RunningNode]
    downloaded_file: Path | None = None
    _running: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._idle.set()

    async def answer(self, request: WorkflowRequest) -> Output:
        """Answer a request, or raise an error of `run`."""
        with self._count_running():
            return await run(self.archive.spec, self.nodes, request)

    async def wait_idle(self) -> None:
        """Wait until all requests are answered."""
        await self._idle.wait()

    @contextmanager
    def _count_running(self) -> Iterator[None]:
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()


def store_of(settings: Settings) -> Path | None:
    """Return the directory that workflows are registered from."""
    return WorkflowsSettings.of(settings).workflow_store or settings.model_store


class Workflows:
    """The workflows of one server.

    The class is not thread-safe; use it on the registry's event loop. The nodes of the workflows
    are models of the registry.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.settings = registry.settings
        self.workflows: dict[str, Workflow] = {}
        # Names that are registered, being registered, or being unregistered.
        self._names_in_use: set[str] = set()
        self._store = store_of(self.settings)
        self._fetcher = Fetcher(self.settings, self._store, (SUFFIX,), registry.plugins.sources)
        self._downloads = DaemonThreads(MAX_DOWNLOADS, "downloads")

    def find(self, name: str) -> Workflow:
        workflow = self.workflows.get(name)
        if workflow is None:
            raise WorkflowNotFound(
                f"Workflow not found: {name}{suggestion_among_many(name, self.workflows)}"
            )
        return workflow

    async def register(self, order: WorkflowOrder, *, trust: Trust = Trust.CLIENT) -> Workflow:
        """Register a workflow from the workflow store, or from a URL, which the store downloads.

        On return all nodes are ready. After an error nothing is registered.

        Raises:
            BadRequest: The URL or the name is missing or cannot be used.
            WorkflowNotFound: There is no such archive.
            InvalidDag: The graph has a cycle.
            InvalidWorkflow: The archive or its specification cannot be used.
            Conflict: The name is taken.
            WorkflowFailed: A node could not be registered.
            DownloadFailed: The archive could not be downloaded.
            ModelFileExists: The store already has a file of that name.
        """
        if not order.url:
            raise BadRequest("Parameter url is required.")
        try:
            path, is_downloaded = await self._archive(order, trust)
        except ModelNotFound as error:
            raise WorkflowNotFound(error.message) from error
        try:
            workflow = await self.register_path(path, order)
        except BaseException:
            if is_downloaded:
                path.unlink(missing_ok=True)
            raise
        workflow.downloaded_file = path if is_downloaded else None
        return workflow

    async def register_path(self, path: Path, order: WorkflowOrder) -> Workflow:
        """Register an archive or directory that the configuration names; its path may be any."""
        limits = self.settings.archive_limits()
        try:
            archive = await asyncio.to_thread(
                open_workflow, path, cache=self.settings.archive_cache(), limits=limits
            )
        except ArchiveNotFound as error:
            raise WorkflowNotFound(f"Workflow not found in workflow store: {order.url}") from error
        except CycleInSpec as error:
            raise InvalidDag(f"Not a valid DAG. {error.message}") from error
        except ArchiveError as error:
            raise InvalidWorkflow(error.message) from error
        try:
            return await self._register(archive, order)
        except BaseException:
            archive.close()
            raise

    async def unregister(self, name: str) -> None:
        """Remove a workflow, after its accepted requests are answered.

        Raises:
            WorkflowNotFound: No workflow has this name.
            CleanupTimeout: Requests took too long; the workflow is registered again.
        """
        workflow = self.find(name)
        del self.workflows[name]
        try:
            await asyncio.wait_for(
                workflow.wait_idle(), self.settings.unregister_model_timeout or None
            )
        except BaseException as error:
            self.workflows[name] = workflow
            if isinstance(error, TimeoutError | asyncio.TimeoutError):
                raise CleanupTimeout(f"Timed out while cleaning resources: {name}") from None
            raise
        await asyncio.gather(
            *(self._withdraw_node(node.version) for node in workflow.nodes.values())
        )
        workflow.archive.close()
        if workflow.downloaded_file is not None:
            workflow.downloaded_file.unlink(missing_ok=True)
        self._names_in_use.discard(name)

    def close(self) -> None:
        """End the downloads and close the archives; the registry ends the nodes."""
        self._fetcher.close()
        for workflow in self.workflows.values():
            workflow.archive.close()

    async def _archive(self, order: WorkflowOrder, trust: Trust) -> tuple[Path, bool]:
        """Return the path of the archive, and whether it was downloaded for this registration."""
        if not is_url(order.url):
            error_text = "Workflow not found in workflow store"
            return in_store(order.url, self._store, error_text), False
        local_path = await asyncio.to_thread(self._fetcher.local_file, order.url, trust)
        if local_path is not None:
            return local_path, False
        return (
            await self._downloads.call(
                partial(self._fetcher.fetch, order.url, trust, sse_kms=order.s3_sse_kms)
            ),
            True,
        )

    async def _register(self, archive: OpenWorkflow, order: WorkflowOrder) -> Workflow:
        name = order.name or archive.manifest.workflow_name
        if not is_model_name(name):
            raise BadRequest(
                f"The workflow name {name!r} cannot be used: letters, digits, '_', '-' and '.'"
                " only, a letter or digit first."
            )
        if name in self._names_in_use:
            raise Conflict(f"Workflow {name} is already registered.")
        self._names_in_use.add(name)
        try:
            for problem in archive.problems:
                logger.warning("workflow %s: %s", name, problem)
            versions = await self._register_nodes(name, archive, order)
        except BaseException:
            self._names_in_use.discard(name)
            raise
        # Nodes with the same envelope pass rows to each other without it. Nodes with different
        # envelopes, or without one, pass complete responses.
        envelopes = {version.envelope for version in versions.values()}
        positions = (
            row_positions(archive.spec.edges) if len(envelopes) == 1 and "" not in envelopes else {}
        )
        nodes = {
            key: _node(archive.spec.nodes[key], version, positions.get(key, b""))
            for key, version in versions.items()
        }
        workflow = Workflow(name, redacted(order.url), archive, nodes)
        self.workflows[name] = workflow
        return workflow

    async def _register_nodes(
        self, name: str, archive: OpenWorkflow, order: WorkflowOrder
    ) -> dict[str, ModelVersion]:
        """Register all nodes concurrently; discard all if one fails or the call is cancelled."""
        tasks = {
            key: asyncio.create_task(self._register_node(name, node, archive, order))
            for key, node in archive.spec.nodes.items()
        }
        try:
            await asyncio.wait(tasks.values())
            failures = [error for task in tasks.values() if (error := task.exception()) is not None]
            if not failures:
                return {key: task.result() for key, task in tasks.items()}
            unexpected_error = next(
                (error for error in failures if not isinstance(error, TsxError)), None
            )
            if unexpected_error is not None:
                raise unexpected_error
            reasons = ", ".join(str(error) for error in failures)
            traceback = next(
                (
                    error.traceback
                    for error in failures
                    if isinstance(error, LoadFailed) and error.traceback
                ),
                None,
            )
            raise WorkflowFailed(
                f"Workflow {name} has failed to register. Failures: [{reasons}]",
                traceback=traceback,
            )
        except BaseException:
            for task in tasks.values():
                task.cancel()
            results = await asyncio.gather(*tasks.values(), return_exceptions=True)
            await asyncio.gather(
                *(
                    self.registry.discard(result)
                    for result in results
                    if isinstance(result, ModelVersion)
                )
            )
            raise

    async def _register_node(
        self, workflow: str, node: SpecNode, archive: OpenWorkflow, order: WorkflowOrder
    ) -> ModelVersion:
        """Register a node; an error has TorchServe's text."""
        model = f"{workflow}{SEPARATOR}{node.name}"
        model_order = RegisterOrder(
            url=node.url or "",
            model_name=model,
            response_timeout=order.response_timeout,
            startup_timeout=order.startup_timeout,
            loaded_at_startup=order.loaded_at_startup,
            workflow=workflow,
        )
        try:
            if node.url is None:
                return await self.registry.register_archive(
                    _function_archive(archive, model, node.name),
                    replace(model_order, initial_workers=1),
                )
            version = await self.registry.register(_with_settings(model_order, node))
            # Neither the specification nor the archive sets the number of workers.
            if not version.min_workers:
                await self._scale_up(version)
            return version
        except LoadFailed as error:
            text = f"Failed to start workers for model {model} version: 1.0. {error.message}"
            raise type(error)(text, traceback=error.traceback) from error
        except TsxError as error:
            raise TsxError(
                f"Workflow Node {model} failed to register. Details: {error.message}"
            ) from error

    async def _scale_up(self, version: ModelVersion) -> None:
        try:
            await version.scale(1, 1)
        except BaseException:
            await self.registry.discard(version)
            raise

    async def _withdraw_node(self, version: ModelVersion) -> None:
        """Withdraw the model of a node, which gets no more requests from its workflow.

        Clients can use the node's model directly. Their requests have a limited time to end.
        """
        try:
            await self.registry.withdraw(version)
        except CleanupTimeout:
            await self.registry.discard(version)


def _with_settings(order: RegisterOrder, node: SpecNode) -> RegisterOrder:
    """Apply a node's settings to the order; as in TorchServe, the node starts with maxWorkers."""
    settings = node.settings
    workers = (
        settings.min_workers
        if settings.max_workers is None
        else max(settings.max_workers, settings.min_workers or 1)
    )
    return replace(
        order,
        initial_workers=workers,
        batch_size=settings.batch_size,
        max_batch_delay=settings.max_batch_delay,
    )


def _function_archive(archive: OpenWorkflow, model: str, function: str) -> OpenArchive:
    """Return the workflow's directory as an archive whose handler is one function."""
    manifest = Manifest(
        {
            "runtime": "python",
            "model": {"modelName": model, "handler": f"{archive.handler}:{function}"},
        }
    )
    return OpenArchive(archive.source, archive.directory, manifest, ModelConfig())


def _node(spec: SpecNode, version: ModelVersion, position: bytes) -> RunningNode:
    retries, timeout = spec.settings.retry_attempts, spec.settings.timeout_ms
    return RunningNode(
        spec.name,
        version,
        DEFAULT_RETRIES if retries is None else retries,
        (DEFAULT_TIMEOUT_MS if timeout is None else timeout) / 1000,
        position,
    )
