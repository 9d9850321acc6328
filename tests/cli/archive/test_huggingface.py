"""`tsx archive` and `tsx serve` of Hugging Face models, in directories and on the Hub."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.conftest import Run
from tests.support import huggingface_models
from tests.support.hub import Hub, HubRepo, hub_double
from tests.support.models import make_model
from tests.support.servers import FREE_PORTS, serving

HANDLER = """
def handle(data, context):
    facts = context.manifest["huggingface"]
    return data and [{"task": facts["task"], "trusted": context.system_properties["trust_remote_code"]} for row in data]
"""
CONFIG = {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}
MODELING = "from transformers import BertForSequenceClassification\n\n\nclass Own(BertForSequenceClassification):\n    pass\n"


@pytest.fixture
def model_directory(tmp_path: Path) -> Path:
    """Write a model's directory as a training run saves it, an adapter, and a handler."""
    for name, text in {
        "tiny/config.json": json.dumps(CONFIG),
        "tiny/model.safetensors": "weights",
        "tiny/pytorch_model.bin": "weights again",
        "tiny/training_args.bin": "x",
        "tiny/modeling_own.py": "raise SystemExit",
        "lora/adapter_config.json": '{"peft_type": "LORA", "base_model_name_or_path": "org/base"}',
        "lora/adapter_model.safetensors": "x",
        "double.py": HANDLER,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_proxies: None) -> Iterator[Hub]:
    with hub_double() as hub:
        hub.use(monkeypatch, tmp_path / "hf")
        yield hub


def test_a_directory_becomes_an_archive_that_passes_its_check(
    run: Run, model_directory: Path, tmp_path: Path
) -> None:
    result = run("archive tiny --handler double.py --adapter style=lora --check")
    assert result.code == 0, result.err
    assert result.out.startswith(
        "tiny: Hugging Face model, BertForSequenceClassification, task text-classification\nname tiny, version 1.0\n"
    )
    assert "adapter style: LORA of org/base" in result.out
    assert "It runs only with --trust-remote-code" in result.out
    assert "1 sample got the same answers" in result.out
    with zipfile.ZipFile(tmp_path / "tiny.mar") as archive:
        facts = json.loads(archive.read("MAR-INF/MANIFEST.json"))["huggingface"]
        assert [name for name in archive.namelist() if name.startswith("huggingface_model/")] == [
            "huggingface_model/adapters/style/adapter_config.json",
            "huggingface_model/adapters/style/adapter_model.safetensors",
            "huggingface_model/config.json",
            "huggingface_model/model.safetensors",
            "huggingface_model/modeling_own.py",
        ]
    assert facts == {
        "task": "text-classification",
        "architecture": "BertForSequenceClassification",
        "source": "tiny",
        "adapters": ["style"],
    }
    output = run("archive inspect tiny.mar").out
    for row in (
        "kind +Hugging Face model",
        "task +text-classification",
        "source +tiny",
        "adapters +style",
    ):
        assert re.search(row, output)


def test_a_hub_model_is_packed_with_its_commit(
    run: Run, model_directory: Path, hub: Hub, tmp_path: Path
) -> None:
    hub.repos |= {"org/tiny-1.5": HubRepo(), "org/lora": HubRepo()}
    commit = hub.repos["org/tiny-1.5"].commit(model_directory, "v1")
    hub.repos["org/lora"].commit(tmp_path / "lora")
    result = run("archive hf:org/tiny-1.5@v1 --adapter style=hf:org/lora --version 2")
    assert result.code == 0, result.err
    assert f"\nrevision {commit}\nname tiny-1.5, version 2\nhandler huggingface\n" in result.out
    assert "downloading hf:org/tiny-1.5@v1\n" in result.err
    assert not [name for name in hub.downloads() if name.endswith(".bin")]
    with zipfile.ZipFile(tmp_path / "tiny-1.5.mar") as archive:
        facts = json.loads(archive.read("MAR-INF/MANIFEST.json"))["huggingface"]
        assert archive.read("huggingface_model/model.safetensors") == b"weights"
        assert "huggingface_model/adapters/style/adapter_model.safetensors" in archive.namelist()
    assert (facts["source"], facts["revision"]) == ("hf:org/tiny-1.5", commit)
    for source, error in (
        ("hf:org/tiny-1.5@v2", "has no revision v2"),
        ("hf:org", "it must be hf:ORG/NAME"),
    ):
        result = run("archive", source)
        assert (result.code, error in result.err) == (1, True)


