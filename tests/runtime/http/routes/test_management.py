"""The management API: a real server, real archives, real workers."""

from __future__ import annotations

import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from pydantic.alias_generators import to_camel

from tests.kit.management import describe, post_model, put_model
from tsx_runtime.core.workers.worker import Worker


def status_of(response):
    """Return the text of a success, which has TorchServe's form."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert response.text == json.dumps(body, indent=2) + "\n"
    assert list(body) == ["status"]
    return body["status"]


def test_options_describes_the_management_calls_of_a_model(server):
    document = server.management.options("/models/talker").json()
    paths = document["paths"]
    default = "/models/talker/{version}/set-default"
    assert {"/models/talker", "/models/talker/{version}", default, "/models/talker/traffic"} <= set(
        paths
    )
    assert paths["/models/talker"].keys() == {"get", "put", "delete"}
    parameters = {parameter["name"] for parameter in paths["/models/talker"]["put"]["parameters"]}
    names = "min_worker max_worker synchronous number_gpu timeout model_version batch_size"
    assert set(names.split()) <= parameters
    assert [parameter["name"] for parameter in paths[default]["put"]["parameters"]] == ["version"]
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert references == document["components"]["schemas"].keys()
    assert server.management.options("/models/nobody").status_code == 404


@pytest.mark.parametrize(
    ("parameters", "status", "text"),
    [
        (
            {"initial_workers": 0},
            200,
            'Model "talker" Version: 1.0 registered with 0 initial workers. '
            "Use scale workers API to add workers for the model.",
        ),
        (
            {"initial_workers": "1"},
            200,
            'Model "talker" Version: 1.0 registered with 1 initial workers',
        ),
        ({"initial_workers": 1, "synchronous": "False"}, 202, "Processing worker updates..."),
    ],
)
def test_a_registration_has_torchserves_answer(empty, parameters, status, text):
    answer = post_model(empty, **parameters)
    assert (answer.status_code, status_of(answer)) == (status, text)
    assert answer.headers["pragma"] == "no-cache"
    if parameters["initial_workers"]:
        assert empty.inference.post("/predictions/talker").status_code == 200


def test_a_json_body_accepts_the_same_parameters(empty):
    options = {"url": "talker.mar", "model_name": "mine", **LIMITS}
    answer = empty.management.post("/models", json=options, params={"batch_size": 99})
    assert answer.status_code == 200
    assert described_limits(empty, "mine") == LIMITS | {"workers": 0}


def test_the_archives_configuration_applies_by_default(empty):
    post_model(empty, "other.mar", initial_workers=0, device_type="cpu")
    description = describe(empty, "other")
    names = ("batchSize", "maxBatchDelay", "responseTimeout", "deviceType")
    assert [description[name] for name in names] == [4, 50, 9, "cpu"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", "many"),
        ("batch_size", "-1"),
        ("initial_workers", "-1"),
        ("initial_workers", "1.5"),
        ("synchronous", "maybe"),
    ],
)
def test_the_error_for_an_invalid_parameter_has_its_name_and_value(empty, name, value, error_of):
    kind, message = error_of(post_model(empty, **{name: value}))
    assert kind == "BadRequestException"
    assert message.startswith(f"Parameter {name} is {value!r}: ")


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"{}", 400, "Parameter url is required."),
        (b"{", 400, "is not JSON"),
        (b"[1]", 400, "must be a JSON object"),
        (b'{"url": 1}', 400, "Parameter url is 1"),
        (b"[" * 90_000, 400, "is not JSON"),
        (b'{"url": [1%b]}' % (b",1" * 9_000), 400, "is [1, 1, 1, 1, 1, 1, ...]: "),
        (b" " * 100_001, 413, "max_request_size"),
        # Lone surrogates: from JSON, and from an undecodable byte in a file name.
        (b'{"url": "\\ud800.mar"}', 404, "Model not found"),
        (b'{"url": "\\udc80.mar"}', 404, "Model not found"),
    ],
)
def test_an_invalid_json_body_is_refused(empty, body, status, text, error_of):
    answer = empty.management.post(
        "/models", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == status
    assert text in error_of(answer)[1]


def test_a_remote_address_is_refused(empty, error_of):
    url = "http://169.254.169.254/talker.mar"
    kind, message = error_of(post_model(empty, url))
    assert kind == "ModelNotFoundException"
    assert message.startswith(f"Given URL {url} does not match any allowed URL(s)")


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("nobody.mar", 404),
        ("x" * 300 + ".mar", 404),
        ("junk.mar/x.mar", 404),
        ("\udcff.mar".encode("utf-8", "surrogateescape"), 404),
        ("junk.mar", 400),
    ],
)
def test_a_file_that_is_not_an_archive_in_the_store_is_refused(empty, name, status, error_of):
    answer = post_model(empty, name)
    assert answer.status_code == status
    if isinstance(name, str):
        assert name in error_of(answer)[1]


@pytest.mark.parametrize("name", ["../../x", "a b", "a/b", "", "-x"])
def test_an_invalid_model_name_is_refused(empty, name):
    answer = post_model(empty, model_name=name, initial_workers=0)
    assert (answer.status_code == 400) == bool(name)


def test_worker_counts_of_the_archive_override_the_registration(empty):
    """Do as TorchServe does; only a replacement starts the workers that its client requests."""
    for version in ("1.0", "2.0"):
        empty.write_mar(
            f"decided-{version}.mar",
            handler=NO_MEMORY.replace("raise {error}", "pass"),
            config="minWorkers: 1\nmaxWorkers: 2\n",
            name="decided",
            version=version,
        )
    answer = post_model(empty, "decided-1.0.mar", initial_workers=0)
    assert status_of(answer) == 'Model "decided" Version: 1.0 registered with 1 initial workers'
    model = describe(empty, "decided")
    assert (model["minWorkers"], model["maxWorkers"], len(model["workers"])) == (1, 2, 1)
    post_model(empty, "decided-2.0.mar", initial_workers=0, replace="true")
    model = describe(empty, "decided")
    assert (model["modelVersion"], model["minWorkers"]) == ("2.0", 0)


def test_empty_parameters_count_as_not_given(empty):
    names = (
        "model_name runtime handler batch_size max_batch_delay initial_workers synchronous "
        "response_timeout startup_timeout"
    )
    answer = post_model(empty, **dict.fromkeys(names.split(), ""))
    assert status_of(answer).startswith('Model "talker" Version: 1.0 registered with')
    assert empty.management.get("/models?limit=&next_page_token=").json()["models"] == [
        {"modelName": "talker", "modelUrl": "talker.mar"}
    ]
    assert empty.management.get("/models/talker?customized").status_code == 200
    answer = empty.management.put(
        "/models/talker?min_worker=&max_worker=&model_version=&synchronous=true&number_gpu="
    )
    assert (answer.status_code, status_of(answer)) == (200, "Workers scaled to 1 for model: talker")


def test_a_batch_size_of_zero_is_one(empty):
    post_model(empty, initial_workers=1, batch_size=0)
    # TorchServe also reports 0 here.
    assert describe(empty)["batchSize"] == 0
    assert [empty.inference.post("/predictions/talker").status_code for _ in range(2)] == [200, 200]


def test_with_a_response_timeout_of_0_every_request_fails(empty, error_of):
    post_model(empty, initial_workers=1, response_timeout=0)
    answer = empty.inference.post("/predictions/talker")
    assert answer.status_code == 500
    assert error_of(answer)[1].startswith("Worker died. ")
    assert describe(empty)["workerRestarts"] == 0
    assert put_model(empty, response_timeout=60).status_code == 200
    assert empty.inference.post("/predictions/talker").status_code == 200


def test_with_a_startup_timeout_of_0_no_model_is_registered(empty, error_of):
    answer = post_model(empty, initial_workers=1, startup_timeout=0)
    assert answer.status_code == 500
    message = error_of(answer)[1]
    assert message.startswith("Failed to start workers for model talker version: 1.0. ")
    assert "was not loaded within 0 s" in message
    assert empty.management.get("/models/talker").status_code == 404


def test_with_an_unregister_timeout_of_0_removal_continues_in_the_background(
    start_server, error_of
):
    with start_server(unregister_model_timeout=0) as server:
        server.register("talker.mar", initial_workers=1)
        answer = server.management.delete("/models/talker")
        assert (answer.status_code, error_of(answer)) == (
            408,
            ("RequestTimeoutException", "Timed out while cleaning resources: talker"),
        )
        assert describe(server)["minWorkers"] == 0
        assert server.management.delete("/models/talker").status_code == 200


NO_MEMORY = """
class Model:
    def initialize(self, context):
        raise {error}

    def handle(self, data, context):
        return data
