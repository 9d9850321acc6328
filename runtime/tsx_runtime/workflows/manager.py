"""The workflows of a server: register, find, unregister. Registration is atomic."""

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
from tsx_archiver.workflow import JOINT, CycleInSpec, OpenWorkflow, open_workflow
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
from tsx_runtime.shared.redaction import redacted
from tsx_runtime.shared.suggestions import suggestion_among_many
from tsx_runtime.sources import Fetcher, Trust, in_store, is_url
from tsx_runtime.workflows.execution import run
from tsx_runtime.workflows.node import RunningNode, WorkflowRequest
from tsx_runtime.workflows.schedule import Output, positions_of

SUFFIX = ".war"
DEFAULT_RETRIES = 1
DEFAULT_TIMEOUT_MS = 10_000  # ms

logger = logging.getLogger("tsx.workflows")


@dataclass(frozen=True)
class WorkflowOrder:
    """The parameters of a registration; None leaves a choice to the archive or to the settings."""

    url: str
    name: str | None = None
    response_timeout: int | None = None  # s
    startup_timeout: int | None = None  # s
    s3_sse_kms: bool = False
    loaded_at_startup: bool = False


@dataclass
class Workflow:
    """A registered workflow."""

    name: str
    url: str
    opened: OpenWorkflow
    nodes: dict[str, RunningNode]
    downloaded: Path | None = None
    _running: int = 0
    _quiet: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._quiet.set()

    async def answer(self, request: WorkflowRequest) -> Output:
        """Answer a request, with the errors of `run`."""
        with self._counted():
            return await run(self.opened.spec, self.nodes, request)

    async def finished(self) -> None:
        """Wait until every request is answered."""
        await self._quiet.wait()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._running += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._quiet.set()


