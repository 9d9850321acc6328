"""TorchServe's security history: each row that no other file tests by name.

Other files cover redirects, host prefixes and rebinding (`tests/runtime/sources`), path traversal
and zip bombs in archives (`tests/archiver/test_unsafe.py`), tokens (`test_tokens.py`), the
disabled model API (`test_errors.py`), bodies and headers that are too large or too slow
(`test_connection_limits.py`), line breaks in response headers
(`tests/runtime/worker/handler_api/test_context.py`), variables that may not widen the allow list
(`tests/runtime/settings/test_torchserve.py`), TLS (`tests/runtime/targets`), and the same over
gRPC (`tests/runtime/features/grpc/test_security_history.py`).
"""

from __future__ import annotations

import json
import logging
import pickle
import zipfile
from pathlib import Path

import pytest

from tests.support.models import make_model
from tsx_runtime.settings.addresses import is_loopback_host, parse_address
from tsx_runtime.settings.schema import Settings

METADATA = "http://169.254.169.254/latest/meta-data/x.mar"
HANDLER = "def handle(data, context):\n    return ['x' for _ in data or ()]\n"


def test_1_cloud_metadata_services_are_refused_even_if_every_url_is_allowed(start_server, error_of):
    with start_server(allowed_urls=["http.*"]) as server:
        answer = server.management.post("/models", params={"url": METADATA})
    assert answer.status_code == 404
    assert "not a public one" in error_of(answer)[1]


@pytest.mark.parametrize(
    "url",
    ["../x.mar", "%2e%2e/x.mar", "a\\..\\x.mar", "/etc/x.mar", "file:///etc/x.mar", "....//x.mar"],
)
def test_2_no_spelling_of_a_path_leaves_the_store(empty, url):
    assert empty.management.post("/models", params={"url": url}).status_code == 404


@pytest.mark.parametrize("url", [METADATA, "../x.war", "%2e%2e/x.war", "/etc/x.war"])
def test_5_no_workflow_url_leaves_the_store(empty, url):
    answer = empty.management.post("/workflows", params={"url": url})
    assert 400 <= answer.status_code < 500
    assert not empty.management.get("/workflows").json()["workflows"]


def test_7_yaml_creates_no_objects(empty, store, tmp_path):
    marker_file = tmp_path / "sprung"
    make_model(
        store / "trap.mar",
        HANDLER,
        config=f"!!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{marker_file}']]\n",
    )
    assert empty.management.post("/models", params={"url": "trap.mar"}).status_code in (200, 400)
    assert not marker_file.exists()


def test_8_all_default_addresses_are_on_loopback():
    settings = Settings()
    for address in (
        settings.inference_address,
        settings.management_address,
        settings.metrics_address,
    ):
        assert is_loopback_host(parse_address(address).host)
    assert (settings.grpc_inference_address, settings.grpc_management_address) == (
        "127.0.0.1",
        "127.0.0.1",
    )


def test_12_a_path_or_referer_with_token_reveals_no_token(empty):
    answer = empty.management.get(
        "/models/token", headers={"Referer": "http://127.0.0.1/token?type=management"}
    )
    assert (answer.status_code, answer.json()["message"]) == (404, "Model not found: token")


@pytest.mark.parametrize("name", ["../../x", "a/b", "a b", "$(id)", ";id", "-x", "a\nb", "", "."])
@pytest.mark.parametrize("field", ["modelName", "modelVersion"])
def test_13_a_manifest_cannot_name_a_path_or_command(empty, store, field, name):
    part = "name" if field == "modelName" else "version"
    make_model(store / "named.mar", HANDLER, **{"name": "named", part: name or " "})
    answer = empty.management.post("/models", params={"url": "named.mar", "initial_workers": 0})
    assert answer.status_code == 400, answer.text


def test_18_weights_that_run_code_on_unpickling_are_refused(empty, store, tmp_path, error_of):
    marker_file = tmp_path / "sprung"

    class Trap:
        def __reduce__(self):
            return (Path.touch, (marker_file,))

    model = {
        "modelName": "pickled",
        "modelVersion": "1.0",
        "handler": "base_handler",
        "modelFile": "model.py",
        "serializedFile": "w.pth",
    }
    with zipfile.ZipFile(store / "pickled.mar", "w") as archive:
        archive.writestr("w.pth", pickle.dumps(Trap()))
        archive.writestr(
            "model.py",
            "import torch\n\nclass Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(1, 1)\n",
        )
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"runtime": "python", "model": model}))
    answer = empty.management.post("/models", params={"url": "pickled.mar", "initial_workers": 1})
    assert answer.status_code == 500
    assert error_of(answer)[0] == "InternalServerException"
    assert not marker_file.exists()


def test_19_unregistering_removes_only_downloaded_files(empty, store):
    make_model(store / "kept.mar", HANDLER)
    assert empty.management.post("/models", params={"url": "kept.mar"}).status_code == 200
    assert empty.management.delete("/models/kept").status_code == 200
    assert (store / "kept.mar").exists()


@pytest.mark.parametrize("parameter", ["url", "model_name"])
def test_20_no_name_adds_a_log_line(empty, store, caplog, parameter):
    make_model(store / "logged.mar", HANDLER)
    forged = "x\n2026-01-01 ERROR forged"
    with caplog.at_level(logging.INFO):
        answer = empty.management.post("/models", params={"url": "logged.mar", parameter: forged})
    assert answer.status_code in (400, 404)
    assert not [
        record for record in caplog.records if "\n2026-01-01 ERROR forged" in record.getMessage()
    ]
