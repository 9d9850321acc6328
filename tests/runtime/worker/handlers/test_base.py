"""BaseHandler, which serves every kind of model file and explains why one cannot be loaded."""

from __future__ import annotations

import math
import os
import shutil
import sys
import textwrap
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.worker.conftest import StartWorker, Worker, a_request
from tests.runtime.worker.handlers.conftest import MODEL, Net
from tsx_archiver import describe_model_file
from tsx_runtime.worker.handlers.base import BaseHandler

BLOCK = """
from torch import nn
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)
"""
OTHER = """
class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
"""
BROKEN = """
class Broken(nn.Module):
    def __init__(self):
        raise RuntimeError("needs a GPU")
"""
TWIN = "\nclass Twin(Net):\n    pass\n"
CUSTOM_LOADING = (
    MODEL
    + """
    def load_state_dict(self, state_dict, strict=True):
        return super().load_state_dict({name.removeprefix("module."): value for name, value in state_dict.items()}, strict)
"""
)
ROWS = """
    from ts.torch_handler.base_handler import BaseHandler

    class Rows(BaseHandler):
        def preprocess(self, data):
            return super().preprocess([row["body"] for row in data]).float()
"""
QUESTIONS = [[1.0, 2.0, 3.0], [0.5, -1.0, 0.25], [0.0, 0.0, 0.0]]


Serve = Callable[..., Worker]


@pytest.fixture
def serve(start_worker: StartWorker, model_bytes: dict[str, bytes]) -> Serve:
    """Return a function that starts a worker whose requests are rows.

    `file` is a key of `model_bytes` or of `files`; `model_py` is the source of the model file.
    """

    def start(
        file: str | None,
        model_py: str | None = None,
        source: str = ROWS,
        files: Any = (),
        model: Any = (),
        **order: Any,
    ) -> Worker:
        contents = {name: model_bytes[name] for name in [file] if name in model_bytes}
        if model_py is not None:
            contents["model.py"] = model_py
        names = {"serializedFile": file, "modelFile": "model.py" if model_py is not None else None}
        return start_worker(
            source, files={**contents, **dict(files)}, model=names | dict(model), **order
        )

    return start


def ask(worker: Worker, *rows: Any) -> list[Any]:
    return worker.values(*map(a_request, rows))


def assert_numbers_of(worker: Worker, net: Net) -> None:
    with torch.inference_mode():
        expected = net(torch.tensor(QUESTIONS))
    torch.testing.assert_close(torch.tensor(ask(worker, *QUESTIONS)), expected)
    torch.testing.assert_close(torch.tensor(ask(worker, QUESTIONS[1])), expected[1:2])


@pytest.mark.parametrize(
    ("file", "model_py"),
    [
        ("weights.pth", MODEL),
        ("old.pth", MODEL),
        ("double.pth", MODEL),
        ("checkpoint.pth", MODEL),
        ("weights.safetensors", MODEL),
        ("script.pt", None),
        ("script.pt", MODEL),
        ("frozen.pt", None),
        ("program.pt2", None),
        ("parallel.pth", CUSTOM_LOADING),
        ("weights.pth", MODEL + "\nclass Helper: pass\n"),
        ("checkpoint.pth", MODEL + BLOCK + OTHER + BROKEN),
    ],
)
def test_every_kind_of_model_file_gives_the_models_values(
    serve: Serve, net: Net, file: str, model_py: str | None
) -> None:
    """Include a model file with several classes, of which one fits the weights."""
    assert_numbers_of(serve(file, model_py), net)


def test_a_handler_can_read_its_device() -> None:
    handler = BaseHandler()
    handler.device = torch.device("cpu")
    assert handler.get_device() == torch.device("cpu")


@pytest.mark.parametrize("size", [1, 2])
def test_a_program_exported_for_one_batch_size_accepts_others(
    serve: Serve, net: Net, tmp_path: Any, size: int
) -> None:
    path = tmp_path / "fixed.pt2"
    torch.export.save(torch.export.export(net, (torch.zeros(size, 3),)), path)
    assert_numbers_of(serve("model.bin", files={"model.bin": path.read_bytes()}), net)


