"""The package `ts` in workers and in users' scripts."""

from __future__ import annotations

import http.server
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.runtime.worker.conftest import StartWorker
from tests.support.torchserve_names import names
from tsx_runtime.worker.handler_api import ts_shim
from tsx_runtime.worker.handler_api.testing import copy_files, download_model
from tsx_runtime.worker.handler_api.utils import (
    check_process_mem_usage,
    emit_metrics,
    get_yaml_config,
    import_class,
)

ROOT = Path(__file__).parents[4]
SHIMS = ROOT / "packages" / "tsx-serve-torchserve-shims" / "src"
MODULES = {module: listed for module, listed in names().items() if module.startswith("ts.")}
# Names that TorchServe's modules import, and that users import from these modules.
REEXPORTED_NAMES = {
    "ts": ["__version__"],
    "ts.protocol.otf_message_handler": ["send_intermediate_predict_response"],
    "ts.service": ["PredictionException"],
    "ts.torch_handler.text_handler": ["CLEANUP_REGEX"],
    "ts.torch_handler.unit_tests.test_utils.mock_context": ["MockContext"],
    "ts.torch_handler.unit_tests.test_utils.model_dir": ["copy_files", "download_model"],
    "ts.version": ["__version__"],
}
PARTS = "workflow_archiver.manifest_components"
NAMES = {
    module: sorted(
        [
            *(
                name
                for name in MODULES.get(module, [])
                if not ts_shim.find_replacement(f"{module}.{name}")
            ),
            *REEXPORTED_NAMES.get(module, []),
        ]
    )
    for module in ts_shim.NAMES
}
ALL_IMPORTS = """
import importlib, importlib.util, json, pickle, sys
import ts.context, ts.handler_utils.utils, ts.metrics.process_memory_metric, ts.service, ts.utils.util

heavy = [name for name in ("numpy", "psutil", "torch") if name in sys.modules]
found = {}
for name in json.loads(sys.argv[1]):
    star = {}
    exec(f"import {name} as module\\nfrom {name} import *", star)
    module = star["module"]
    assert module is importlib.import_module(name) and module is eval(name)
    assert all(pickle.loads(pickle.dumps(star[each])) == getattr(module, each) for each in module.__all__ if each != "MetricUnit")
    found[name] = sorted(module.__all__)

refused = {}
for module, names in json.loads(sys.argv[2]).items():
    for name in names:
        try:
            exec(f"from {module} import {name}")
        except ImportError as error:
            refused[f"{module}.{name}"] = str(error)
print(json.dumps([heavy, found, importlib.util.find_spec("ts.launcher").origin, refused]))
import ts.wfdl
"""


def test_every_name_imports_in_a_worker(start_worker: StartWorker) -> None:
    imports = "\n".join(
        f"from {module} import {', '.join(names)}" for module, names in NAMES.items()
    )
    worker = start_worker(
        f"{imports}\nimport ts\nfrom tsx_runtime.worker import exceptions\n"
        "def handle(data, context):\n"
        "    if data is not None:\n"
        "        return [[ts.__version__, type(context) is Context, PredictionException is exceptions.PredictionException]]\n"
    )
    assert worker.loaded, worker.report
    assert worker.values(b"")[0] == ["0.12.0", True, True]


def test_metrics_and_settings_work_as_in_torchserve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own.yaml").write_text("a: [1]\n")
    assert get_yaml_config(tmp_path / "own.yaml") == {"a": [1]}
    with caplog.at_level("INFO", "tsx.worker"):
        emit_metrics(["a.Count:1"])
        emit_metrics({})
    assert caplog.messages == ["[METRICS]a.Count:1"]


