"""Fixtures for all tests, the selection of tests, and the processes that run them."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests.support import forked  # isort: skip  # with line_coverage, before the product
from benchmarks import servers
from tests.support import fork_servers
from tests.support.servers import DEADLINE, Running, clean, started
from tsx_runtime.core import hidden_credentials
from tsx_runtime.core.workers.preload import PRELOAD_EXPORTED
from tsx_runtime.shared.cores import cpu_count

if TYPE_CHECKING:
    from tests.support.platforms.aws import Account

# gRPC writes to stderr whenever a process with clients forks, even while a test captures stderr.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# Torch then looks for GPUs in a way that lets processes forked later use them.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True, scope="session")
def state_outside_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the state of servers out of the tester's home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        # In a pod, directories of root are trusted whatever their mode.
        patch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def preloaded_torch() -> Iterator[None]:
    """Preload torch in the fork server that this process has for all its tests.

    Each worker of a test that needs torch would otherwise import it for two seconds.
    """
    set_preload, fork = forkserver.set_forkserver_preload, forkserver.connect_to_new_process
    with pytest.MonkeyPatch.context() as patch:
        # Workers would inherit the tester's own environment from the fork server.
        patch.delenv("VIRTUAL_ENV", raising=False)
        patch.setattr(
            forkserver,
            "connect_to_new_process",
            lambda descriptors: _started.append("a worker") or fork(descriptors),
        )
        if forked.FORKS:
            set_preload([PRELOAD_EXPORTED])
            waitpid = fork_servers.wait_for_fork_server
            with_waitpid = SimpleNamespace(**{**vars(os), "waitpid": waitpid})
            patch.setattr(forkserver, "os", with_waitpid)
            patch.setattr(hidden_credentials, "Popen", fork_servers.start_for_multiprocessing)
            patch.setattr(
                forkserver,
                "set_forkserver_preload",
                lambda modules: set_preload([PRELOAD_EXPORTED]),
            )
        yield


@pytest.fixture(autouse=True, scope="session")
def forked_programs() -> Iterator[None]:
    """Fork the subprocesses of commands that run in-process, instead of starting interpreters."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (
            "bench.load.generator",
            "bench.search.server",
            "bench.search.worker",
            "check.entry",
            "check.lambda_host",
            "optimize.builder",
        ):
            patch.setattr(f"tsx_cli.{module}.subprocess", forked.SUBPROCESS)
        yield