def test_options_that_do_not_apply_are_refused(
    run: Run, model_directory: Path, tmp_path: Path
) -> None:
    (tmp_path / "m.pt").write_bytes(b"x")
    make_model(tmp_path / "m.mar", handler=HANDLER)
    for arguments, error in {
        "archive m.pt --task chat": "--task: only a Hugging Face model takes that, and m.pt is none",
        "archive m.mar --check --adapter a=lora": "is only checked; remove --adapter",
        "archive tiny --trust-remote-code": "--trust-pickle are for --check",
        "archive tiny --adapter lora": "--adapter takes NAME=DIRECTORY",
        "archive tiny --adapter a=lora --adapter a=lora": "two adapters are called a",
        "archive tiny other/tiny --name x": "can name only one archive",
        "serve m.mar --task chat": "--task: only directories of Hugging Face models",
        "bench tiny": "'tiny' is a model of Hugging Face, and an archive is needed here",
        "serve --trust-remote-code": "--trust-pickle are for the models that are named",
        "serve tiny --handler double.py": "apply to bare model files",
    }.items():
        result = run(arguments)
        assert result.code == 2, (arguments, result)
        assert error in result.err
    result = run("archive tiny --task chat")
    assert (result.code, "not text-generation" in result.err) == (1, True)
    assert run("archive tiny").code == 0
    assert "tsx optimize builds no forms" in run("optimize tiny.mar").err
    (model_directory / "config.json").write_text(
        '{"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}'
    )
    assert run("archive tiny --task text2text-generation -o t5.mar").code == 0


def test_remote_code_runs_only_with_trust_remote_code(
    run: Run,
    hub: Hub,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    session_cache: Path,
) -> None:
    model = tmp_path / "own"
    model.mkdir()
    saved_model = huggingface_models.model(
        "bert-classification", tmp_path_factory.getbasetemp().parent
    )
    for file in saved_model.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    own_code = {
        "architectures": ["Own"],
        "auto_map": {"AutoModelForSequenceClassification": "modeling_own.Own"},
    }
    (model / "config.json").write_text(json.dumps(config | own_code | {"model_type": "bert"}))
    (model / "modeling_own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{MODELING}"
    )
    (model / "done").unlink()
    commit = hub.repos.setdefault("org/own", HubRepo()).commit(model)
    assert run("archive own --task text-classification").code == 0
    run("archive own.mar --check")
    assert not (tmp_path / "ran").exists()
    environment = {
        **hub.environment(tmp_path / "hf"),
        "TSX_CACHE_DIR": str(session_cache),
        "TSX_WORKER_PRELOAD": "false",
    }
    arguments = "serve mine=hf:org/own --task text-classification --trust-remote-code --workers 1"
    with serving([*arguments.split(), *FREE_PORTS], tmp_path, environment) as server:
        assert (tmp_path / "ran").exists()
        assert "serving mine 1.0: Hugging Face model, cpu, 1 worker" in server.lines
        answer = httpx.post(
            f"{server.address('predictions')}/predictions/mine",
            json={"inputs": "the file is read"},
            timeout=30,
        )
        assert set(answer.json()[0][0]) == {"label", "score"}, answer.text
        (description,) = httpx.get(f"{server.address('models')}/models/mine").json()
        assert description["modelUrl"] == f"hf:org/own@{commit}"
        assert server.stop() == 0