@pytest.fixture(scope="module")
def script(processes: None) -> subprocess.CompletedProcess[str]:
    """Run ALL_IMPORTS in a new interpreter, like a user's script outside a worker."""
    return subprocess.run(
        [sys.executable, "-c", ALL_IMPORTS, json.dumps(list(NAMES)), json.dumps(names())],
        env={**os.environ, "PYTHONPATH": str(SHIMS)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_scripts_can_import_every_name_without_heavy_packages(
    script: subprocess.CompletedProcess[str],
) -> None:
    assert json.loads(script.stdout)[:3] == [[], NAMES, str(SHIMS / "ts" / "launcher.py")]
    assert "TorchServe's module 'ts.wfdl'" in script.stderr


def test_every_public_name_of_torchserve_exists_or_names_an_alternative(
    script: subprocess.CompletedProcess[str],
) -> None:
    refused_names = json.loads(script.stdout)[3]
    all_names = [f"{module}.{name}" for module in MODULES for name in MODULES[module]]
    included = {
        f"{module}.{name}" for module in REEXPORTED_NAMES for name in REEXPORTED_NAMES[module]
    }
    hints = {
        name: hint
        for name in all_names
        if name not in included and (hint := ts_shim.find_replacement(name))
    } | {
        f"{module}.{name}": "generate_manifest_json"
        for module, listed in names().items()
        for name in listed
        if module.startswith(PARTS)
    }
    assert refused_names.keys() == hints.keys()
    assert all(hint in refused_names[name] for name, hint in hints.items())
    documented = (ROOT / "docs" / "reference" / "torchserve.md").read_text(encoding="utf-8")
    assert [name for name in [*ts_shim.REPLACEMENTS, PARTS] if f"`{name}`" not in documented] == []


def test_a_private_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        ts_shim.refuse("ts.protocol.otf_message_handler", "__path__")
    with pytest.raises(AttributeError):
        ts_shim.refuse("ts.service", "no_such_name")
    # pickle searches all modules for a function without `__module__`.
    with pytest.raises(AttributeError):
        ts_shim.refuse("ts.protocol.otf_message_handler", "log1p")


def test_the_server_process_does_not_import_ts(processes: None) -> None:
    names = "import sys, tsx_runtime.server.server; print(*sys.modules, *sys.meta_path)"
    process = subprocess.run(
        [sys.executable, "-c", names], capture_output=True, text=True, check=True
    )
    assert "tsx_runtime.server.server" in process.stdout
    assert not {"ts", "ts.torch_handler"} & set(process.stdout.split())
    assert ts_shim.ShimFinder.__name__ not in process.stdout


def test_a_handler_that_is_named_by_its_module_in_ts_is_served(start_worker: StartWorker) -> None:
    assert (
        "the archive names no serialized file"
        in start_worker(handler="ts.torch_handler.densenet_handler").report["message"]
    )


def test_small_tools_work_as_handlers_expect(start_worker: StartWorker) -> None:
    worker = start_worker("""
        import json
        from ts.handler_utils.utils import import_class
        from ts.torch_handler.unit_tests.test_utils.mock_context import MockContext
        from ts.utils.util import check_valid_pt2_backend, list_classes_from_module
        import ts.context

        def handle(data, context):
            if data is None:
                return
            mock = MockContext(model_pt_file="a.pt", model_dir="/d", model_name="n", gpu_id=None)
            mock.explain = True
            return [{
                "prefixed": import_class("JSONDecoder", "json").__name__,
                "dotted": import_class("json.JSONEncoder").__name__,
                "classes": [kind.__name__ for kind in list_classes_from_module(json.decoder)],
                "backends": [check_valid_pt2_backend("eager"), check_valid_pt2_backend("no_such_backend")],
                "mock": [mock.system_properties["model_dir"], mock.manifest["model"], mock.get_request_header(0, "explain"),
                         mock.get_request_header(0, "describe"), mock.model_yaml_config],
            }]
    """)
    assert worker.values(b"")[0] == {
        "prefixed": "JSONDecoder",
        "dotted": "JSONEncoder",
        "classes": ["JSONDecodeError", "JSONDecoder"],
        "backends": [True, False],
        "mock": [
            "/d",
            {"modelName": "n", "serializedFile": "a.pt", "modelFile": "model.py"},
            "True",
            None,
            {},
        ],
    }


@pytest.mark.parametrize("name", ["NoSuchClass", "json.NoSuchClass"])
def test_a_missing_class_is_an_import_error(name: str) -> None:
    with pytest.raises(ImportError, match="NoSuchClass"):
        import_class(name)


def test_processes_are_reported_with_their_resident_bytes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_process_mem_usage(io.StringIO(f"{os.getpid()},{1 << 30}\n"))
    (pid, size), gone = (line.split(":") for line in capsys.readouterr().out.splitlines())
    assert (int(pid), gone) == (os.getpid(), [str(1 << 30), "0"])
    assert int(size) > 1 << 20


def test_the_model_of_a_unit_test_is_downloaded_as_model_pt(tmp_path: Path) -> None:
    class Weights(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.path.encode())

        def log_message(self, *args: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Weights) as server:
        for path in ("/models/net.pth?x=1", "/models/other.pth"):
            threading.Thread(target=server.handle_request).start()
            download_model(f"http://127.0.0.1:{server.server_port}{path}", tmp_path / "new")
            assert [(file.name, file.read_text()) for file in (tmp_path / "new").iterdir()] == [
                ("model.pt", path)
            ]
    copy_files(tmp_path / "new", tmp_path, {"model.pt": "copy.pth"})
    assert (tmp_path / "copy.pth").read_bytes() == b"/models/other.pth"
    with pytest.raises(ValueError, match="no http or https address"):
        download_model("file:///etc/hosts", tmp_path)