@pytest.fixture(autouse=True, scope="session")
def one_ssl_context() -> Iterator[None]:
    """Share one TLS context among clients of httpx; each would read certificates for 25 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "httpx._transports.default.create_ssl_context", cache(httpx.create_ssl_context)
        )
        yield


@pytest.fixture(scope="session")
def account() -> Iterator[Account]:
    """Yield the shared moto mock of AWS; each test resets it first.

    A second mock would not see the calls of the first one's clients.
    """
    from tests.support.platforms.aws import aws

    with aws() as account:
        yield account


# CI uses the same hypothesis examples each time; other runs use new ones.
settings.register_profile(
    "everyday",
    deadline=None,
    max_examples=30,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],  # A busy machine draws slowly.
)
settings.register_profile("fast", settings.get_profile("everyday"), max_examples=10)
settings.register_profile(
    "nightly", deadline=None, max_examples=500
)  # pytest --hypothesis-profile nightly
settings.load_profile("everyday")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast",
        action="store_true",
        help="only tests that start no process and are quick",
    )
    parser.addoption(
        "--everyday", action="store_true", help="leave out what only the nightly run has"
    )


# Without these, torch would compile a program to check the processor's instructions, and would
# precompile headers that few tests need.
os.environ |= {"TORCHINDUCTOR_VEC_ISA_OK": "1", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}
# Only the nightly run includes the chaos trials, the fuzzers, the comparison with TorchServe, and
# slow files (whole benchmarks, compilers, ranks that import torch). --fast also leaves out tests of
# torch models, of the AWS mock, and of simulated days.
SLOW_FOLDERS = (
    "tests/cli/batch/",
    "tests/cli/bench/report/",
    "tests/cli/deploy/",
    "tests/cli/optimize/",
    "tests/docs/",
    "tests/runtime/features/elastic/",
    "tests/runtime/features/slo/",
    "tests/runtime/worker/forms/",
    "tests/runtime/features/generation/",
    "tests/runtime/features/huggingface/",
    "tests/runtime/features/mlflow/",
    "tests/runtime/worker/handlers/",
)
NIGHTLY_FOLDERS = ("tests/chaos/", "tests/differential/", "tests/fuzz/")
NIGHTLY_FILES = {
    "tests/benchmarks/test_cost_of_metrics.py",
    "tests/benchmarks/test_large_bodies.py",
    "tests/benchmarks/test_peers.py",
    "tests/cli/archive/test_huggingface.py",
    "tests/cli/batch/test_command.py",
    "tests/cli/batch/test_sagemaker.py",
    "tests/cli/bench/commands/test_forms.py",
    "tests/cli/bench/commands/test_profile.py",
    "tests/cli/bench/commands/test_run.py",
    "tests/cli/bench/commands/test_streams.py",
    "tests/cli/bench/commands/test_torchserve.py",
    "tests/cli/bench/search/test_simulated_search.py",
    "tests/cli/deploy/aws/test_drift.py",
    "tests/cli/deploy/aws/test_logs.py",
    "tests/cli/deploy/commands/test_logs_view.py",
    "tests/cli/deploy/emit/test_helm.py",
    "tests/cli/deploy/sagemaker/test_components.py",
    "tests/cli/deploy/sagemaker/test_multi_model.py",
    "tests/cli/deploy/sagemaker/test_shared_containers.py",
    "tests/cli/deploy/test_interrupted.py",
    "tests/cli/optimize/test_run.py",
    "tests/cli/test_launcher.py",
    "tests/cli/test_mlflow_deployments.py",
    "tests/docs/test_documentation.py",
    "tests/docs/test_faq.py",
    "tests/docs/test_site.py",
    "tests/examples/test_detector.py",
    "tests/examples/test_plugins.py",
    "tests/packaging/test_compiled.py",
    "tests/packaging/test_distribution.py",
    "tests/runtime/features/slo/test_simulation.py",
    "tests/runtime/core/workers/test_groups.py",
    "tests/runtime/features/grpc/test_generation.py",
    "tests/runtime/http/fast_lane/test_unknown_uvicorn.py",
    "tests/runtime/features/jobs/test_kills.py",
    "tests/runtime/targets/aws_lambda/test_huggingface.py",
    "tests/runtime/http/test_keystore.py",
    "tests/runtime/worker/forms/kinds/test_answers.py",
    "tests/runtime/worker/forms/kinds/test_aotinductor.py",
    "tests/runtime/worker/forms/kinds/test_compile.py",
    "tests/runtime/worker/forms/kinds/test_int8.py",
    "tests/runtime/features/huggingface/test_clients.py",
    "tests/runtime/features/huggingface/test_long_texts.py",
    "tests/runtime/features/huggingface/test_media.py",
    "tests/test_runner.py",
    "tests/ui/test_trouble.py",
    "tests/ui/test_views.py",
}
# The objects of test modules stay, and garbage collection among them takes a fifth of the time of
# pytest's collection.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore the files that `--fast` and `--everyday` leave out, before their import."""
    path = os.path.relpath(collection_path, config.rootpath) + "/" * collection_path.is_dir()
    fast = config.getoption("fast")
    nightly = path in NIGHTLY_FILES or path.startswith(NIGHTLY_FOLDERS)
    if (fast or config.getoption("everyday")) and nightly:
        return True
    return True if fast and path.startswith(SLOW_FOLDERS) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    fast, everyday = config.getoption("fast"), config.getoption("everyday")
    left_out = {item for item in items if (fast or everyday) and _is_nightly(item)}
    left_out |= {item for item in items if fast and _is_slow(item)}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _is_nightly(item: pytest.Item) -> bool:
    return item.get_closest_marker("nightly") is not None


def _is_slow(item: pytest.Item) -> bool:
    starts_processes = "processes" in getattr(item, "fixturenames", ())
    return starts_processes or item.get_closest_marker("slow") is not None