@pytest.fixture
def onnx_files(onnx_bytes: bytes, tmp_path: Path) -> dict[str, bytes]:
    """Return a model as torch.onnx.export writes it, with its weights in a second file."""
    pytest.importorskip("onnxruntime")
    import onnx

    options: Any = {"save_as_external_data": True, "location": "lin.onnx.data", "size_threshold": 0}
    onnx.save_model(onnx.load_from_string(onnx_bytes), tmp_path / "lin.onnx", **options)
    return {name: (tmp_path / name).read_bytes() for name in ("lin.onnx", "lin.onnx.data")}


def test_onnx_models_may_have_their_weights_in_a_second_file(
    serve: Serve, net: Net, onnx_bytes: bytes, onnx_files: dict[str, bytes]
) -> None:
    assert_numbers_of(serve("model.onnx", files={"model.onnx": onnx_bytes}), net)
    assert_numbers_of(serve("lin.onnx", files=onnx_files), net)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        (b"lin.onnx.data", "weights in lin.onnx.data, which the archive does not contain"),
        (b"../onnx.dataX", "'../onnx.dataX', which is refused"),
    ],
)
def test_the_error_names_missing_or_outside_onnx_weights(
    serve: Serve, onnx_files: dict[str, bytes], location: bytes, message: str
) -> None:
    content = onnx_files["lin.onnx"].replace(b"lin.onnx.data", location)
    worker = serve("lin.onnx", files={"lin.onnx": content})
    assert not worker.loaded
    assert message in worker.report["message"]


def test_a_handler_may_call_an_onnx_session_itself(serve: Serve, onnx_bytes: bytes) -> None:
    pytest.importorskip("onnxruntime")
    worker = serve(
        "model.onnx",
        source="""
        import numpy as np
        from ts.torch_handler.base_handler import BaseHandler

        class Own(BaseHandler):
            def handle(self, data, context):
                feed = {self.model.get_inputs()[0].name: np.zeros((len(data), 3), np.float32)}
                options = self.model.get_session_options()
                assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
                return self.model.run(None, feed)[0].tolist()
        """,
        files={"model.onnx": onnx_bytes},
    )
    assert len(ask(worker, 1)[0]) == 2


def test_without_onnxruntime_the_error_has_the_pip_command(serve: Serve, onnx_bytes: bytes) -> None:
    source = "import sys\nsys.modules['onnxruntime'] = None\nfrom ts.torch_handler.base_handler import BaseHandler\nclass H(BaseHandler): pass"
    worker = serve("model.onnx", source=source, files={"model.onnx": onnx_bytes})
    assert "pip install 'tsx-serve[onnx]'" in worker.report["message"]