class Workflows:
    """The workflows of one server; not thread safe.

    It lives on the event loop of the registry, whose models are the nodes.
    """

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.settings = registry.settings
        self.workflows: dict[str, Workflow] = {}
        # Names that are registered, being registered, or have requests to answer.
        self._taken: set[str] = set()
        self._store = self.settings.workflow_store or self.settings.model_store
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
        """Register a workflow from the workflow store, or from a URL by way of the store.

        On return all nodes are ready. On failure nothing is registered.

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
            path, downloaded = await self._archive(order, trust)
        except ModelNotFound as error:
            raise WorkflowNotFound(error.message) from error
        try:
            workflow = await self.register_path(path, order)
        except BaseException:
            if downloaded:
                path.unlink(missing_ok=True)
            raise
        workflow.downloaded = path if downloaded else None
        return workflow

    async def register_path(self, path: Path, order: WorkflowOrder) -> Workflow:
        """Register an archive or directory at any path: one that the configuration names."""
        limits = self.settings.archive_limits()
        try:
            opened = await asyncio.to_thread(
                open_workflow, path, cache=self.settings.archive_cache(), limits=limits
            )
        except ArchiveNotFound as error:
            raise WorkflowNotFound(f"Workflow not found in workflow store: {order.url}") from error
        except CycleInSpec as error:
            raise InvalidDag(f"Not a valid DAG. {error.message}") from error
        except ArchiveError as error:
            raise InvalidWorkflow(error.message) from error
        try:
            return await self._register(opened, order)
        except BaseException:
            opened.close()
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
                workflow.finished(), self.settings.unregister_model_timeout or None
            )
        except BaseException as error:
            self.workflows[name] = workflow
            if isinstance(error, TimeoutError | asyncio.TimeoutError):
                raise CleanupTimeout(f"Timed out while cleaning resources: {name}") from None
            raise
        await asyncio.gather(*(self._withdraw(node.version) for node in workflow.nodes.values()))
        workflow.opened.close()
        if workflow.downloaded is not None:
            workflow.downloaded.unlink(missing_ok=True)
        self._taken.discard(name)

    def close(self) -> None:
        """End the downloads and close the archives; the registry ends the nodes."""
        self._fetcher.close()
        for workflow in self.workflows.values():
            workflow.opened.close()

    async def _archive(self, order: WorkflowOrder, trust: Trust) -> tuple[Path, bool]:
        """Return the path of the archive, and whether it was downloaded for this registration."""
        if not is_url(order.url):
            absent = "Workflow not found in workflow store"
            return in_store(order.url, self._store, absent), False
        local = await asyncio.to_thread(self._fetcher.local_file, order.url, trust)
        if local is not None:
            return local, False
        return (
            await self._downloads.call(
                partial(self._fetcher.fetch, order.url, trust, sse_kms=order.s3_sse_kms)
            ),
            True,
        )

    async def _register(self, opened: OpenWorkflow, order: WorkflowOrder) -> Workflow:
        name = order.name or opened.manifest.workflow_name
        if not is_model_name(name):
            raise BadRequest(
                f"The workflow name {name!r} cannot be used: letters, digits, '_', '-' and '.'"
                " only, a letter or digit first."
            )
        if name in self._taken:
            raise Conflict(f"Workflow {name} is already registered.")
        self._taken.add(name)
        try:
            for problem in opened.problems:
                logger.warning("workflow %s: %s", name, problem)
            versions = await self._register_nodes(name, opened, order)
        except BaseException:
            self._taken.discard(name)
            raise
        # Nodes with different envelopes pass on what they write for clients.
        envelopes = {version.envelope for version in versions.values()}
        positions = (
            positions_of(opened.spec.edges) if len(envelopes) == 1 and "" not in envelopes else {}
        )
        nodes = {
            key: _node(opened.spec.nodes[key], version, positions.get(key, b""))
            for key, version in versions.items()
        }
        workflow = Workflow(name, redacted(order.url), opened, nodes)
        self.workflows[name] = workflow
        return workflow

    async def _register_nodes(
        self, name: str, opened: OpenWorkflow, order: WorkflowOrder
    ) -> dict[str, ModelVersion]:
        """Register all nodes at once; discard all if one fails or this is cancelled."""
        tasks = {
            key: asyncio.create_task(self._register_node(name, node, opened, order))
            for key, node in opened.spec.nodes.items()
        }
        try:
            await asyncio.wait(tasks.values())
            failures = [error for task in tasks.values() if (error := task.exception()) is not None]
            if not failures:
                return {key: task.result() for key, task in tasks.items()}
            unexpected = next(
                (error for error in failures if not isinstance(error, TsxError)), None
            )
            if unexpected is not None:
                raise unexpected
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
        self, workflow: str, node: SpecNode, opened: OpenWorkflow, order: WorkflowOrder
    ) -> ModelVersion:
        """Register a node; report errors with TorchServe's text."""
        model = f"{workflow}{JOINT}{node.name}"
        common = RegisterOrder(
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
                    _function_archive(opened, model, node.name), replace(common, initial_workers=1)
                )
            version = await self.registry.register(_with_settings(common, node))
            # Neither the specification nor the archive gives the number of workers.
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

    async def _withdraw(self, version: ModelVersion) -> None:
        """Withdraw a node that gets no more requests from its workflow.

        Requests under the node's own name are awaited for a limited time.
        """
        try:
            await self.registry.withdraw(version)
        except CleanupTimeout:
            await self.registry.discard(version)


def _with_settings(order: RegisterOrder, node: SpecNode) -> RegisterOrder:
    """Apply a node's settings to the order; as in TorchServe, it starts with the most workers."""
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


def _function_archive(opened: OpenWorkflow, model: str, function: str) -> OpenArchive:
    """Return the workflow's directory in the form of an archive of one function."""
    manifest = Manifest(
        {
            "runtime": "python",
            "model": {"modelName": model, "handler": f"{opened.handler}:{function}"},
        }
    )
    return OpenArchive(opened.source, opened.directory, manifest, ModelConfig())


def _node(spec: SpecNode, version: ModelVersion, position: bytes) -> RunningNode:
    retries, timeout = spec.settings.retry_attempts, spec.settings.timeout_ms
    return RunningNode(
        spec.name,
        version,
        DEFAULT_RETRIES if retries is None else retries,
        (DEFAULT_TIMEOUT_MS if timeout is None else timeout) / 1000,
        position,
    )
