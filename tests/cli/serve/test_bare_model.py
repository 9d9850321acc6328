"""`tsx serve` with model files, directories and the model store: start, errors and end."""

from __future__ import annotations

import json
import shlex
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file

from tests.cli.conftest import DIGITS, Run
from tests.support.models import make_model
from tests.support.servers import FREE_GRPC_PORTS, FREE_PORTS, screen, tsx
from tsx_archiver import open_archive, plan_archive
from tsx_archiver.inspecting import manifest_of
from tsx_cli.archive.directory import as_directory
from tsx_cli.archive.model_file import HandlerFiles, infer_spec
from tsx_cli.archive.source import classify
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.main import main
from tsx_cli.serve.arguments import LocatedSource, find_model, locate
from tsx_cli.serve.server import with_addresses, with_grpc_addresses
from tsx_runtime.settings.schema import Settings
from tsx_runtime.worker.handlers.models.model_files import load_onnx

ECHO = "def handle(data, context):\n    return data\n"


@contextmanager
def unpacked(path: Path, parts: HandlerFiles) -> Iterator[tuple[Path, list[str]]]:
    """Make the directory that `tsx serve FILE` serves."""
    spec, notes = infer_spec(path, parts)
    with as_directory(plan_archive(spec)) as directory:
        yield directory, notes


def test_code_of_a_model_file_is_copied_and_other_files_are_linked() -> None:
    with unpacked(
        DIGITS / "digits.pth", HandlerFiles(str(DIGITS / "handler.py"), DIGITS / "model.py")
    ) as (directory, notes):
        assert notes[0] == "digits.pth: weights, 64.6 kB"
        for name in ("digits.pth", "index_to_name.json"):
            assert (directory / name).readlink() == DIGITS / name
        # Code is copied, since the server does not run code behind links.
        for name in ("model.py", "handler.py"):
            assert not (directory / name).is_symlink()
            assert (directory / name).read_bytes() == (DIGITS / name).read_bytes()
        manifest = json.loads((directory / "MAR-INF" / "MANIFEST.json").read_text())
        assert manifest["model"]["modelName"] == "digits"
        assert directory.parent == Path(tempfile.gettempdir())
    assert not directory.exists()
    assert (DIGITS / "digits.pth").exists()


def test_the_configuration_of_a_model_directory_is_copied(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["BertForSequenceClassification"], "model_type": "bert"}'
    )
    (tmp_path / "model-config.yaml").write_text("batchSize: 4\n")
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text("{}")
    with ExitStack() as stack:
        start = find_model(LocatedSource(None, tmp_path, classify(tmp_path)), HandlerFiles(), stack)
        assert start.path is not None
        with open_archive(start.path) as opened:
            assert opened.config.raw == {"batchSize": 4}