# These settings avoid precompiled headers and tests of vector instructions, which would slow down a
# single compilation.
FAST_COMPILATION = """
import torch._inductor.config
if hasattr(torch._inductor.config.aot_inductor, "precompile_headers"):
    torch._inductor.config.aot_inductor.precompile_headers = False
torch._inductor.config.cpp.vec_isa_ok = True
torch._inductor.config.aot_inductor.compile_wrapper_opt_level = "O0"
from torch._inductor.cpu_vec_isa import VecISA
VecISA.check_build = lambda self, code: False
"""


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling a package needs g++")
def test_compiled_packages_are_served(serve: Serve, tmp_path: Any) -> None:
    class Double(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    program = torch.export.export(
        Double(), (torch.ones(2, 3),), dynamic_shapes=({0: torch.export.Dim("batch")},)
    )
    exported = tmp_path / "exported.pt2"
    torch.export.save(program, exported)
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ahead = {"pt2": {"export": {"aot_compile": True}}}

    def answers_double(name: str, content: bytes, config: Any, source: str = ROWS) -> bool:
        worker = serve(
            name, source=source, files={name: content}, model_config=config, variables=variables
        )
        return ask(worker, [1, 2, 3], [4, 5, 6]) == [[2, 4, 6], [8, 10, 12]]

    assert answers_double(
        "double.pt2", exported.read_bytes(), ahead, FAST_COMPILATION + textwrap.dedent(ROWS)
    )
    (package,) = (tmp_path / "cache" / "tsx").iterdir()
    old_stat = package.stat()
    # The second worker loads the file that the first one has compiled.
    assert answers_double("double.pt2", exported.read_bytes(), ahead)
    assert (package.stat().st_ino, package.stat().st_mtime_ns) == (
        old_stat.st_ino,
        old_stat.st_mtime_ns,
    )
    description = describe_model_file(package)
    assert (description.kind, description.device, description.detail) == (
        "aotinductor",
        "cpu",
        "compiled for cpu",
    )
    # Older releases of torch wrote only the library.
    with zipfile.ZipFile(package) as archive:
        library = next(archive.read(name) for name in archive.namelist() if name.endswith(".so"))
    assert answers_double("double.pt2", package.read_bytes(), {})
    assert answers_double("double.so", library, ahead)
    worker = serve("double.so", files={"double.so": library})
    assert "pt2: {export: {aot_compile: true}}" in worker.report["message"]


TWO = "from torch import nn\nclass A(nn.Module): pass\nclass B(nn.Module): pass\n"
WANTS = "from torch import nn\nclass Sized(nn.Module):\n    def __init__(self, width, depth=2, *rest): super().__init__()\n"


@pytest.mark.parametrize(
    ("file", "model_py", "message"),
    [
        ("less.pth", MODEL, "does not fit model.py: "),
        ("wide.pth", MODEL, "size mismatch for last.weight"),
        ("parallel.pth", MODEL, "save model.module.state_dict() instead"),
        ("two.pth", MODEL, "save one of 'model', 'ema' alone"),
        ("list.pth", MODEL, "holds a list, not weights"),
        ("weights.pth", "import torch\n", "model.py defines no class"),
        ("weights.pth", TWO, "defines several classes (A, B)"),
        ("weights.pth", WANTS, "Set `init_args: {width: ...}`"),
        ("weights.pth", "import not_there", "No module named 'not_there'"),
        ("weights.pth", MODEL + TWIN, "the weights fit several (Net, Twin)"),
        ("weights.pth", BLOCK + OTHER + BROKEN, "Broken: RuntimeError: needs a GPU; Other: "),
        (None, MODEL + TWIN, "there are no weights to choose by"),
    ],
)
def test_the_error_explains_weights_that_do_not_fit_the_model_file(
    serve: Serve, file: str | None, model_py: str, message: str
) -> None:
    worker = serve(file, model_py)
    assert not worker.loaded
    assert message in worker.report["message"]
    assert len(worker.report["message"]) < 1000
    if "does not fit" in message:
        # There is no traceback, because torch's would only repeat the message.
        assert worker.report["traceback"] == ""


def test_without_a_serialized_file_the_class_loads_its_own_weights(
    serve: Serve, net: Net, model_bytes: dict[str, bytes]
) -> None:
    source = MODEL.replace(
        "nn.Linear(8, 2)\n",
        "nn.Linear(8, 2)\n        self.load_state_dict(torch.load('own.pth'))\n",
    )
    assert_numbers_of(serve(None, source, files={"own.pth": model_bytes["weights.pth"]}), net)


SIZED = """
    import torch

    class Sized(torch.nn.Module):
        def __init__(self, width, by=1):
            super().__init__()
            self.width, self.by = width, by

        def forward(self, x):
            return x[:, : self.width] * self.by
"""


@pytest.mark.parametrize(
    ("init_args", "answer"),
    [
        ({"width": 2, "by": 3}, [[3.0, 6.0]]),
        ({"width": 2, "depth": 3}, "unexpected keyword argument 'depth'"),
        ([2], "init_args: [2] is invalid"),
    ],
)
def test_a_model_class_gets_its_arguments_from_the_configuration(
    serve: Serve, init_args: Any, answer: Any
) -> None:
    worker = serve(None, SIZED, model_config={"init_args": init_args})
    if isinstance(answer, list):
        assert ask(worker, [1.0, 2.0, 3.0]) == answer
    else:
        assert answer in worker.report["message"]


@pytest.mark.parametrize("manifest", [{}, {"model": None}, {"model": {}}])
def test_the_error_explains_a_manifest_without_weights(
    start_worker: StartWorker, manifest: dict[str, Any]
) -> None:
    worker = start_worker(handler="base_handler", manifest=manifest)
    assert "the archive names no serialized file" in worker.report["message"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"modelClass": "Twin"}, None),
        ({"modelFile": "elsewhere.py", "modelClass": "Net"}, None),
        ({"modelClass": "Gone"}, "no class Gone; its classes: Block, Net, Twin."),
        ({"modelClass": "Block"}, "Class Block of model.py cannot be created"),
        ({"modelFile": "gone.py"}, "gone.py is not in the archive"),
    ],
)
def test_the_class_that_the_manifest_names_is_served(
    serve: Serve, net: Net, model: dict[str, str], message: str | None
) -> None:
    worker = serve(
        "weights.pth",
        MODEL + TWIN + BLOCK,
        files={"elsewhere.py": "from model import Net"},
        model=model,
    )
    if message is None:
        assert_numbers_of(worker, net)
    else:
        assert message in worker.report["message"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("weights.pth", "holds weights but not the model"),
        ("weights.safetensors", "holds weights but not the model"),
        ("nothing.pt", "nothing.pt is not in the archive"),
        ("empty.pt", "empty.pt is empty (0 bytes)"),
        ("cut.pt", "truncated"),
        ("junk.pt", "junk.pt"),
    ],
)
def test_the_error_explains_an_unusable_model_file(
    serve: Serve, model_bytes: dict[str, bytes], file: str, message: str
) -> None:
    broken = {
        "empty.pt": b"",
        "cut.pt": model_bytes["script.pt"][:-400],
        "junk.pt": b"\x89junk" * 100,
    }
    worker = serve(file, files={name: broken[name] for name in [file] if name in broken})
    assert not worker.loaded
    assert message in worker.report["message"]
    # The message has no path of the cache, which would not help the user.
    assert f"/{file}" not in worker.report["message"]


