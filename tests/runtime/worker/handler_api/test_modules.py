"""An archive's modules that have the names of the server's modules."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.runtime.worker.conftest import StartWorker
from tsx_runtime.worker.handler_api.modules import OwnModules

HOSTILE = "raise AssertionError('the archive took the place of a module of the server')\n"
WHO = "WHO = 'the archive'\n"


def test_an_archives_module_does_not_replace_one_that_the_server_imported(
    start_worker: StartWorker,
) -> None:
    server_modules = ("json", "logging", "yaml", "torch", "typing", "numpy", "traceback")
    worker = start_worker(
        """
        import sys, utils
        import json, logging, typing, torch, yaml.nodes
        def handle(data, context):
            if data is not None:
                return [{"yaml_file": yaml.nodes.__file__, "utils": utils.WHO, "is_in_sys_modules": sys.modules["utils"] is utils}]
        """,
        files={f"{name}.py": HOSTILE for name in server_modules} | {"utils.py": WHO},
    )
    assert worker.loaded, worker.report
    answer = worker.values(b"")[0]
    assert str(worker.directory) not in answer["yaml_file"]
    assert (answer["utils"], answer["is_in_sys_modules"]) == ("the archive", True)


def test_a_handler_and_its_helpers_import_the_archives_modules(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(
        """
        import mailbox, helper, importlib
        from tabnanny.part import SIZE
        import tabnanny.part as part
        def handle(data, context):
            if data is None:
                return None
            import rlcompleter
            values = [mailbox.WHO, helper.later(), rlcompleter.WHO, importlib.import_module("mailbox").WHO]
            return [{"values": values, "same": helper.mailbox is mailbox, "part": [SIZE, part.SIZE]}]
        """,
        files={
            "helper.py": "import mailbox\ndef later():\n    from rlcompleter import WHO\n    return WHO\n",
            "mailbox.py": WHO,
            "rlcompleter.py": WHO,
            "tabnanny/__init__.py": "from .part import SIZE",
            "tabnanny/part.py": "import mailbox\nSIZE = len(mailbox.WHO)",
        },
    )
    assert worker.loaded, worker.report
    answer = worker.values(b"")[0]
    assert answer == {"values": ["the archive"] * 4, "same": True, "part": [11, 11]}


def test_modules_that_hide_installed_ones_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])
    for name in ("json", "mailbox", "sndhdr_of_nobody"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.delitem(sys.modules, "mailbox", raising=False)
    with caplog.at_level("INFO", "tsx.worker"):
        OwnModules().enter(tmp_path)
    assert [message.partition(" modules")[0] for message in caplog.messages] == [
        "imports of json load the server's",
        "the archive's",
    ]
    assert "modules mailbox hide installed modules" in caplog.messages[1]


def test_a_handler_may_have_the_name_of_a_module_that_others_need(
    start_worker: StartWorker,
) -> None:
    source = "import pkgutil\ndef handle(data, context):\n    return data and [str('Queue' in dir(pkgutil.resolve_name('queue')))]\n"
    assert start_worker(files={"queue.py": source}, handler="queue.py").ask(b"")[0].body == b"True"


def test_code_outside_the_model_is_not_run(start_worker: StartWorker, tmp_path) -> None:
    (tmp_path / "x.py").write_text("def handle(data, context):\n    return data\n")
    worker = start_worker(
        handler="x.py", files={"handler.py": ""}, model_dir=str(tmp_path / "model-0")
    )
    assert "was not found" in worker.report["message"]
    (tmp_path / "model-0" / "x.py").symlink_to(tmp_path / "x.py")
    for handler, message in (
        ("x.py", "leads out of the model's directory"),
        (f"{tmp_path}/x.py", "it is absolute"),
        ("../x.py", "'..'"),
    ):
        worker = start_worker(handler=handler, model_dir=str(tmp_path / "model-0"))
        assert not worker.loaded
        assert message in worker.report["message"]
