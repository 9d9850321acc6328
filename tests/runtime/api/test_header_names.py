"""Which code a registration may name: the archive's own files and the built-in handlers, by
whichever way the name comes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.models import make_model, make_war

ANSWERS = "def handle(data, context):\n    return data and ['ok'] * len(data)\n"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A file of another user's that leaves a mark where it is run."""
    file = tmp_path / "x.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{ANSWERS}")
    return file


def names(foreign: Path, store: Path) -> list[str]:
    up = "../" * 20
    return [
        f"{foreign}:handle",
        f" {foreign}:handle",
        str(foreign.with_suffix("")),
        f"{up}{foreign}:handle",
        f"./{up}{foreign}",
        f"..\\{foreign}",
        "../../x.py",
        "handler.py\n",
        "handler.py:handle\n",
        "handler.py\x00",
        "handler.py\u2028",
        "\x85handler.py",
    ]


@pytest.mark.parametrize("way", ["query", "json"])
def test_a_handler_outside_the_archive_is_refused_and_never_run(
    empty, error_of, foreign: Path, store: Path, way: str
) -> None:
    empty.write_mar("plain.mar", handler=ANSWERS)
    for handler in names(foreign, store):
        given = {
            "url": "plain.mar",
            "handler": handler,
            "initial_workers": 1,
            "model_name": "attack",
        }
        answer = empty.management.post(
            "/models", **({"params": given} if way == "query" else {"json": given})
        )
        kind, message = error_of(answer)[:2]
        assert (kind, "is refused" in message) == ("BadRequestException", True), (handler, message)
    assert not foreign.with_name("ran").exists()
    assert "attack" not in empty.registry.models


@pytest.mark.parametrize(
    "handler",
    [
        "os:system",
        "runpy:run_path",
        "this",
        "json.tool",
        "tsx_runtime.worker.launch.entry:run",
        "pip",
    ],
)
def test_a_module_that_is_installed_is_for_the_manifest_to_name(
    empty, error_of, handler: str
) -> None:
    empty.write_mar("plain.mar", handler=ANSWERS)
    given = {"url": "plain.mar", "handler": handler, "initial_workers": 1}
    message = error_of(empty.management.post("/models", params=given))[1]
    assert message.endswith(
        "is refused: it is neither a file of the archive nor a built-in handler. "
        "Name a file of the archive, as file.py or file.py:function, or a built-in handler."
    )


def test_the_archives_own_files_and_the_built_in_handlers_may_be_named(empty) -> None:
    empty.write_mar("plain.mar", handler=ANSWERS)
    for number, handler in enumerate(
        [
            "handler.py",
            "handler:handle",
            " handler.py ",
            "base_handler",
            "ts.torch_handler.base_handler",
        ]
    ):
        given = {"url": "plain.mar", "handler": handler, "model_name": f"m{number}"}
        assert empty.management.post("/models", params=given).status_code == 200, handler


def test_a_link_that_leads_out_of_an_unpacked_model_is_no_handler(
    empty, error_of, foreign: Path, store: Path
) -> None:
    model = make_model(store / "linked", ANSWERS, name="linked")
    (model / "out.py").symlink_to(foreign)
    given = {"url": "linked", "handler": "out.py", "initial_workers": 1}
    assert (
        "is a link to a file outside the model's directory"
        in error_of(empty.management.post("/models", params=given))[1]
    )
    (model / "handler.py").unlink()
    (model / "handler.py").symlink_to(foreign)
    assert (
        "is a link to a file outside the model's directory"
        in error_of(empty.management.post("/models", params={"url": "linked"}))[1]
    )
    assert not foreign.with_name("ran").exists()


@pytest.mark.parametrize("file", ["model-config.yaml", "MAR-INF/MANIFEST.json"])
def test_of_an_unpacked_model_no_file_is_read_that_a_link_leads_to(
    empty, error_of, tmp_path: Path, store: Path, file: str
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("minWorkers: the-secret-word\n")
    model = make_model(
        store / f"links-{Path(file).stem}", ANSWERS, name="links", config="minWorkers: 1\n"
    )
    (model / file).unlink()
    (model / file).symlink_to(secret)
    message = error_of(empty.management.post("/models", params={"url": model.name}))[1]
    assert "is a link to a file outside the model's directory" in message
    assert "the-secret-word" not in message


def test_a_manifest_cannot_name_more_than_a_parameter(empty, error_of, foreign: Path) -> None:
    for number, handler in enumerate(
        [f" {foreign}", f"{foreign}:handle", "../x.py", "handler.py\n"]
    ):
        file = f"named{number}"
        model = make_model(empty.settings.model_store / file, ANSWERS)
        (model / "MAR-INF" / "MANIFEST.json").write_text(
            json.dumps({"model": {"modelName": file, "handler": handler}})
        )
        kind, message = error_of(
            empty.management.post("/models", params={"url": file, "initial_workers": 1})
        )[:2]
        assert kind == "BadRequestException"
        assert "is refused" in message
    assert not foreign.with_name("ran").exists()


def test_a_default_handler_of_the_settings_lies_in_the_archive_as_well(
    start_server, foreign: Path, store: Path
) -> None:
    model = store / "unnamed"
    make_model(model, ANSWERS)
    (model / "MAR-INF" / "MANIFEST.json").write_text(
        json.dumps({"model": {"modelName": "unnamed"}})
    )
    with start_server(default_service_handler=f"{foreign}:handle") as server:
        answer = server.management.post("/models", params={"url": "unnamed", "initial_workers": 1})
    assert answer.status_code == 400
    assert not foreign.with_name("ran").exists()


def test_a_workflows_handler_and_functions_cannot_lead_out_of_it(empty, foreign: Path) -> None:
    store = empty.settings.model_store
    for number, (handler, node) in enumerate(
        [(str(foreign), "step"), ("../x.py", "step"), ("handler.py", "../x"), ("handler.py", "a:b")]
    ):
        manifest = json.dumps(
            {"workflow": {"workflowName": "flow", "specFile": "spec.yaml", "handler": handler}}
        )
        spec = json.dumps({"dag": {node: []}})
        war = make_war(
            store / f"flow{number}.war", spec, ANSWERS, **{"WAR-INF/MANIFEST.json": manifest}
        )
        answer = empty.management.post("/workflows", params={"url": war.name})
        assert 400 <= answer.status_code < 600
    assert not foreign.with_name("ran").exists()
    assert not empty.workflows.workflows