def test_an_onnx_file_loads_with_its_external_weights(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "w"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
        [numpy_helper.from_array(torch.tensor([2.0, 3.0]).numpy(), "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save_model(
        model,
        tmp_path / "mul.onnx",
        save_as_external_data=True,
        location="mul.onnx.data",
        size_threshold=0,
    )
    with unpacked(tmp_path / "mul.onnx", HandlerFiles()) as (directory, _):
        assert (directory / "mul.onnx.data").readlink() == tmp_path / "mul.onnx.data"
        loaded = load_onnx(directory / "mul.onnx", torch.device("cpu"))
        assert loaded(torch.tensor([1.0, 1.0])).tolist() == [2.0, 3.0]


@pytest.mark.usefixtures("processes")
def test_a_model_file_is_served_with_a_page_until_ctrl_c(
    tmp_path: Path, short_path: Path, session_cache: Path
) -> None:
    command = [
        "serve",
        f"numbers={DIGITS / 'digits.pt2'}",
        *shlex.split(f"--handler {DIGITS / 'handler.py'} --workers 2"),
        *FREE_PORTS,
    ]
    # Preloading is enabled, as by default.
    environment = {
        "TSX_CACHE_DIR": str(session_cache),
        "TMPDIR": str(short_path),
        "TSX_WORKER_PRELOAD": "true",
    }
    screen_text, code = screen(command, tmp_path, environment, until="Ctrl-C")
    assert code == 0, screen_text
    page = " ".join(screen_text.split())
    for part in (
        "serves 1 model",
        "numbers",
        "a program of torch.export",
        "predictions http://127.0.0.1:",
        "in another terminal: tsx predict numbers --sample --url http://127.0.0.1:",
    ):
        assert part in page
    assert (
        page.index("/ui/")
        < page.index("in another terminal:")
        < page.index("model version kind device workers")
    )
    assert "Traceback" not in screen_text
    assert [path for path in short_path.iterdir() if path.name.startswith("tsx-model-")] == []


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("broken")
    (directory / "deep.py").write_text(
        "def fall(depth):\n    if depth:\n        return fall(depth - 1) + 1\n    raise RuntimeError('the bottom')\n\nfall(20)\n"
    )
    assert (
        main(
            shlex.split(
                f"archive --name broken --handler {directory / 'deep.py'} -o {directory} --no-import"
            )
        )
        == 0
    )
    return directory


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("debug", [False, True])
def test_a_model_that_fails_to_load_ends_the_start_with_its_reason(
    broken: Path, session_cache: Path, debug: bool
) -> None:
    command = ["serve", "broken.mar", "--workers", 2, *FREE_PORTS, *(["--debug"] if debug else [])]
    result = tsx(command, broken, {"TSX_CACHE_DIR": str(session_cache)})
    assert result.returncode == 1
    assert "Error: broken.mar does not load: " in result.stderr
    assert "RuntimeError: the bottom" in result.stderr
    assert debug or result.stderr.count("RuntimeError: the bottom") == 1, (
        "the log does not say it again"
    )
    assert debug or "  deep.py:6 in <module>: fall(20)\n" in result.stderr
    assert ("--debug shows the whole traceback" in result.stderr) is not debug
    assert ("Traceback (most recent call last)" in result.stderr) is debug
    assert ("tsx_cli" in result.stderr) is debug


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("names", "arguments"),
    [
        (["first", "second"], ["first", "second"]),
        (["first.mar", "second.mar"], ["first.mar", "second.mar"]),
        (["first.tar.gz", "second.tar.gz"], ["--model-store", ".", "--set", "load_models=all"]),
    ],
)
def test_one_start_reports_all_invalid_models(
    tmp_path: Path, session_cache: Path, names: list[str], arguments: list[str]
) -> None:
    for name in names:
        if "." in name:
            (tmp_path / name).write_text("garbage")
        else:
            make_model(tmp_path / name, "raise ValueError('no')")
    make_model(tmp_path / "third.mar", ECHO)
    environment = {"TSX_CACHE_DIR": str(session_cache)}
    result = tsx(["serve", *arguments, *FREE_PORTS], tmp_path, environment)
    assert result.returncode == 1
    title, *lines = [line for line in result.stderr.splitlines() if not line.startswith("{")]
    assert title == "Error: 2 files cannot be served:"
    reason = "is not a model archive" if "." in names[0] else "ValueError: no"
    for name, line in zip(names, lines, strict=True):
        assert name in line
        assert reason in line


def test_one_start_reports_all_missing_files(run: Run) -> None:
    result = run("serve", "first.mar", "second.mar", "third.war")
    assert result.code == 1
    assert [f"there is no file '{name}.mar'" in result.err for name in ("first", "second")] == [
        True,
        True,
    ]


@pytest.mark.usefixtures("processes")
def test_weights_that_do_not_fit_the_network_are_reported(
    tmp_path: Path, session_cache: Path
) -> None:
    (tmp_path / "model.py").write_text("import torch\n\nclass Net(torch.nn.Module):\n    pass\n")
    result = tsx(
        ["serve", DIGITS / "digits.pth", "--model-file", "model.py", *FREE_PORTS],
        tmp_path,
        {"TSX_CACHE_DIR": str(session_cache)},
    )
    assert result.returncode == 1
    assert "digits.pth does not fit model.py" in result.stderr
    assert '"features.0.weight"' in result.stderr


def make_directory(path: Path, *files: str) -> Path:
    for file in files:
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_text("{}")
    return path


MANIFEST = "MAR-INF/MANIFEST.json"


@pytest.mark.parametrize(
    ("local_files", "in_store", "expected_path"),
    [
        (
            ("net/handler.py", "net/data.csv"),
            "net.mar/x",
            "store/net.mar",
        ),  # the sources of the archive, which are not a model
        (("net/handler.py",), f"net/{MANIFEST}", "store/net"),
        (("net/data.csv",), None, "net"),
        ((f"net/{MANIFEST}",), "net.mar/x", "net"),
        ((f"net/inner/{MANIFEST}",), "net.mar/x", "net"),
        (("net/MLmodel",), "net.mar/x", "net"),
        (("net/adapter_config.json",), "net.mar/x", "net"),
        (("net",), "net.mar/x", "net"),
        (("other",), "net.mar/x", "store/net.mar"),
        (("other",), "net/MLmodel", "store/net"),
    ],
)
def test_a_model_in_the_working_directory_overrides_one_of_the_store(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    local_files: tuple[str, ...],
    in_store: str | None,
    expected_path: str,
) -> None:
    monkeypatch.chdir(make_directory(tmp_path, *local_files))
    make_directory(tmp_path / "store", *([in_store] if in_store else []))
    source = locate("net", Settings(model_store=Path("store")))
    assert source[:2] == (None, Path(expected_path))
    assert locate("a=net", Settings(model_store=Path("store"))) == source._replace(name="a")
    has_conflict = in_store is not None and expected_path == "net"
    note = "'net' is that of the working directory, not 'store/net.mar' of the model store\n"
    assert capsys.readouterr().out == note * 2 * has_conflict


def test_an_mlflow_directory_is_served_as_if_packed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_directory(tmp_path / "iris", "data/model.pth")
    (tmp_path / "iris" / "MLmodel").write_text(
        "flavors: {python_function: {}, pytorch: {model_data: data}}"
    )
    with ExitStack() as stack:
        start = find_model(
            LocatedSource("flowers", tmp_path / "iris", "MLflow"), HandlerFiles(), stack
        )
        assert start.path is not None
        manifest = manifest_of(start.path)
        assert (manifest.model_name, manifest.handler, start.order.url) == (
            "flowers",
            "mlflow_pyfunc",
            "iris",
        )
        assert (start.path / "mlflow_model" / "MLmodel").resolve() == tmp_path / "iris" / "MLmodel"
    assert (
        "MLflow model, flavour pytorch\nname flowers, version 1.0\nhandler mlflow_pyfunc"
        in capsys.readouterr().out
    )
    assert not start.path.exists()


def test_the_working_directorys_name_is_the_url_of_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_directory(tmp_path / "net", MANIFEST))
    with ExitStack() as stack:
        assert (
            find_model(
                LocatedSource(None, Path(), classify(Path())), HandlerFiles(), stack
            ).order.url
            == "net"
        )


