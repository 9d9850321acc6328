"""Imports point down the floors of docs/concepts/architecture.md and have no effects."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {
    "tsx_archiver": ROOT / "archiver",
    "model_archiver": ROOT / "packages" / "tsx-serve-torchserve-shims" / "src",
    "workflow_archiver": ROOT / "packages" / "tsx-serve-torchserve-shims" / "src",
    "tsx_runtime": ROOT / "runtime",
    "tsx_cli": ROOT / "cli",
    "tsx_templates": ROOT / "templates",
    "tsx_client": ROOT / "packages" / "tsx-client" / "src",
}

# Each part may import itself and the floors below it. `tsx_runtime` itself is the package's empty
# top.
WIRE = {
    "tsx_runtime.errors",
    "tsx_runtime.heap",
    "tsx_runtime.recordings",
    "tsx_runtime.version",
    "tsx_runtime.wire",
}
SHARED = WIRE | {"tsx_archiver", "tsx_templates", "tsx_runtime.shared"}
# Packages whose own modules import nothing.
TOPS = {"tsx_runtime", "tsx_runtime.features"}
# The interface of features, which names the types of all floors for the type checker only.
SEAM = "tsx_runtime.feature"
SETTINGS = SHARED | {SEAM, "tsx_runtime.settings", "tsx_runtime.plugins"}
PRELOADS = {"tsx_runtime.worker.launch.preload", "tsx_runtime.worker.launch.preload_export"}
WORKER_BASE = WIRE | {
    "tsx_archiver",
    "tsx_runtime.shared",
    "tsx_runtime.worker.exceptions",
    "tsx_runtime.worker.channel",
}
HANDLER_API = WORKER_BASE | {"tsx_runtime.worker.handler_api"}
CODECS = HANDLER_API | {"tsx_runtime.worker.diagnostics", "tsx_runtime.worker.codecs"}
HANDLERS = CODECS | {"tsx_runtime.worker.forms", "tsx_runtime.worker.handlers"}
GENERATION = HANDLERS | {"tsx_runtime.features.generation.worker"}
OPENAI = GENERATION | {"tsx_runtime.features.openai.worker"}
EXECUTION = HANDLERS | {"tsx_runtime.worker.execution"}
# The parts of features that run in workers. They alone import those of other features.
WORKER_PARTS: dict[str, set[str]] = {
    "tsx_runtime.features.huggingface.handlers": HANDLER_API,
    "tsx_runtime.features.mlflow.handlers": HANDLER_API,
    "tsx_runtime.features.tabular.handlers": HANDLER_API,
    # Images of chats are downloaded by the rules for archives.
    "tsx_runtime.features.generation.worker": HANDLERS | {"tsx_runtime.sources"},
    "tsx_runtime.features.openai.worker": GENERATION,
    "tsx_runtime.features.huggingface.worker": OPENAI,
    "tsx_runtime.features.mlflow.worker": HANDLERS,
    "tsx_runtime.features.python_files.handlers": HANDLER_API,
    "tsx_runtime.features.python_files.worker": HANDLERS,
    "tsx_runtime.features.tabular.worker": HANDLERS | {"tsx_runtime.features.python_files.worker"},
}
ARCHIVER_BASE = {
    "tsx_archiver.errors",
    "tsx_archiver.limits",
    "tsx_archiver.names",
    "tsx_archiver.quantities",
}
CORE = (
    SETTINGS
    | PRELOADS
    | {"tsx_runtime.sources", "tsx_runtime.core", "tsx_runtime.worker.launch.entry"}
)
METRICS = CORE | {"tsx_runtime.metrics"}
API = METRICS | {"tsx_runtime.api"}
HTTP = API | {"tsx_runtime.http"}
GRPC = HTTP | {"tsx_runtime.grpc"}
SERVER = HTTP | {"tsx_runtime.server"}
FEATURES = GRPC | {"tsx_runtime.features"}
TARGETS = FEATURES | SERVER | {"tsx_runtime.targets"}
MAY_IMPORT: dict[str, set[str]] = {
    "tsx_archiver.errors": set(),
    "tsx_archiver.limits": set(),
    "tsx_archiver.names": {"tsx_archiver.errors"},
    "tsx_archiver.quantities": set(),
    "tsx_archiver.storage": ARCHIVER_BASE,
    "tsx_archiver.containers": ARCHIVER_BASE | {"tsx_archiver.storage"},
    "tsx_archiver.monitor": ARCHIVER_BASE,
    "tsx_archiver.metadata": ARCHIVER_BASE | {"tsx_archiver.containers", "tsx_archiver.monitor"},
    "tsx_archiver": set(),
    "model_archiver": {"tsx_archiver"},
    "workflow_archiver": {"tsx_archiver"},
    "tsx_templates": set(),
    "tsx_runtime.errors": set(),
    "tsx_runtime.heap": set(),
    "tsx_runtime.recordings": set(),
    "tsx_runtime.version": set(),
    "tsx_runtime.wire": set(),
    "tsx_runtime.shared": WIRE | {"tsx_archiver"},
    "tsx_runtime.features.isolation.sandbox": WIRE | {"tsx_runtime.shared"},
    "tsx_runtime.plugins": WIRE | {"tsx_runtime.shared", SEAM},
    "tsx_runtime.settings": SHARED | {SEAM},
    "tsx_runtime.feature": set(),
    # The core knows two things of a worker: the function that its process starts with, and the
    # modules that the fork server imports.
    "tsx_runtime.worker.launch.entry": {"tsx_runtime.worker"},
    "tsx_runtime.worker.launch.preload_export": {"tsx_runtime.worker", *PRELOADS},
    "tsx_runtime.worker.launch.preload": {"tsx_runtime.worker"},
    "tsx_runtime.worker.exceptions": {"tsx_runtime.errors"},
    "tsx_runtime.worker.channel": WIRE | {"tsx_runtime.shared"},
    # TorchServe's module names, for modules of every room, and its functions, one of which uses a
    # handler's module.
    "tsx_runtime.worker.handler_api.ts_shim": {"tsx_runtime.worker", "tsx_runtime.version"},
    "tsx_runtime.worker.handler_api.utils": WORKER_BASE | {"tsx_runtime.worker.handlers"},
    "tsx_runtime.worker.handler_api": WORKER_BASE,
    "tsx_runtime.worker.diagnostics": HANDLER_API,
    "tsx_runtime.worker.codecs": CODECS,
    "tsx_runtime.worker.forms.build": EXECUTION
    | {"tsx_runtime.worker.forms", "tsx_runtime.worker.model_loading"},
    "tsx_runtime.worker.forms": CODECS | {"tsx_runtime.worker.handlers.models"},
    "tsx_runtime.worker.handlers": CODECS | {"tsx_runtime.worker.forms"},
    "tsx_runtime.worker.execution": HANDLERS,
    "tsx_runtime.worker.model_loading": EXECUTION,
    "tsx_runtime.worker.main": EXECUTION | {"tsx_runtime.worker.model_loading"},
    "tsx_runtime.worker": WIRE
    | {"tsx_archiver", "tsx_runtime.shared", "tsx_runtime.worker.launch.entry", *PRELOADS},
    "tsx_runtime.sources": SETTINGS,
    "tsx_runtime.core": CORE,
    "tsx_runtime.metrics": CORE,
    "tsx_runtime.api": METRICS,
    "tsx_runtime.http": API,
    "tsx_runtime.grpc": set(),
    **WORKER_PARTS,
    # The part of a feature that runs in workers.
    "tsx_runtime.features.continuous.loop": EXECUTION | {"tsx_runtime.features.continuous.members"},
    "tsx_runtime.features": GRPC,
    "tsx_runtime.server": HTTP,
    "tsx_runtime.targets": FEATURES | SERVER,
    "tsx_runtime.testing": TARGETS,
    "tsx_client": set(),
    "tsx_cli": TARGETS | {"tsx_client"},
}

# The rooms of a package, from the top floor down: a room imports the floors below it, and no other
# room of its own floor.
FLOORS: dict[str, list[set[str]]] = {
    "tsx_runtime.core": [
        {"registry"},
        {"traffic"},
        {"models"},
        {"workers"},
        {"scheduling"},
        {
            *{"telemetry", "placement", "hidden_credentials", "concurrency"},
            *{"persistence", "comparison"},
        },
    ],
    "tsx_runtime.http": [
        {"build"},
        {"lanes"},
        {"app"},
        {"asgi_lane"},
        {"admission", "context", "fast_lane", "page", "routes", "tls"},
        {"websocket"},
        {"connection_clock", "keystore", "turns"},
    ],
}
PACKAGES = ("tsx_archiver", "tsx_cli", "tsx_client", "tsx_runtime")
# The floors inside the command line, the lowest first: a module may import the rows above its own,
# but not its neighbours.
CLI_FLOORS: Mapping[str, Sequence[str]] = {
    "tsx_cli": (
        "common",
        "archive",
        "bench cache client config explain init jobs models predict replay serve slowest",
        "deploy mlflow_deployments optimize plan",
        "batch check",
        "feedback monitor",
        "main",
        "__main__",
    ),
    "tsx_cli.bench": ("load", "search", "report", "commands", "command"),
    "tsx_cli.deploy": (
        "spec_values",
        "ray.spec",
        "spec",
        "engine",
        "aws",
        "preflight",
        "image",
        "aws.kinds",
        "target",
        "aws.target preflight.preflight",
        "aws_lambda container sagemaker",
        "kubernetes",
        "ray",
        "targets",
        "emit",
        "commands",
        "command",
    ),
}

MOST_MODULES = 15  # the largest number of modules in a folder
MOST_IMPORTS = 20  # the largest number of modules of the product that a module imports
# Modules that each feature reaches, and that name none.
HUBS = {
    "tsx_runtime.http.app": 15,
    "tsx_runtime.http.build": 18,
    "tsx_runtime.server.server": 18,
    "tsx_runtime.core.registry.registry": 18,
    "tsx_runtime.core.models.model": 18,
    "tsx_cli.deploy.commands.verbs": 20,
    "tsx_cli.main": 5,
}
# Functions of a benchmark's own processes import these.
NUMERIC = {"numpy", "PIL"}
STATISTICS = "tsx_runtime.features.monitor.statistics"  # for the monitor process, not the server
# The hot path needs numpy, which takes 8 MiB of the front end; the client takes users' arrays.
COUNT = {
    "tsx_runtime.core.telemetry.histogram",
    "tsx_runtime.core.telemetry.aggregation",
    "tsx_client.bodies",
}
HEAVY = {"torch", "torchvision", "numpy", "PIL", "onnxruntime", "onnx", "safetensors", "sklearn"}


def files() -> Iterator[tuple[str, Path]]:
    """Yield the dotted name and the file of each shipped module."""
    for package, room in ROOMS.items():
        for file in sorted((room / package).rglob("*.py")):
            parts = file.relative_to(room).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


MODULES = dict(files())


def part(module: str) -> str | None:
    """Return the entry of MAY_IMPORT to which a module belongs.

    The empty top module of tsx_runtime and foreign modules belong to none.
    """
    return next(
        (name for name in MAY_IMPORT if module == name or module.startswith(name + ".")), None
    )


def is_below(module: str, parts: Iterable[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in parts)


@cache
def tree(module: str) -> tuple[ast.Module, list[ast.AST]]:
    """Return the parsed file of a module, and each node that a test examines."""
    parsed = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    kinds = (ast.Import, ast.ImportFrom, ast.Constant, ast.Call)
    return parsed, [node for node in ast.walk(parsed) if isinstance(node, kinds)]


@cache
def imports_of(module: str, *, texts: bool = True) -> list[tuple[str, int]]:
    """Return each module that a file imports at any depth, with its line.

    In `from package import module` the module counts, and with `texts` a string with its name.
    """
    file = MODULES[module]
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    names = []
    nodes = tree(module)[1]
    if module == SEAM:
        guarded = next(node for node in tree(module)[0].body if isinstance(node, ast.If))
        nodes = [node for node in nodes if node not in guarded.body]
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package_parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*package_parts, base] if base else package_parts)
            inner = [f"{base}.{alias.name}" for alias in node.names]
            names += [(name if name in MODULES else base, node.lineno) for name in inner]
        elif (
            texts
            and isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value in MODULES
        ):
            names.append((node.value, node.lineno))
    return names


def test_imports_point_down_the_floors() -> None:
    homeless = {module for module in MODULES if part(module) is None} - TOPS
    assert not homeless, (
        "these stand on no floor: add them to MAY_IMPORT and to docs/concepts/architecture.md"
    )
    violations = [
        f"{module}, line {line}: {name}"
        for module in MODULES
        if (here := part(module)) is not None
        for name, line in imports_of(module)
        if name.partition(".")[0] in ROOMS
        and name not in TOPS
        and not is_below(name, MAY_IMPORT[here] | {here})
    ]
    assert not violations


def test_features_import_no_other_feature() -> None:
    def folder(module: str) -> str:
        return ".".join(module.split(".")[:3])

    assert not [
        f"{module}, line {line}: {name}"
        for module in MODULES
        if module.startswith("tsx_runtime.features.") and part(module) not in WORKER_PARTS
        for name, line in imports_of(module)
        if name.startswith("tsx_runtime.features.") and folder(name) != folder(module)
    ]


def imports_within(package: str) -> dict[str, set[str]]:
    """Return the imports of each file within its package, including those under TYPE_CHECKING."""
    inside = [name for name in MODULES if name.startswith(package + ".")]
    return {name: {target for target, _ in imports_of(name) if target in inside} for name in inside}


@pytest.mark.parametrize("package", FLOORS)
def test_rooms_of_a_package_import_those_below_them(package: str) -> None:
    floor = {room: number for number, rooms in enumerate(FLOORS[package]) for room in rooms}

    def room(module: str) -> str:
        return module.removeprefix(package + ".").partition(".")[0]

    assert not [
        f"{module} -> {target}"
        for module, targets in imports_within(package).items()
        for target in targets
        if room(module) != room(target) and floor[room(module)] >= floor[room(target)]
    ]


def test_a_folder_has_at_most_15_modules() -> None:
    counts = Counter(str(file.parent.relative_to(ROOT)) for file in MODULES.values())
    assert {folder: count for folder, count in counts.items() if count > MOST_MODULES} == {}


def test_a_module_imports_at_most_20_modules_of_the_product() -> None:
    counts = {
        module: len({name for name, _ in imports_of(module, texts=False) if name in MODULES})
        for module in MODULES
    }
    assert {
        module: count for module, count in counts.items() if count > HUBS.get(module, MOST_IMPORTS)
    } == {}


def test_no_hub_names_a_feature() -> None:
    """The hubs know no class whose name begins with a feature, or with a target of `tsx deploy`."""
    features = ROOMS["tsx_runtime"] / "tsx_runtime" / "features"
    folders = [*features.glob("*/__init__.py"), *(ROOT / "cli/tsx_cli/deploy").glob("*/target.py")]
    names = [file.parent.name.title().replace("_", "").removesuffix("s") for file in folders]
    is_named = re.compile(rf"({'|'.join(names)})s?[A-Z]\w*").fullmatch
    words = {
        (module, word)
        for module in HUBS
        for node in ast.walk(tree(module)[0])
        for word in (getattr(node, "id", ""), getattr(node, "attr", ""))
    }
    assert len(names) > 25
    assert [(module, word) for module, word in words if is_named(word)] == []


def test_no_two_classes_share_a_name() -> None:
    classes: dict[str, list[str]] = defaultdict(list)
    for module in MODULES:
        # Users of tsx_client see no other names.
        if module.startswith("tsx_") and not module.startswith("tsx_client"):
            for node in tree(module)[0].body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    classes[node.name].append(module)
    assert {name: modules for name, modules in classes.items() if len(modules) > 1} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_files_of_a_package_import_each_other_without_cycles(package: str) -> None:
    remaining = imports_within(package)
    while free := {
        module for module, imports in remaining.items() if not imports & remaining.keys()
    }:
        remaining = {module: imports for module, imports in remaining.items() if module not in free}
    assert not remaining, "these files are in a cycle of imports, or import one of it"


def floor(room: str, module: str) -> tuple[int, str] | None:
    """Return the row of CLI_FLOORS and the name in it to which a module belongs.

    The room's own top and other rooms belong to none.
    """
    rows = {
        f"{room}.{name}": number
        for number, row in enumerate(CLI_FLOORS[room])
        for name in row.split()
    }
    name = max(
        (name for name in rows if module == name or module.startswith(f"{name}.")),
        key=len,
        default=None,
    )
    return None if name is None else (rows[name], name)


@pytest.mark.parametrize("room", CLI_FLOORS)
def test_imports_inside_the_command_line_point_down_its_floors(room: str) -> None:
    violations = []
    for module in (name for name in MODULES if name.startswith(f"{room}.")):
        here = floor(room, module)
        assert here is not None, f"{module} stands on no floor: add it to CLI_FLOORS"
        rows = [(line, name, floor(room, name)) for name, line in imports_of(module)]
        violations += [
            f"{module}, line {line}: {name}"
            for line, name, target in rows
            if target is not None and target[1] != here[1] and target[0] >= here[0]
        ]
    assert not violations


TEMPORARY = {"TemporaryDirectory", "mkdtemp", "mkstemp", "NamedTemporaryFile"}
UNCHECKED = {"tsx_archiver.storage.cache"}  # the cache checks its directory itself


def test_temporary_files_are_made_in_an_explicit_directory() -> None:
    calls = (
        (module, {argument.arg for argument in node.keywords})
        for module in MODULES
        for node in tree(module)[1]
        if isinstance(node, ast.Call)
        and (getattr(node.func, "attr", None) or getattr(node.func, "id", None)) in TEMPORARY
    )
    assert {module for module, arguments in calls if "dir" not in arguments} == UNCHECKED


def test_only_workers_import_torch_and_its_kin() -> None:
    heavy = []
    for module in (
        name
        for name in MODULES
        if name in CORE - PRELOADS or not is_below(name, ["tsx_runtime.worker", *WORKER_PARTS])
    ):
        allowed = (
            NUMERIC
            if module.startswith(("tsx_cli.bench.", "tsx_cli.monitor.", STATISTICS))
            else {"numpy"}
            if module in COUNT
            else set()
        )
        lines = [
            (line, name)
            for name, line in imports_of(module)
            if name.partition(".")[0] in HEAVY - allowed
        ]
        heavy += [f"{module}, line {line}: {name}" for line, name in lines]
    assert not heavy


IMPORT_IN_A_BARE_PROCESS = """
import json, os, sys, threading
sys.dont_write_bytecode = True
opened = []
def watch(event, arguments):
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        opened.append(str(arguments[0]))
    elif event in ("socket.bind", "socket.connect", "subprocess.Popen", "os.fork", "os.mkdir", "os.putenv"):
        opened.append(f"{event} {arguments!r}")