@pytest.fixture(scope="session")
def processes() -> None:
    """Mark a test that starts processes, which `scripts/test --fast` leaves out."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _started.clear()


@pytest.fixture(autouse=True)
def no_unmarked_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test of --fast that starts a process without the fixture `processes`."""
    yield
    assert not (_started and request.config.getoption("fast")), (
        f"it starts {_started}: add pytest.mark.usefixtures('processes')"
    )


_started: list[str] = []  # the processes that the running test has started


def _note_process(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        _started.append(f"{event} {arguments[:2]}")


sys.addaudithook(_note_process)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("fast"):
        settings.load_profile("fast")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the workers of `-n auto`: the cores plus two, since tests often wait."""
    return cpu_count() + 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Fork xdist's workers from a process that has already collected the tests."""
    if forked.FORKS:
        from execnet import gateway_io

        from tests.support.collected import Collected

        options = [name for name in ("fast", "everyday") if config.getoption(name)]
        start = Collected([*(f"--{name}" for name in options), *config.args]).start

        def start_forked(self: Any, command: Sequence[str], model: Any) -> None:
            self.popen = start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            super(gateway_io.Popen2IOMaster, self).__init__(
                self.popen.stdin, self.popen.stdout, execmodel=model
            )

        gateway_io.Popen2IOMaster.__init__ = start_forked


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests by file, but documentation pages and chaos trials individually.

    Pages and trials share nothing. Long files run first. Short trials run last, when a whole file
    would keep one process busy and leave the others idle.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        is_sorted = False

        def _split_scope(self, nodeid: str) -> str:
            # All tests of one group run in one process, which starts TorchServe once.
            if nodeid.startswith("tests/differential/"):
                return "tests/differential/"
            return (
                nodeid
                if nodeid.startswith(("tests/docs/", "tests/chaos/"))
                else super()._split_scope(nodeid)
            )

        def _assign_work_unit(self, node: Any) -> None:
            if not self.is_sorted:
                self.is_sorted = True
                trials = sorted(
                    (scope for scope in self.workqueue if scope.startswith("tests/chaos/")),
                    key=len,
                    reverse=True,
                )
                # The longest id lists the most scenarios, so its trial starts early.
                for scope in trials:
                    self.workqueue.move_to_end(scope)
                pages = "test_what_a_page_shows"
                slow = [
                    scope for scope in self.workqueue if pages in scope or scope in NIGHTLY_FILES
                ]
                for scope in [*trials[:1], *slow]:
                    self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape lone surrogates in a test's output, which no process could send to another."""
    report = yield
    report.sections = [
        (name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(autouse=True)
def no_tester_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the tester's settings of tsx."""
    for name in [name for name in os.environ if name.startswith("TSX_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the tester's proxies."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def free_ports() -> Callable[[int], list[int]]:
    """Return a function that finds free ports of loopback."""
    return servers.free_ports


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], object]], None]:
    """Return a function that polls a condition until it holds."""

    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    return wait


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory for sockets; a socket's path has at most a hundred characters."""
    return tmp_path_factory.mktemp("t")


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    """Restore the logging of this process at the end of a test that sets it up."""
    root, name = logging.getLogger(), logging.getLevelName(logging.WARNING)
    handlers, level = root.handlers[:], root.level
    libraries = {logger: logger.level for logger in map(logging.getLogger, ("uvicorn", "asyncio"))}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.addLevelName(logging.WARNING, name)
    for logger, logger_state in libraries.items():
        logger.setLevel(logger_state)


@pytest.fixture
def user_environment(
    processes: None, tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> dict[str, str]:
    """Return variables for commands: this Python's scripts, a cache, and three free addresses."""
    inference, management, metrics = (f"http://127.0.0.1:{port}" for port in free_ports(3))
    return clean(
        {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "TSX_CACHE_DIR": str(tmp_path / "cache"),
            "TSX_INFERENCE_ADDRESS": inference,
            "TSX_MANAGEMENT_ADDRESS": management,
            "TSX_METRICS_ADDRESS": metrics,
        }
    )


@pytest.fixture
def start_server(
    processes: None,
) -> Iterator[Callable[[Sequence[str | Path], Path, Mapping[str, str]], Running]]:
    """Return a function that starts a server and waits until it answers; none outlives the test."""
    with ExitStack() as stack:
        yield lambda command, directory, environment: stack.enter_context(
            started(command, directory, environment)
        )