def test_a_file_that_contains_code_is_refused_unless_trusted(serve: Serve, tmp_path: Any) -> None:
    script = tmp_path / "whole.py"
    script.write_text(
        "import torch\nclass Twice(torch.nn.Module):\n    def forward(self, x): return x * 2\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        import whole  # type: ignore[import-not-found]  # written above

        torch.save(whole.Twice(), tmp_path / "whole.pth")
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("whole", None)
    files = {"whole.pth": (tmp_path / "whole.pth").read_bytes(), "whole.py": script.read_bytes()}
    start = partial(serve, "whole.pth", files=files)
    refused_worker = start(model={"modelFile": "whole.py"})
    assert "would run code from it" in refused_worker.report["message"]
    assert "`weightsOnly: false`" in refused_worker.report["message"]
    for names in ({"modelFile": "whole.py"}, {}):
        trusted = start(model=names, model_config={"weightsOnly": False})
        assert ask(trusted, [1, 2, 3]) == [[2, 4, 6]]
    misconfigured_worker = start(model_config={"weightsOnly": "no"})
    assert "weightsOnly in model-config.yaml is 'no'" in misconfigured_worker.report["message"]


def test_handling_time_is_reported_and_with_profiling_also_the_steps(
    serve: Serve,
) -> None:
    worker = serve("script.pt")
    ask(worker, QUESTIONS[0])
    assert [(metric["name"], metric["unit"]) for metric in worker.metrics] == [
        ("HandlerTime", "ms")
    ]
    profiled = serve("script.pt", model_config={"handler": {"profile": True}})
    ask(profiled, QUESTIONS[0])
    names = [metric["name"] for metric in profiled.metrics]
    assert names == [
        "ts_handler_preprocess",
        "ts_handler_inference",
        "ts_handler_postprocess",
        "HandlerTime",
    ]
    assert all(math.isfinite(metric["value"]) for metric in profiled.metrics)


def test_describe_and_explain_requests_reach_their_methods(serve: Serve) -> None:
    worker = serve(
        "script.pt",
        source=ROWS
        + """
        def describe_handle(self):
            return {"about": self.context.model_name}

        def get_insights(self, tensor_data, raw_data, target):
            return [[list(tensor_data.shape), raw_data, target.decode()]]  # as bytes, as TorchServe hands query parameters on
        """,
    )
    assert worker.values(a_request(b"", describe="True")) == [{"about": "m"}]
    request = a_request([1, 2, 3], query=b"target=1", explain="True")
    assert worker.values(request) == [[[1, 3], [1, 2, 3], "1"]]


def test_an_explanation_names_a_class_by_its_label(serve: Serve) -> None:
    worker = serve(
        "script.pt",
        source=ROWS
        + """
        def explain_handle(self, data_preprocess, raw_data):
            self.mapping = {"1": "dog"}
            return super().explain_handle(data_preprocess, raw_data)

        def get_insights(self, tensor_data, raw_data, target):
            return [[repr(target)]]
        """,
    )
    for name, target in ((b"dog", "'1'"), (b"1", "bytearray(b'1')"), (b"cat", "bytearray(b'cat')")):
        request = a_request([1, 2, 3], query=b"target=" + name, explain="True")
        assert worker.values(request) == [[target]]


@pytest.mark.parametrize("file", ["weights.pth", "script.pt", "program.pt2"])
def test_an_explanation_has_a_weight_for_each_number_of_a_row(
    serve: Serve, net: Net, file: str
) -> None:
    worker = serve(file, MODEL if file == "weights.pth" else None)
    (weights,) = worker.values(a_request([1, 2, 3], query=b"target=1", explain="True"))
    row = torch.tensor([[1.0, 2.0, 3.0]])
    with torch.inference_mode():
        change = (net(row) - net(torch.zeros(1, 3)))[0, 1].item()
    # Integrated gradients have this property.
    assert sum(weights) == pytest.approx(change, rel=0.1)
    bad_answer = worker.ask(a_request([1, 2, 3], query=b"target=2", explain="True"))[0]
    assert bad_answer.status == 400
    assert "target 2 is not a class" in bad_answer.message


def test_the_error_for_a_model_without_gradients_names_an_alternative(
    serve: Serve, onnx_bytes: bytes
) -> None:
    pytest.importorskip("onnxruntime")
    worker = serve("model.onnx", files={"model.onnx": onnx_bytes})
    answer = worker.ask(a_request([1, 2, 3], explain="True"))[0]
    assert answer.status == 501
    assert "cannot be explained by gradients" in answer.message


def start_profiled(serve: Serve, tmp_path: Path) -> Worker:
    source = f"import tempfile\ntempfile.tempdir = {str(tmp_path)!r}\n" + textwrap.dedent(ROWS)
    return serve("script.pt", source=source, variables={"ENABLE_TORCH_PROFILER": "1"})


def test_torchs_profiler_writes_a_trace(serve: Serve, net: Net, tmp_path: Path) -> None:
    assert_numbers_of(start_profiled(serve, tmp_path), net)
    assert list((tmp_path / "pytorch_profiler" / "m").glob("*.pt.trace.json"))


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0,
    reason="only root can give a directory to another user",
)
def test_torchs_profiler_writes_into_no_directory_of_another_user(
    serve: Serve, net: Net, tmp_path: Path
) -> None:
    (tmp_path / "pytorch_profiler" / "m").mkdir(parents=True)
    os.chown(tmp_path / "pytorch_profiler", 54321, 54321)
    assert_numbers_of(start_profiled(serve, tmp_path), net)
    assert list((tmp_path / "pytorch_profiler" / "m").iterdir()) == []
    assert len(list(tmp_path.glob("pytorch_profiler-*/*.pt.trace.json"))) > 0