sys.addaudithook(watch)
import signal
handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
__import__(sys.argv[1])
print(json.dumps({
    "heavy": sorted({"torch", "numpy", "PIL", "onnxruntime"} & set(sys.modules)),
    "threads": threading.active_count(),
    "did": opened,
    "handlers_kept": all(signal.getsignal(number) == handler for number, handler in handlers.items()),
    "root_handlers": len(sys.modules["logging"].getLogger().handlers) if "logging" in sys.modules else 0,
}))
"""

# Each imports what it needs of the other packages.
ENTRANCES = (
    "model_archiver",
    "tsx_cli.main",
    "tsx_runtime.server.server",
    "tsx_runtime.worker.main",
    "tsx_templates",
)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("module", ENTRANCES)
def test_a_bare_import_has_no_effect(module: str, tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOMS["model_archiver"]), os.environ.get("PYTHONPATH", "")])
    finished = subprocess.run(
        [sys.executable, "-c", IMPORT_IN_A_BARE_PROCESS, module],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == {
        "heavy": [],
        "threads": 1,
        "did": [],
        "handlers_kept": True,
        "root_handlers": 0,
    }
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("processes")
def test_pydantic_is_imported_only_to_read_a_model_configuration() -> None:
    """A model's environment may have pydantic 1."""
    code = (
        "import sys, tsx_archiver.opening, tsx_archiver.torch_model_archiver\n"
        "import tsx_runtime.worker.main\n"
        "assert 'pydantic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


@pytest.mark.usefixtures("processes")
def test_help_imports_neither_torch_nor_the_server() -> None:
    finished = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tsx_cli", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "serve" in finished.stdout
    loaded = {
        line.rpartition("|")[2].strip()
        for line in finished.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "typer" in loaded
    assert not loaded & {
        "torch",
        "numpy",
        "fastapi",
        "uvicorn",
        "pydantic",
        "boto3",
        "tsx_runtime.core.registry.registry",
    }
