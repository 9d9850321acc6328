"""Models with their own packages or process groups, over REST."""

from __future__ import annotations

from tests.support.models import make_model
from tests.support.wheels import make_wheel

HANDLER = """
import os, sys
import own_words

def handle(data, context):
    return data and [f"{own_words.VERSION} {sys.prefix == os.environ['VIRTUAL_ENV']} {os.environ.get('SECRET_OF_THE_SERVER')}"] * len(data)
"""


def test_a_model_with_its_own_environment_sees_no_server_secret(
    monkeypatch, start_server, tmp_path
):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "42")
    folder = make_model(
        tmp_path / "m", HANDLER, config="useVenv: true\n", requirementsFile="requirements.txt"
    )
    make_wheel(folder, "own_words", "1.5")
    (folder / "requirements.txt").write_text("own-words\n")
    with start_server(
        model_store=tmp_path,
        cache_dir=tmp_path / "cache",
        install_py_dep_per_model=True,
        blacklist_env_vars="SECRET_.*",
    ) as server:
        server.register("m", initial_workers=1)
        assert server.inference.post("/predictions/m").text == "1.5 True None"
        assert server.management.get("/models/m").json()[0]["useVenv"] is True


def test_a_process_group_is_described_or_refused(empty, store, error_of):
    make_model(
        store / "pair.mar", HANDLER, config="parallelType: tp\ntorchrun:\n  nproc-per-node: 2\n"
    )
    make_model(store / "nodes.mar", HANDLER, config="torchrun:\n  nnodes: 2\n")
    assert empty.management.post("/models", params={"url": "pair.mar"}).status_code == 200
    [description] = empty.management.get("/models/pair").json()
    assert (description["parallelType"], description["parallelLevel"]) == ("tp", 2)
    refusal = empty.management.post("/models", params={"url": "nodes.mar"})
    assert refusal.status_code == 400
    assert "set rdzv-endpoint" in error_of(refusal)[1]
