"""The code that a registration may name: files of the archive and built-in handlers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.management import post_model
from tests.support.models import make_model, make_war

ANSWERS = "def handle(data, context):\n    return data and ['ok'] * len(data)\n"
OUTSIDE_MODEL = "is a link to a file outside the model's directory"


@pytest.fixture
def foreign_file(tmp_path: Path) -> Path:
    """Write a file of another user; running it creates the file `ran`."""
    file = tmp_path / "x.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{ANSWERS}")
    return file


@pytest.mark.parametrize("parameter_source", ["query", "json"])
def test_a_handler_outside_the_archive_is_refused_and_never_run(
    empty, error_of, foreign_file: Path, parameter_source: str
) -> None:
    empty.write_mar("plain.mar", handler=ANSWERS)
    parents = "../" * 20
    for handler in (
        f"{foreign_file}:handle",
        f" {foreign_file}:handle",
        str(foreign_file.with_suffix("")),
        f"{parents}{foreign_file}:handle",
        f"./{parents}{foreign_file}",
        f"..\\{foreign_file}",
        "../../x.py",
        "handler.py\n",
        "handler.py:handle\n",
        "handler.py\x00",
        "handler.py\u2028",
        "\x85handler.py",
    ):
        options = {"url": "plain.mar", "handler": handler, "model_name": "attack"}
        answer = empty.management.post(
            "/models",
            **{
                "params" if parameter_source == "query" else "json": options
                | {"initial_workers": 1}
            },
        )
        kind, message = error_of(answer)
        assert kind == "BadRequestException", handler
        assert "is refused" in message
    assert not foreign_file.with_name("ran").exists()
    assert "attack" not in empty.registry.models


def test_only_the_manifest_may_name_an_installed_module_as_handler(empty, error_of) -> None:
    empty.write_mar("plain.mar", handler=ANSWERS)
    for handler in (
        "os:system",
        "runpy:run_path",
        "this",
        "json.tool",
        "tsx_runtime.worker.launch.entry:run",
        "pip",
    ):
        message = error_of(post_model(empty, "plain.mar", handler=handler, initial_workers=1))[1]
        assert "neither a file of the archive nor a built-in handler" in message


def test_files_of_the_archive_and_built_in_handlers_are_accepted(empty) -> None:
    empty.write_mar("plain.mar", handler=ANSWERS)
    for number, handler in enumerate(
        (
            "handler.py",
            "handler:handle",
            " handler.py ",
            "base_handler",
            "ts.torch_handler.base_handler",
        )
    ):
        answer = post_model(empty, "plain.mar", handler=handler, model_name=f"m{number}")
        assert answer.status_code == 200, handler


def test_a_handler_link_out_of_an_unpacked_model_is_refused(
    empty, error_of, foreign_file: Path, store: Path
) -> None:
    model = make_model(store / "linked", ANSWERS, name="linked")
    (model / "out.py").symlink_to(foreign_file)
    answer = post_model(empty, "linked", handler="out.py", initial_workers=1)
    assert OUTSIDE_MODEL in error_of(answer)[1]
    (model / "handler.py").unlink()
    (model / "handler.py").symlink_to(foreign_file)
    assert OUTSIDE_MODEL in error_of(post_model(empty, "linked"))[1]
    assert not foreign_file.with_name("ran").exists()


@pytest.mark.parametrize("file", ["model-config.yaml", "MAR-INF/MANIFEST.json"])
def test_a_file_link_out_of_an_unpacked_model_is_not_read(
    empty, error_of, tmp_path: Path, store: Path, file: str
) -> None:
    secret_file = tmp_path / "secret"
    secret_file.write_text("minWorkers: the-secret-word\n")
    name = f"links-{Path(file).stem}"
    model = make_model(store / name, ANSWERS, name="links", config="minWorkers: 1\n")
    (model / file).unlink()
    (model / file).symlink_to(secret_file)
    message = error_of(post_model(empty, name))[1]
    assert OUTSIDE_MODEL in message
    assert "the-secret-word" not in message


def test_a_manifest_cannot_name_files_that_a_parameter_cannot(
    empty, error_of, foreign_file: Path
) -> None:
    for number, handler in enumerate(
        (f" {foreign_file}", f"{foreign_file}:handle", "../x.py", "handler.py\n")
    ):
        name = f"named{number}"
        model = make_model(empty.settings.model_store / name, ANSWERS)
        manifest = {"model": {"modelName": name, "handler": handler}}
        (model / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
        kind, message = error_of(post_model(empty, name, initial_workers=1))
        assert kind == "BadRequestException"
        assert "is refused" in message
    assert not foreign_file.with_name("ran").exists()


def test_the_default_handler_of_the_settings_must_be_in_the_archive(
    start_server, foreign_file: Path, store: Path
) -> None:
    model = make_model(store / "unnamed", ANSWERS)
    (model / "MAR-INF" / "MANIFEST.json").write_text('{"model": {"modelName": "unnamed"}}')
    with start_server(default_service_handler=f"{foreign_file}:handle") as server:
        assert post_model(server, "unnamed", initial_workers=1).status_code == 400
    assert not foreign_file.with_name("ran").exists()


def test_workflow_handlers_and_functions_must_be_in_the_workflow_archive(
    empty, foreign_file: Path
) -> None:
    for number, (handler, node) in enumerate(
        [
            (str(foreign_file), "step"),
            ("../x.py", "step"),
            ("handler.py", "../x"),
            ("handler.py", "a:b"),
        ]
    ):
        manifest = {"workflowName": "flow", "specFile": "spec.yaml", "handler": handler}
        war = make_war(
            empty.settings.model_store / f"flow{number}.war",
            json.dumps({"dag": {node: []}}),
            ANSWERS,
            **{"WAR-INF/MANIFEST.json": json.dumps({"workflow": manifest})},
        )
        answer = empty.management.post("/workflows", params={"url": war.name})
        assert 400 <= answer.status_code < 600
    assert not foreign_file.with_name("ran").exists()
    assert not empty.workflows.workflows