"""


@pytest.mark.parametrize(
    "error",
    ["MemoryError('all gone')", 'RuntimeError("DefaultCPUAllocator: can\'t allocate memory")'],
)
def test_a_model_without_enough_memory_is_507(empty, error_of, error):
    empty.write_mar("large.mar", handler=NO_MEMORY.format(error=error))
    answer = post_model(empty, "large.mar", initial_workers=1)
    kind, message = error_of(answer)
    assert (answer.status_code, kind) == (507, "InternalServerException")
    assert message.startswith("Failed to start workers for model large version: 1.0. ")
    post_model(empty, "large.mar", initial_workers=0)
    answer = put_model(empty, "large", min_worker=1, synchronous="true")
    assert answer.status_code == 507
    assert error_of(answer)[1].startswith("Failed to start workers for model large version: null. ")


def test_a_failed_model_is_described_with_its_traceback(empty, error_of, until):
    error_line = "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    answer = post_model(empty, "broken.mar", initial_workers=1)
    kind, message = error_of(answer)
    assert (answer.status_code, kind) == (500, "InternalServerException")
    assert message.startswith("Failed to start workers for model broken version: 1.0. ")
    assert error_line in message
    assert "handler.py" in message
    assert empty.management.get("/models/broken").status_code == 404
    post_model(empty, "broken.mar", initial_workers=0)
    assert "lastError" not in describe(empty, "broken")
    answer = put_model(empty, "broken", min_worker=1, synchronous="true")
    assert answer.status_code == 500
    assert error_of(answer)[1].startswith("Failed to start workers for model broken version: null")
    assert error_line in describe(empty, "broken")["lastError"]
    until(lambda: describe(empty, "broken")["workerRestarts"] > 0)


def test_models_are_listed_by_name_and_page(empty, error_of):
    def page(**parameters):
        return empty.management.get("/models", params=parameters)

    for name in ("c", "a", "b"):
        empty.register("talker.mar", model_name=name, initial_workers=0)
    a, b, c = ({"modelName": name, "modelUrl": "talker.mar"} for name in "abc")
    models = page()
    assert models.json() == {"models": [a, b, c]}
    assert models.text == json.dumps(models.json(), indent=2) + "\n"
    assert list(page(limit=2).json().items()) == [("nextPageToken", "2"), ("models", [a, b])]
    assert page(limit=2, next_page_token=2).json() == {"models": [c]}
    for invalid_page in ({"limit": -1}, {"limit": 0}, {"limit": 101}, {"next_page_token": -5}):
        assert len(page(**invalid_page).json()["models"]) == 3
    assert page(next_page_token=100).json() == {"models": []}
    assert error_of(page(limit="few"))[1].startswith("Parameter limit is 'few': ")


def test_a_model_description_has_torchserves_format(server):
    text = server.management.get("/models/talker").text
    assert text == json.dumps(json.loads(text), indent=2) + "\n"
    model = describe(server)
    fields = (
        "modelName modelVersion modelUrl runtime minWorkers maxWorkers batchSize maxBatchDelay "
        "responseTimeout startupTimeout maxRetryTimeoutInSec clientTimeoutInMills parallelType "
        "parallelLevel deviceType continuousBatching useJobTicket useVenv stateful "
        "sequenceMaxIdleMSec sequenceTimeoutMSec maxNumSequence maxSequenceJobQueueSize "
        "loadedAtStartup workers jobQueueStatus maxBatchBytes jobQueueSize maxQueueBytes "
        "overloadStatus workerRestarts"
    )
    assert list(model) == fields.split()
    values = list(model.values())
    assert values[:3] == ["talker", "1.0", "talker.mar"]
    assert values[4:8] == [1, 1, 1, 100]
    assert model["loadedAtStartup"] is False
    assert model["jobQueueStatus"] == {"remainingCapacity": 100, "pendingRequests": 0}
    (worker,) = model["workers"]
    fields = "id startTime status memoryUsage pid gpu gpuUsage restarts"
    assert list(worker) == fields.split()
    assert worker | {"id": "9000", "status": "READY", "gpu": False, "gpuUsage": "N/A"} == worker
    assert re.fullmatch("[0-9-]{10}T.*Z", worker["startTime"])
    assert worker["memoryUsage"] > 1 << 20


def test_one_version_or_all_are_described(server):
    version = describe(server, "talker/2.0")
    assert (version["modelVersion"], version["workers"]) == ("2.0", [])
    versions = server.management.get("/models/talker/all").json()
    assert [version["modelVersion"] for version in versions] == ["1.0", "2.0"]


def test_a_description_can_include_the_handlers_description(server):
    assert describe(server, customized="TRUE")["customizedMetadata"] == {"labels": 10}
    first, second = server.management.get("/models/talker/all?customized=true").json()
    assert first["customizedMetadata"] == {"labels": 10}
    # Version 2.0 has no worker that could describe it.
    assert "customizedMetadata" not in second


def test_workers_are_scaled_up_and_down_synchronously(empty):
    empty.register("talker.mar", initial_workers=0)
    answer = put_model(empty, min_worker=2, synchronous="true")
    assert (answer.status_code, status_of(answer)) == (200, "Workers scaled to 2 for model: talker")
    assert [worker["status"] for worker in describe(empty)["workers"]] == ["READY", "READY"]
    answer = put_model(empty, "talker/1.0", min_worker=0, synchronous="true")
    text = "Workers scaled to 0 for model: talker, version: 1.0"
    assert (answer.status_code, status_of(answer)) == (200, text)
    assert describe(empty)["workers"] == []


def test_scaling_is_asynchronous_by_default(empty, until):
    empty.register("talker.mar", initial_workers=0)
    options = {"min_worker": 1, "max_worker": 1, "number_gpu": 0, "timeout": 1}
    for path, version in (("talker", {"model_version": "1.0"}), ("talker/1.0", {})):
        answer = put_model(empty, path, **options, **version)
        assert (answer.status_code, status_of(answer)) == (202, "Processing worker updates...")
    until(lambda: [worker["status"] for worker in describe(empty)["workers"]] == ["READY"])
    assert put_model(empty, model_version="7").status_code == 404


def test_the_default_version_can_be_set(empty):
    empty.register("talker.mar", initial_workers=0)
    empty.register("talker2.mar", initial_workers=0)
    answer = empty.management.put("/models/talker/2.0/set-default")
    assert answer.status_code == 200
    assert status_of(answer) == 'Default version successfully updated for model "talker" to "2.0"'
    assert describe(empty)["modelVersion"] == "2.0"


def test_a_model_is_unregistered(empty):
    empty.register("talker.mar", initial_workers=1)
    answer = empty.management.delete(
        "/models/talker", params={"synchronous": "true", "timeout": "-1"}
    )
    assert (answer.status_code, status_of(answer)) == (200, 'Model "talker" unregistered')
    assert empty.management.get("/models/talker").status_code == 404
    assert empty.inference.post("/predictions/talker").status_code == 404


def test_the_default_version_is_not_removed_before_the_others(empty, error_of):
    empty.register("talker.mar", initial_workers=0)
    empty.register("talker2.mar", initial_workers=0)
    for path in ("/models/talker", "/models/talker/1.0"):
        answer = empty.management.delete(path)
        kind, message = error_of(answer)
        assert (answer.status_code, kind) == (403, "InvalidModelVersionException")
        assert message.startswith("Cannot remove default version for model talker. ")
        assert "`tsx models set-default talker 2.0`" in message
    answer = empty.management.delete("/models/talker/2.0")
    assert (answer.status_code, status_of(answer)) == (200, 'Model "talker" unregistered')


@pytest.mark.parametrize(
    ("verb", "path"),
    [
        ("DELETE", "/models"),
        ("POST", "/models/talker"),
        ("PATCH", "/models/talker/1.0"),
        ("GET", "/models/a/1/set-default"),
    ],
)
def test_an_unsupported_method_is_refused_with_405(server, verb, path, error_of):
    answer = server.management.request(verb, path)
    assert answer.status_code == 405
    assert error_of(answer)[0] == "MethodNotAllowedException"
    assert answer.headers["allow"]


def test_a_trailing_slash_is_ignored(server):
    assert server.management.get("/models/").json() == server.management.get("/models").json()


def test_a_handlers_description_may_be_text_or_an_error(empty, error_of):
    for name, handler in (
        ("wordy", "def handle(data, context):\n    return data and ['a plain text']\n"),
        ("silent", "def handle(data, context):\n    if data: raise ValueError('no idea')\n"),
    ):
        empty.write_mar(f"{name}.mar", name=name, handler=handler)
        empty.register(f"{name}.mar", initial_workers=1)
    assert describe(empty, "wordy", customized="true")["customizedMetadata"] == "a plain text"
    answer = empty.management.get("/models/silent?customized=true")
    assert answer.status_code == 500
    assert error_of(answer)[1].startswith('The handler of model "silent" could not describe it: ')


def test_a_client_that_leaves_during_a_request_has_no_effect(server):
    url = server.management.base_url
    with socket.create_connection((url.host, url.port)) as sock:
        sock.sendall(
            b"POST /models HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 10\r\n\r\n{"
        )
    assert server.management.get("/models").status_code == 200


LIMITS = {
    "batch_size": 7,
    "max_batch_bytes": 1000,
    "max_batch_delay": 3,
    "job_queue_size": 5,
    "max_queue_bytes": 9_000_000_000,
    "response_timeout": 11,
    "startup_timeout": 12,
    "client_timeout": 0,
    "overload_status": 429,
}


def described_limits(server, model="talker"):
    """Return the limits of a model by their request names, and its number of workers."""
    description = describe(server, model)
    names = {name: to_camel(name) for name in LIMITS} | {"client_timeout": "clientTimeoutInMills"}
    return {name: description[camel] for name, camel in names.items()} | {
        "workers": len(description["workers"])
    }


@pytest.mark.parametrize("path", ["talker", "talker/1.0"])
def test_changing_one_limit_keeps_the_others(empty, path):
    empty.register("talker.mar", initial_workers=0, client_timeout=1)
    limits = described_limits(empty)
    for name, value in LIMITS.items():
        answer = put_model(empty, path, **{name: value})
        assert (answer.status_code, status_of(answer)) == (
            200,
            f'Changed for model "talker" Version: 1.0: {name} = {value}',
        )
        limits[name] = value
        assert described_limits(empty) == limits


def test_a_limit_can_be_changed_by_its_archive_name(empty):
    post_model(empty, initial_workers=0, batchSize=5)
    assert describe(empty)["batchSize"] == 5
    answer = put_model(empty, batchSize=6, clientTimeoutInMills=70)
    assert answer.status_code == 200
    assert status_of(answer).endswith("batch_size = 6, client_timeout = 70")


def test_limits_and_workers_change_together(empty):
    empty.register("talker.mar", initial_workers=0)
    answer = put_model(empty, min_worker=1, batch_size=4, synchronous="true")
    assert (answer.status_code, status_of(answer)) == (200, "Workers scaled to 1 for model: talker")
    assert describe(empty)["batchSize"] == 4
    assert empty.ask(b"a", x_do="bytes").text == "a"


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"batch_size": -1}, "Parameter batch_size is '-1'"),
        ({"job_queue_size": "many"}, "Parameter job_queue_size is 'many'"),
        ({"overload_status": 500}, "Parameter overload_status is '500'"),
        ({"batchsize": 4}, "batchsize is not known; did you mean 'batch_size'?"),
        ({"min_worker": 2, "max_worker": 1, "batch_size": 4}, "max_worker cannot be less than"),
        (
            {"min_worker": 10**20, "batch_size": 4},
            f"{10**20} workers are too many: the limit is 1024",
        ),
        ({"min_worker": 1000, "batch_size": 4}, "or max_workers = 1000 in [models.talker]"),
    ],
)
def test_an_invalid_limit_is_refused_and_changes_nothing(empty, parameters, expected, error_of):
    empty.register("talker.mar", initial_workers=0)
    limits = described_limits(empty)
    answer = put_model(empty, **parameters)
    assert answer.status_code == 400
    assert expected in error_of(answer)[1]
    assert described_limits(empty) == limits


def test_an_unknown_parameter_is_ignored_as_torchserve_does(empty):
    empty.register("talker.mar", initial_workers=0)
    assert put_model(empty, min_worker=0, zone="b").status_code == 202


def test_a_shorter_response_timeout_applies_to_running_requests(empty, tmp_path, until):
    empty.register("talker.mar", initial_workers=1)
    version = empty.registry.find("talker")
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(empty.ask, x_do="wait", x_file=str(tmp_path / "never"))
        until(lambda: version.stats.requests == 1)
        put_model(empty, response_timeout=1)
        answer = request.result(60)
    assert answer.status_code == 500
    assert "did not answer within 1 s (responseTimeout)" in answer.json()["message"]


def test_worker_memory_is_not_measured_on_the_event_loop(server, monkeypatch):
    threads, measure = [], Worker.memory
    monkeypatch.setattr(
        Worker,
        "memory",
        lambda worker: threads.append(threading.current_thread().name) or measure(worker),
    )
    assert describe(server)["workers"][0]["memoryUsage"] > 1 << 20
    assert threads
    assert "server" not in threads
