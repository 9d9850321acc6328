"""An archive's modules beside the server's: a handler finds its own, and nobody else finds them in place of another module."""

from __future__ import annotations

import json

from tests.runtime.worker.conftest import StartWorker

HOSTILE = "raise AssertionError('the archive took the place of a module of the server')\n"
WHO = "WHO = 'the archive'\n"


def test_a_module_of_the_archive_takes_no_other_modules_place(start_worker: StartWorker) -> None:
    """Neither of what is imported already nor of what the server, or a library, imports later."""
    taken = ("json", "logging", "yaml", "torch", "typing", "numpy", "traceback")
    worker = start_worker(
        """
        import pkgutil, sys, utils
        import json, logging, typing, torch
        def handle(data, context):
            if data is not None:
                theirs = [pkgutil.resolve_name(name).__file__ for name in ("mailbox", "rlcompleter", "yaml.nodes")]
                return [{"theirs": theirs, "utils": utils.WHO, "named": sys.modules["utils"] is utils}]
        """,
        files={f"{name}.py": HOSTILE for name in taken} | {"mailbox.py": HOSTILE, "rlcompleter.py": HOSTILE, "utils.py": WHO},
    )
    assert worker.loaded, worker.report
    answer = json.loads(worker.ask(b"")[0].body)
    assert not any(str(worker.directory) in file for file in answer["theirs"])
    assert (answer["utils"], answer["named"]) == ("the archive", True)


def test_a_handler_and_its_helpers_get_the_archives_own_whenever_they_import_it(start_worker: StartWorker) -> None:
    worker = start_worker(
        """
        import mailbox, helper, importlib, pkgutil
        from tabnanny.part import SIZE
        import tabnanny.part as part
        def handle(data, context):
            if data is None:
                return None
            import rlcompleter
            found = [mailbox.WHO, helper.later(), rlcompleter.WHO, importlib.import_module("mailbox").WHO]
            theirs = hasattr(pkgutil.resolve_name("mailbox"), "WHO")
            return [{"found": found, "same": helper.mailbox is mailbox, "part": [SIZE, part.SIZE], "theirs": theirs}]
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
    answer = json.loads(worker.ask(b"")[0].body)
    assert answer == {"found": ["the archive"] * 4, "same": True, "part": [11, 11], "theirs": False}


def test_a_handler_may_be_called_as_a_module_that_others_need(start_worker: StartWorker) -> None:
    source = "import pkgutil\ndef handle(data, context):\n    return data and [str('Queue' in dir(pkgutil.resolve_name('queue')))]\n"
    assert start_worker(files={"queue.py": source}, handler="queue.py").ask(b"")[0].body == b"True"


def test_code_that_a_link_leads_to_outside_is_not_run(start_worker: StartWorker, tmp_path) -> None:
    (tmp_path / "x.py").write_text("def handle(data, context):\n    return data\n")
    worker = start_worker(handler="x.py", files={"handler.py": ""}, model_dir=str(tmp_path / "model-0"))
    assert "was not found" in worker.report["message"]
    (tmp_path / "model-0" / "x.py").symlink_to(tmp_path / "x.py")
    for handler, said in (("x.py", "leads out of the model's directory"), (f"{tmp_path}/x.py", "it is absolute"), ("../x.py", "'..'")):
        worker = start_worker(handler=handler, model_dir=str(tmp_path / "model-0"))
        assert not worker.loaded
        assert said in worker.report["message"]