@pytest.mark.parametrize(
    "pt2",
    [
        "eager",
        {"compile": {"enable": True, "backend": "aot_eager"}},
        # Weights without a model file cannot be compiled in advance.
        {"export": {"aot_compile": True}},
    ],
)
def test_a_compiled_model_gives_the_same_values(serve: Serve, net: Net, pt2: Any) -> None:
    assert_numbers_of(serve("weights.pth", MODEL, model_config={"pt2": pt2}), net)


def test_without_a_gpu_the_cpu_is_used(serve: Serve, net: Net) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    worker = serve("script.pt", gpu_id=0)
    assert worker.report["device"] == "cpu"
    assert_numbers_of(worker, net)


@pytest.mark.parametrize(
    ("method", "model"),
    [
        (
            "_load_pickled_model(self, model_dir, model_file, model_pt_path)",
            ("weights.pth", MODEL),
        ),
        ("_load_torchscript_model(self, model_pt_path)", ("script.pt", None)),
    ],
)
def test_a_handler_may_load_its_model_in_its_own_way(
    serve: Serve, method: str, model: tuple[str, str | None]
) -> None:
    source = f"{ROWS}\n        def {method}:\n            import torch\n            return torch.nn.Identity()\n"
    worker = serve(*model, source=source)
    assert ask(worker, [1, 2, 3]) == [[1, 2, 3]]