@pytest.mark.usefixtures("processes")
def test_a_duplicate_model_is_refused_before_binding_a_port(run: Run) -> None:
    make_model(Path("digits.mar"), ECHO)
    with socket.create_server(("127.0.0.1", 0)) as in_use:
        result = run("serve", "digits.mar", "digits.mar", "--port", in_use.getsockname()[1])
    assert result.code == 1
    assert "1.0 is already registered for model digits" in result.err


@pytest.mark.usefixtures("processes")
def test_the_http_port_in_use_is_reported_before_the_grpc_port(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(Path("digits.mar"), ECHO)
    with (
        socket.create_server(("127.0.0.1", 0)) as http,
        socket.create_server(("127.0.0.1", 0)) as grpc,
    ):
        monkeypatch.setenv("TSX_GRPC_INFERENCE_PORT", str(grpc.getsockname()[1]))
        result = run("serve", "digits.mar", *FREE_PORTS, "--port", http.getsockname()[1])
        assert (
            f"Port {http.getsockname()[1]} on 127.0.0.1 is in use (inference_address)" in result.err
        )
        result = run("serve", "digits.mar", *FREE_PORTS)
        assert (
            f"Port {grpc.getsockname()[1]} on 127.0.0.1 is in use (grpc_inference_port)"
            in result.err
        )


def test_the_error_of_an_invalid_model_store_names_it(run: Run) -> None:
    result = run("serve", "--model-store", "nowhere", *FREE_PORTS, *FREE_GRPC_PORTS)
    assert result.code == 1
    assert "the model store 'nowhere' is not a directory" in result.err


def test_options_for_model_files_are_refused_for_other_models(run: Run, tmp_path: Path) -> None:
    make_model(tmp_path / "echo.mar", ECHO)
    (tmp_path / "iris").mkdir()
    (tmp_path / "iris" / "MLmodel").write_text("flavors: {pytorch: {}}")
    for model in ("echo.mar", "iris", "models:/iris/1"):
        result = run("serve", model, "--handler", "image_classifier")
        assert (result.code, "apply to bare model files" in result.err) == (2, True)
    assert run("serve", "--model-file", DIGITS / "model.py").code == 2


def test_a_missing_gpu_is_reported_before_anything_starts(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = run("serve", "--device", "gpu")
    assert result.code == 2
    assert "no GPU is visible here" in result.err


def test_a_public_address_needs_tokens(run: Run) -> None:
    result = run("serve", "--host", "0.0.0.0", *FREE_PORTS)
    assert result.code == 1
    assert "inference_token must be set" in result.err


def test_port_and_host_options_change_only_their_addresses() -> None:
    changed = with_addresses(Settings(), "::1", {"inference": 9, "management": None, "metrics": 0})
    assert (changed.inference_address, changed.management_address, changed.metrics_address) == (
        "http://[::1]:9",
        "http://[::1]:8081",
        "http://[::1]:0",
    )
    assert (
        with_addresses(Settings(), "[::1]", {"inference": 9}).inference_address == "http://[::1]:9"
    )
    with pytest.raises(UsageError, match="--host takes a name"):
        with_addresses(Settings(), "a b", {"inference": None, "management": None, "metrics": None})


def test_missing_parts_of_a_model_file_are_reported() -> None:
    with (
        pytest.raises(UsageError, match="add --model-file"),
        unpacked(DIGITS / "digits.pth", HandlerFiles()),
    ):
        pass
    with (
        pytest.raises(CliError, match=r"is not a model file \(it begins"),
        unpacked(DIGITS / "README.md", HandlerFiles()),
    ):
        pass


def test_host_and_port_options_apply_to_grpc() -> None:
    changed = with_grpc_addresses(
        Settings(), "[::1]", {"grpc_inference": 9, "grpc_management": None}
    )
    assert (changed.grpc_inference_address, changed.grpc_inference_port) == ("::1", 9)
    assert (changed.grpc_management_address, changed.grpc_management_port) == ("::1", 7071)
    assert with_grpc_addresses(Settings(), None, {"grpc_inference": None}) == Settings()


def test_the_error_of_a_missing_file_suggests_a_similar_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store").mkdir()
    with pytest.raises(CliError, match=r"'x.mar', nor in the model store 'store'"):
        locate("n=x.mar", Settings(model_store=Path("store")))
    (tmp_path / "store" / "digits.mar").touch()
    with pytest.raises(CliError, match=r"store 'store'; did you mean 'digits.mar'"):
        locate("digit.mar", Settings(model_store=Path("store")))
    (tmp_path / "y.mar").touch()
    with pytest.raises(CliError, match=r"no file 'y'; did you mean 'y.mar'"):
        locate("y", Settings())
