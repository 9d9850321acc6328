"""The workflows that a server loads at its start."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.models import make_model, make_war
from tests.support.servers import FREE_PORTS, Running, serving, tsx
from tsx_runtime.errors import SettingError
from tsx_runtime.server.startup import workflows_from_settings
from tsx_runtime.settings.schema import Settings
from tsx_runtime.sources import is_url

pytestmark = pytest.mark.usefixtures("processes")

HANDLER = """
def handle(data, context):
    return None if data is None else [bytes(row.get("body") or b"") + b"!" for row in data]


shout = handle
"""


def write_war(path: Path, model: str) -> None:
    make_war(path, f"models: {{say: {{url: {model}}}}}\ndag: {{say: [shout]}}", HANDLER)


def serve_words(model_store: Path, model_entry: str, *sets: str) -> list[object]:
    settings = (f"--set={setting}" for setting in sets)
    return ["serve", model_entry, "--model-store", model_store, *FREE_PORTS, *settings]


def environment(directory: Path) -> dict[str, str]:
    return {"TSX_CACHE_DIR": str(directory / "cache")}


def ask(server: Running, workflow: str) -> str:
    url = f"{server.address('predictions')}/wfpredict/{workflow}"
    return httpx.post(url, content=b"hello", timeout=60).text


@pytest.fixture
def stores(tmp_path: Path) -> tuple[Path, Path]:
    """Return a model store and a workflow store."""
    models, workflows = tmp_path / "models", tmp_path / "workflows"
    models.mkdir()
    workflows.mkdir()
    make_model(models / "say.mar", HANDLER)
    write_war(workflows / "loud.war", "say.mar")
    return models, workflows


def test_a_server_loads_the_workflows_of_its_settings(
    stores: tuple[Path, Path], tmp_path: Path
) -> None:
    models, workflows = stores
    arguments = serve_words(models, "say.mar", f"workflow_store={workflows}", "load_workflows=all")
    with serving(arguments, tmp_path, environment(tmp_path)) as server:
        assert "workflow loud is loaded: POST /wfpredict/loud" in server.log
        assert ask(server, "loud") == "hello!!"
        (node,) = httpx.get(f"{server.address('models')}/models/loud__say", timeout=60).json()
        assert node["loadedAtStartup"]
        assert server.stop() == 0


def test_an_invalid_workflow_ends_the_start(stores: tuple[Path, Path], tmp_path: Path) -> None:
    models, workflows = stores
    write_war(workflows / "silent.war", "none.mar")
    sets = f"workflow_store={workflows}", "load_workflows=silent.war"
    result = tsx(serve_words(models, "say.mar", *sets), tmp_path, environment(tmp_path))
    assert result.returncode != 0
    assert "silent__say failed to register" in result.stderr


def test_entries_have_a_file_and_an_optional_name(tmp_path: Path) -> None:
    for name in ("b.war", "a.war", "model.mar", "._a.war"):
        (tmp_path / name).touch()

    def registrations(*entries: str, **settings: Path) -> list[tuple[str, str | None]]:
        starts = workflows_from_settings(Settings(load_workflows=list(entries), **settings))
        assert all(
            start.order.loaded_at_startup and (start.path is None) == is_url(start.order.url)
            for start in starts
        )
        return [(start.order.url, start.order.name) for start in starts]

    assert (
        registrations("all", workflow_store=tmp_path)
        == registrations("ALL", model_store=tmp_path)
        == [("a.war", None), ("b.war", None)]
    )
    assert registrations("mine=a.war", "b.war", model_store=tmp_path) == [
        ("a.war", "mine"),
        ("b.war", None),
    ]
    assert registrations("https://host/a.war?x=1", "n=https://host/a.war") == [
        ("https://host/a.war?x=1", None),
        ("https://host/a.war", "n"),
    ]
    assert registrations(f"{tmp_path}/a.war") == [(f"{tmp_path}/a.war", None)]
    assert registrations() == []
    for entry in ("a.war", "all"):
        with pytest.raises(SettingError, match=f"'{entry}' .*give the archives' directory"):
            registrations(entry)


def test_the_command_line_accepts_workflows_of_any_directory(
    stores: tuple[Path, Path], tmp_path: Path
) -> None:
    models, workflows = stores
    arguments = serve_words(models, f"shouted={workflows / 'loud.war'}")
    variables = environment(tmp_path) | {"TSX_LOAD_WORKFLOWS": "none.war"}
    with serving(arguments, tmp_path, variables) as server:
        assert "serving workflow shouted: say, shout" in server.lines
        url = f"{server.address('predictions')}/wfpredict/shouted"
        assert f"try: curl {url} -T FILE" in server.lines
        assert ask(server, "shouted") == "hello!!"
        assert server.stop() == 0
    arguments = ["serve", workflows / "loud.war", "--workers", "2", *FREE_PORTS]
    result = tsx(arguments, tmp_path, environment(tmp_path))
    assert "--workers, --batch-size and --device apply to models" in result.stderr
