"""The management API: a real server, real archives, real workers."""

from __future__ import annotations

import json
import re
import socket
import threading
from urllib.parse import urlsplit

import pytest
from pydantic.alias_generators import to_camel

from tsx_runtime.core.workers.worker import Worker


def status_of(response):
    """The text of a success, in TorchServe's form."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert response.text == json.dumps(body, indent=2) + "\n"
    assert list(body) == ["status"]
    return body["status"]


def test_options_describe_all_that_manages_one_model(server):
    document = server.management.options("/models/talker").json()
    paths = document["paths"]
    assert {
        "/models/talker",
        "/models/talker/{version}",
        "/models/talker/{version}/set-default",
        "/models/talker/traffic",
    } <= paths.keys()
    assert paths["/models/talker"].keys() == {"get", "put", "delete"}
    named = {one["name"] for one in paths["/models/talker"]["put"]["parameters"]}
    assert {
        "min_worker",
        "max_worker",
        "synchronous",
        "number_gpu",
        "timeout",
        "model_version",
        "batch_size",
    } <= named
    assert [
        one["name"] for one in paths["/models/talker/{version}/set-default"]["put"]["parameters"]
    ] == ["version"]
    referred = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert referred == document["components"]["schemas"].keys()
    assert server.management.options("/models/nobody").status_code == 404


# Registering


def test_a_model_without_workers_says_how_to_add_some(empty):
    answer = empty.management.post("/models", params={"url": "talker.mar", "initial_workers": 0})
    assert answer.status_code == 200
    text = 'Model "talker" Version: 1.0 registered with 0 initial workers. Use scale workers API to add workers for the model.'
    assert status_of(answer) == text
    assert answer.headers["pragma"] == "no-cache"


def test_a_model_is_ready_when_its_registration_is_answered(empty):
    answer = empty.management.post("/models", params={"url": "talker.mar", "initial_workers": "1"})
    assert (answer.status_code, status_of(answer)) == (
        200,
        'Model "talker" Version: 1.0 registered with 1 initial workers',
    )
    assert empty.inference.post("/predictions/talker").status_code == 200


def test_a_registration_that_is_not_awaited_is_accepted(empty):
    answer = empty.management.post(
        "/models", params={"url": "talker.mar", "initial_workers": 1, "synchronous": "False"}
    )
    assert (answer.status_code, status_of(answer)) == (202, "Processing worker updates...")
    assert empty.inference.post("/predictions/talker").status_code == 200  # it waits for the worker


def test_a_json_body_takes_the_same_parameters(empty):
    order = {
        "url": "talker.mar",
        "model_name": "mine",
        "batch_size": 3,
        "max_batch_delay": 7,
        "response_timeout": 11,
        "startup_timeout": 12,
    }
    answer = empty.management.post(
        "/models", json=order | {"initial_workers": 0}, params={"batch_size": 99}
    )
    assert answer.status_code == 200
    (described,) = empty.management.get("/models/mine").json()
    assert [
        described[key]
        for key in ("batchSize", "maxBatchDelay", "responseTimeout", "startupTimeout")
    ] == [3, 7, 11, 12]


def test_the_archives_own_configuration_holds_where_nothing_is_asked(empty):
    empty.management.post("/models", params={"url": "other.mar", "initial_workers": 0})
    (described,) = empty.management.get("/models/other").json()
    assert [described[key] for key in ("batchSize", "maxBatchDelay", "responseTimeout")] == [
        4,
        50,
        9,
    ]


def test_the_url_is_required(empty, error_of):
    for answer in (
        empty.management.post("/models"),
        empty.management.post("/models", params={"url": ""}),
        empty.management.post("/models", json={}),
    ):
        assert answer.status_code == 400
        assert error_of(answer) == ("BadRequestException", "Parameter url is required.")


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
def test_a_parameter_that_cannot_be_used_is_named_with_its_value(empty, name, value, error_of):
    answer = empty.management.post("/models", params={"url": "talker.mar", name: value})
    assert answer.status_code == 400
    kind, message = error_of(answer)
    assert kind == "BadRequestException"
    assert message.startswith(f"Parameter {name} is {value!r}: ")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"{", "is not JSON"),
        (b"[1]", "must be a JSON object"),
        (b'{"url": 1}', "Parameter url is 1"),
        (b"[" * 90_000, "is not JSON"),
        (b'{"url": [1%b]}' % (b",1" * 9_000), "is [1, 1, 1, 1, 1, 1, ...]: "),
    ],
)
def test_a_json_body_that_cannot_be_used_is_refused(empty, body, text, error_of):
    answer = empty.management.post(
        "/models", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert text in error_of(answer)[1]


def test_half_a_surrogate_pair_is_no_name_of_a_file_and_no_error_of_the_server(empty, error_of):
    for half in (
        b"\\ud800",
        b"\\udc80",
    ):  # the second one is what Python makes of a byte in a file's name
        answer = empty.management.post(
            "/models",
            content=b'{"url": "%b.mar"}' % half,
            headers={"content-type": "application/json"},
        )
        assert (answer.status_code, error_of(answer)[0]) == (404, "ModelNotFoundException")


def test_a_json_body_over_the_limit_is_refused(empty):
    answer = empty.management.post(
        "/models", content=b" " * 100_001, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413


@pytest.mark.parametrize(
    "url", ["../talker.mar", "a/../../talker.mar", "..%2ftalker.mar", "..\\talker.mar"]
)
def test_a_path_out_of_the_store_is_refused(empty, url, error_of):
    for answer in (
        empty.management.post("/models", params={"url": url}),
        empty.management.post("/models", json={"url": url}),
    ):
        assert answer.status_code == 404
        assert error_of(answer) == (
            "ModelNotFoundException",
            f"Relative path is not allowed in url: {url}",
        )


@pytest.mark.parametrize(
    "query",
    [
        "url=%2e%2e/talker.mar",
        "url=%2E%2E%2Ftalker.mar",
        "url=%252e%252e%252ftalker.mar",
        "url=..%5ctalker.mar",
    ],
)
def test_an_encoded_path_out_of_the_store_is_refused(empty, query):
    assert empty.management.post(f"/models?{query}").status_code == 404


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/talker.mar",
        "https://example.org/talker.mar",
        "file:///etc/passwd",
        "s3://bucket/talker.mar",
    ],
)
def test_a_remote_address_is_refused(empty, url, error_of):
    answer = empty.management.post("/models", params={"url": url})
    assert answer.status_code == 404
    kind, message = error_of(answer)
    assert kind == "ModelNotFoundException"
    assert message.startswith(f"Given URL {url} does not match any allowed URL(s)")
    assert "store" in message


@pytest.mark.parametrize(
    "name",
    [
        "nobody.mar",
        "x" * 300 + ".mar",
        "junk.mar/x.mar",
        "\udcff.mar".encode("utf-8", "surrogateescape"),
    ],
)
def test_a_file_that_is_not_there_is_not_found(empty, name, error_of):
    answer = empty.management.post("/models", params={"url": name})
    assert answer.status_code == 404
    if isinstance(name, str):
        assert error_of(answer)[1].startswith(f"Model not found at: {name}")


def test_a_file_that_is_no_archive_is_refused(empty, error_of):
    answer = empty.management.post("/models", params={"url": "junk.mar"})
    assert answer.status_code == 400
    assert "junk.mar" in error_of(answer)[1]


@pytest.mark.parametrize("name", ["../../x", "a b", "a/b", "", "-x"])
def test_a_name_that_is_no_name_is_refused(empty, name):
    answer = empty.management.post(
        "/models", params={"url": "talker.mar", "model_name": name, "initial_workers": 0}
    )
    assert (answer.status_code == 400) == bool(name)


def test_an_archive_decides_on_its_number_of_workers_before_the_registration(empty):
    """As TorchServe does; a replacement keeps to what its client asks for."""
    config = "minWorkers: 1\nmaxWorkers: 2\n"
    for version in ("1.0", "2.0"):
        empty.write_mar(
            f"decided-{version}.mar",
            handler=NO_MEMORY.replace("raise {error}", "pass"),
            config=config,
            name="decided",
            version=version,
        )
    answer = empty.management.post(
        "/models", params={"url": "decided-1.0.mar", "initial_workers": 0}
    )
    assert status_of(answer) == 'Model "decided" Version: 1.0 registered with 1 initial workers'
    (described,) = empty.management.get("/models/decided").json()
    assert (described["minWorkers"], described["maxWorkers"], len(described["workers"])) == (
        1,
        2,
        1,
    )
    empty.management.post(
        "/models", params={"url": "decided-2.0.mar", "initial_workers": 0, "replace": "true"}
    )
    (described,) = empty.management.get("/models/decided").json()
    assert (described["modelVersion"], described["minWorkers"]) == ("2.0", 0)


def test_empty_parameters_count_as_not_given(empty, error_of):
    names = (
        "model_name",
        "runtime",
        "handler",
        "batch_size",
        "max_batch_delay",
        "initial_workers",
        "synchronous",
        "response_timeout",
    )
    query = "&".join(f"{name}=" for name in names)
    answer = empty.management.post(f"/models?url=talker.mar&{query}&startup_timeout")
    assert status_of(answer).startswith('Model "talker" Version: 1.0 registered with')
    assert empty.management.get("/models?limit=&next_page_token=").json()["models"] == [
        {"modelName": "talker", "modelUrl": "talker.mar"}
    ]
    assert empty.management.get("/models/talker?customized=").status_code == 200
    answer = empty.management.put(
        "/models/talker?min_worker=&max_worker=&model_version=&synchronous=true&number_gpu="
    )
    assert (answer.status_code, status_of(answer)) == (200, "Workers scaled to 1 for model: talker")
    assert error_of(empty.management.post("/models?url="))[1] == "Parameter url is required."


def test_a_batch_size_of_zero_is_one(empty):
    empty.management.post(
        "/models", params={"url": "talker.mar", "initial_workers": 1, "batch_size": 0}
    )
    assert (
        empty.management.get("/models/talker").json()[0]["batchSize"] == 0
    )  # as TorchServe describes it
    assert [empty.inference.post("/predictions/talker").status_code for _ in range(2)] == [200, 200]


def test_with_no_time_to_answer_every_request_fails_until_there_is_some(empty, error_of):
    empty.management.post(
        "/models", params={"url": "talker.mar", "initial_workers": 1, "response_timeout": 0}
    )
    answer = empty.inference.post("/predictions/talker")
    assert answer.status_code == 500
    assert error_of(answer)[1].startswith("Worker died. ")
    assert empty.management.get("/models/talker").json()[0]["workerRestarts"] == 0
    assert (
        empty.management.put("/models/talker", params={"response_timeout": 60}).status_code == 200
    )
    assert empty.inference.post("/predictions/talker").status_code == 200


def test_with_no_time_to_load_a_model_is_not_registered(empty, error_of):
    answer = empty.management.post(
        "/models", params={"url": "talker.mar", "initial_workers": 1, "startup_timeout": 0}
    )
    assert answer.status_code == 500
    assert error_of(answer)[1].startswith(
        "Failed to start workers for model talker version: 1.0. the model was not loaded within 0 s"
    )
    assert empty.management.get("/models/talker").status_code == 404


def test_with_no_time_to_unregister_a_model_is_gone_once_its_workers_are(start_server, error_of):
    with start_server(unregister_model_timeout=0) as server:
        server.register("talker.mar", initial_workers=1)
        answer = server.management.delete("/models/talker")
        assert (answer.status_code, error_of(answer)) == (
            408,
            ("RequestTimeoutException", "Timed out while cleaning resources: talker"),
        )
        assert server.management.get("/models/talker").json()[0]["minWorkers"] == 0
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
def test_a_model_for_which_there_is_no_memory_is_507(empty, error_of, error):
    empty.write_mar("large.mar", handler=NO_MEMORY.format(error=error))
    answer = empty.management.post("/models", params={"url": "large.mar", "initial_workers": 1})
    assert answer.status_code == 507
    kind, message = error_of(answer)
    assert (kind, message.startswith("Failed to start workers for model large version: 1.0. ")) == (
        "InternalServerException",
        True,
    )
    empty.management.post("/models", params={"url": "large.mar", "initial_workers": 0})
    answer = empty.management.put("/models/large", params={"min_worker": 1, "synchronous": "true"})
    assert (answer.status_code, error_of(answer)[1].partition(". ")[0]) == (
        507,
        "Failed to start workers for model large version: null",
    )


def test_a_model_that_does_not_load_answers_with_its_traceback(empty, error_of):
    answer = empty.management.post("/models", params={"url": "broken.mar", "initial_workers": 1})
    assert answer.status_code == 500
    kind, message = error_of(answer)
    assert kind == "InternalServerException"
    assert message.startswith("Failed to start workers for model broken version: 1.0. ")
    assert "ModuleNotFoundError: No module named 'no_such_module_anywhere'" in message
    assert "handler.py" in message
    assert empty.management.get("/models/broken").status_code == 404


def test_a_model_that_does_not_load_is_described_with_its_traceback(empty, error_of, until):
    empty.management.post("/models", params={"url": "broken.mar", "initial_workers": 0})
    assert "lastError" not in empty.management.get("/models/broken").json()[0]
    answer = empty.management.put("/models/broken", params={"min_worker": 1, "synchronous": "true"})
    assert answer.status_code == 500
    assert error_of(answer)[1].startswith("Failed to start workers for model broken version: null")
    (described,) = empty.management.get("/models/broken").json()
    assert (
        "ModuleNotFoundError: No module named 'no_such_module_anywhere'" in described["lastError"]
    )
    until(lambda: empty.management.get("/models/broken").json()[0]["workerRestarts"] > 0)


# Listing and describing


def test_models_are_listed_by_name_and_page(empty):
    for name in ("c", "a", "b"):
        empty.register("talker.mar", model_name=name, initial_workers=0)
    answer = empty.management.get("/models")
    assert answer.json() == {
        "models": [{"modelName": name, "modelUrl": "talker.mar"} for name in "abc"]
    }
    assert answer.text == json.dumps(answer.json(), indent=2) + "\n"
    page = empty.management.get("/models", params={"limit": 2}).json()
    assert list(page) == ["nextPageToken", "models"]
    assert (page["nextPageToken"], [model["modelName"] for model in page["models"]]) == (
        "2",
        ["a", "b"],
    )
    last = empty.management.get("/models", params={"limit": 2, "next_page_token": 2}).json()
    assert last == {"models": [{"modelName": "c", "modelUrl": "talker.mar"}]}
    for odd in ({"limit": -1}, {"limit": 0}, {"limit": 101}, {"next_page_token": -5}):
        assert len(empty.management.get("/models", params=odd).json()["models"]) == 3
    assert empty.management.get("/models", params={"next_page_token": 100}).json() == {"models": []}


def test_a_page_that_is_no_number_is_refused(server, error_of):
    answer = server.management.get("/models", params={"limit": "few"})
    assert answer.status_code == 400
    assert error_of(answer)[1].startswith("Parameter limit is 'few': ")


def test_a_model_is_described_as_torchserve_does(server):
    answer = server.management.get("/models/talker")
    (described,) = answer.json()
    fields = (
        "modelName modelVersion modelUrl runtime minWorkers maxWorkers batchSize maxBatchDelay responseTimeout startupTimeout "
        "maxRetryTimeoutInSec clientTimeoutInMills parallelType parallelLevel deviceType continuousBatching useJobTicket useVenv stateful "
        "sequenceMaxIdleMSec "
        "sequenceTimeoutMSec maxNumSequence maxSequenceJobQueueSize loadedAtStartup workers jobQueueStatus "
        "maxBatchBytes jobQueueSize maxQueueBytes overloadStatus workerRestarts"
    )
    assert list(described) == fields.split()
    assert (described["modelName"], described["modelVersion"], described["modelUrl"]) == (
        "talker",
        "1.0",
        "talker.mar",
    )
    assert (
        described["minWorkers"],
        described["maxWorkers"],
        described["batchSize"],
        described["maxBatchDelay"],
    ) == (1, 1, 1, 100)
    assert described["loadedAtStartup"] is False
    assert described["jobQueueStatus"] == {"remainingCapacity": 100, "pendingRequests": 0}
    (worker,) = described["workers"]
    assert list(worker) == [
        "id",
        "startTime",
        "status",
        "memoryUsage",
        "pid",
        "gpu",
        "gpuUsage",
        "restarts",
    ]
    assert (worker["id"], worker["status"], worker["gpu"], worker["gpuUsage"]) == (
        "9000",
        "READY",
        False,
        "N/A",
    )
    assert worker["startTime"][10] == "T"
    assert worker["startTime"].endswith("Z")
    assert worker["memoryUsage"] > 1 << 20
    assert answer.text == json.dumps(answer.json(), indent=2) + "\n"


def test_one_version_or_all_are_described(server):
    (described,) = server.management.get("/models/talker/2.0").json()
    assert (described["modelVersion"], described["workers"]) == ("2.0", [])
    assert [one["modelVersion"] for one in server.management.get("/models/talker/all").json()] == [
        "1.0",
        "2.0",
    ]


def test_the_handler_is_asked_for_its_own_description(server):
    (described,) = server.management.get("/models/talker", params={"customized": "TRUE"}).json()
    assert described["customizedMetadata"] == {"labels": 10}


def test_of_all_versions_those_with_workers_are_asked_for_their_own_description(server):
    first, second = server.management.get(
        "/models/talker/all", params={"customized": "true"}
    ).json()
    assert (first["modelVersion"], first["customizedMetadata"]) == ("1.0", {"labels": 10})
    assert second["modelVersion"] == "2.0"
    assert "customizedMetadata" not in second


# Changing


def test_workers_are_scaled_up_and_down(empty):
    empty.register("talker.mar", initial_workers=0)
    answer = empty.management.put("/models/talker", params={"min_worker": 2, "synchronous": "true"})
    assert (answer.status_code, status_of(answer)) == (200, "Workers scaled to 2 for model: talker")
    (described,) = empty.management.get("/models/talker").json()
    assert [worker["status"] for worker in described["workers"]] == ["READY", "READY"]
    answer = empty.management.put(
        "/models/talker/1.0", params={"min_worker": 0, "synchronous": "true"}
    )
    assert (answer.status_code, status_of(answer)) == (
        200,
        "Workers scaled to 0 for model: talker, version: 1.0",
    )
    assert empty.management.get("/models/talker").json()[0]["workers"] == []


def test_scaling_is_not_awaited_unless_asked(empty, until):
    empty.register("talker.mar", initial_workers=0)
    for path, params in (("/models/talker", {"model_version": "1.0"}), ("/models/talker/1.0", {})):
        answer = empty.management.put(
            path, params={"min_worker": 1, "max_worker": 1, "number_gpu": 0, "timeout": 1} | params
        )
        assert (answer.status_code, status_of(answer)) == (202, "Processing worker updates...")
    until(
        lambda: (
            [one["status"] for one in empty.management.get("/models/talker").json()[0]["workers"]]
            == ["READY"]
        )
    )


def test_more_workers_than_any_machine_has_room_for_are_refused(server, error_of):
    before = server.management.get("/models/talker").json()[0]["minWorkers"]
    answer = server.management.put("/models/talker", params={"min_worker": 10**20})
    message = (
        f"{10**20} workers are too many: the limit is 1024 per version of a model. Request fewer."
    )
    assert (answer.status_code, error_of(answer)) == (400, ("BadRequestException", message))
    assert server.management.get("/models/talker").json()[0]["minWorkers"] == before


def test_scaling_a_version_that_is_not_there_fails_at_once(server):
    answer = server.management.put("/models/talker", params={"model_version": "7"})
    assert answer.status_code == 404


def test_the_default_version_can_be_set(empty, error_of):
    empty.register("talker.mar", initial_workers=0)
    empty.register("talker2.mar", initial_workers=0)
    answer = empty.management.put("/models/talker/2.0/set-default")
    assert answer.status_code == 200
    assert status_of(answer) == 'Default version successfully updated for model "talker" to "2.0"'
    assert empty.management.get("/models/talker").json()[0]["modelVersion"] == "2.0"
    answer = empty.management.put("/models/talker/3.3.3/set-default")
    assert error_of(answer) == (
        "ModelVersionNotFoundException",
        "Model version 3.3.3 does not exist for model talker",
    )


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
        assert answer.status_code == 403
        kind, message = error_of(answer)
        assert kind == "InvalidModelVersionException"
        assert message.startswith("Cannot remove default version for model talker. ")
        assert "`tsx models set-default talker 2.0`" in message
    answer = empty.management.delete("/models/talker/2.0")
    assert (answer.status_code, status_of(answer)) == (
        200,
        'Model "talker" unregistered',
    )


# Routes


@pytest.mark.parametrize(
    ("verb", "path"),
    [
        ("DELETE", "/models"),
        ("POST", "/models/talker"),
        ("PATCH", "/models/talker/1.0"),
        ("GET", "/models/a/1/set-default"),
    ],
)
def test_a_verb_that_a_route_does_not_take_is_named_so(server, verb, path, error_of):
    answer = server.management.request(verb, path)
    assert answer.status_code == 405
    assert error_of(answer) == (
        "MethodNotAllowedException",
        "Requested method is not allowed, please refer to API document.",
    )
    assert answer.headers["allow"]


@pytest.mark.parametrize(
    "path", ["/nothing", "/models/talker/1.0/what", "/predictions/talker", "/ping", "/metrics"]
)
def test_an_unknown_route_is_not_found(server, path, error_of):
    answer = server.management.get(path)
    assert answer.status_code in (404, 405)
    assert error_of(answer)[0] in ("ResourceNotFoundException", "MethodNotAllowedException")


def test_a_slash_at_the_end_changes_nothing(server):
    assert server.management.get("/models/").json() == server.management.get("/models").json()


def test_a_handler_may_describe_itself_in_words_or_fail(empty, error_of):
    empty.write_mar(
        "wordy.mar",
        name="wordy",
        handler="def handle(data, context):\n    return data and ['a plain text']\n",
    )
    empty.write_mar(
        "silent.mar",
        name="silent",
        handler="def handle(data, context):\n    if data: raise ValueError('no idea')\n",
    )
    empty.register("wordy.mar", initial_workers=1)
    empty.register("silent.mar", initial_workers=1)
    assert (
        empty.management.get("/models/wordy", params={"customized": "true"}).json()[0][
            "customizedMetadata"
        ]
        == "a plain text"
    )
    answer = empty.management.get("/models/silent", params={"customized": "true"})
    assert answer.status_code == 500
    assert error_of(answer)[1].startswith(
        'The handler of model "silent" could not describe it: Prediction failed'
    )


def test_a_client_that_leaves_in_the_middle_of_its_order_does_no_harm(server):
    parts = urlsplit(str(server.management.base_url))
    with socket.create_connection((parts.hostname, parts.port)) as sock:
        sock.sendall(
            b"POST /models HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n{"
        )
    assert server.management.get("/models").status_code == 200


def test_a_description_tells_the_device_that_was_chosen_over_the_archives(empty):
    empty.register("other.mar", initial_workers=0, device_type="cpu")
    assert empty.management.get("/models/other").json()[0]["deviceType"] == "cpu"


# Changing limits

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


def described_limits(server, model):
    (reported,) = server.management.get(f"/models/{model}").json()
    names = {name: to_camel(name) for name in LIMITS} | {"client_timeout": "clientTimeoutInMills"}
    return {name: reported[camel] for name, camel in names.items()} | {
        "workers": len(reported["workers"])
    }


@pytest.mark.parametrize("path", ["/models/talker", "/models/talker/1.0"])
@pytest.mark.parametrize("name", LIMITS)
def test_one_limit_is_changed_and_nothing_else(empty, path, name):
    empty.register("talker.mar", initial_workers=0, client_timeout=1)
    before = described_limits(empty, "talker")
    answer = empty.management.put(path, params={name: LIMITS[name]})
    assert (answer.status_code, status_of(answer)) == (
        200,
        f'Changed for model "talker" Version: 1.0: {name} = {LIMITS[name]}',
    )
    assert described_limits(empty, "talker") == before | {name: LIMITS[name]}


def test_a_registration_sets_the_same_limits(empty):
    empty.management.post("/models", params={"url": "talker.mar", **LIMITS})
    assert described_limits(empty, "talker") == LIMITS | {"workers": 0}


def test_a_limit_may_have_its_name_in_the_archive(empty):
    empty.management.post(
        "/models", json={"url": "talker.mar", "initial_workers": 0, "batchSize": 5}
    ).raise_for_status()
    assert described_limits(empty, "talker")["batch_size"] == 5
    changed = empty.management.put(
        "/models/talker", params={"batchSize": 6, "clientTimeoutInMills": 70}
    )
    assert (
        changed.status_code,
        changed.json()["status"].endswith("batch_size = 6, client_timeout = 70"),
    ) == (200, True)


def test_limits_and_workers_change_together(empty):
    empty.register("talker.mar", initial_workers=0)
    answer = empty.management.put(
        "/models/talker", params={"min_worker": 1, "batch_size": 4, "synchronous": "true"}
    )
    assert (answer.status_code, status_of(answer)) == (200, "Workers scaled to 1 for model: talker")
    assert described_limits(empty, "talker")["batch_size"] == 4
    assert (
        empty.inference.post("/predictions/talker", content=b"a", headers={"x-do": "bytes"}).text
        == "a"
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"batch_size": -1}, "Parameter batch_size is '-1'"),
        ({"job_queue_size": "many"}, "Parameter job_queue_size is 'many'"),
        ({"overload_status": 500}, "Parameter overload_status is '500'"),
        ({"batchsize": 4}, "Parameter batchsize is not known; did you mean 'batch_size'?"),
        (
            {"min_worker": 2, "max_worker": 1, "batch_size": 4},
            "max_worker cannot be less than min_worker.",
        ),
        ({"min_worker": 100_000, "batch_size": 4}, "100000 workers are too many"),
        ({"min_worker": 1000, "batch_size": 4}, "or max_workers = 1000 in [models.talker]"),
    ],
)
def test_a_limit_that_cannot_be_is_named_and_nothing_is_changed(empty, given, words, error_of):
    empty.register("talker.mar", initial_workers=0)
    before = described_limits(empty, "talker")
    answer = empty.management.put("/models/talker", params=given)
    assert answer.status_code == 400
    assert words in error_of(answer)[1]
    assert described_limits(empty, "talker") == before


def test_a_parameter_that_is_like_none_of_ours_is_passed_over_as_torchserve_does(empty):
    empty.register("talker.mar", initial_workers=0)
    assert (
        empty.management.put("/models/talker", params={"min_worker": 0, "zone": "b"}).status_code
        == 202
    )


def test_a_shorter_response_timeout_holds_for_what_has_begun(empty, tmp_path, until):
    empty.register("talker.mar", initial_workers=1)
    version = empty.registry.find("talker")
    answers = []
    headers = {"x-do": "wait", "x-file": str(tmp_path / "never")}
    asking = threading.Thread(
        target=lambda: answers.append(empty.inference.post("/predictions/talker", headers=headers))
    )
    asking.start()
    until(lambda: version.stats.requests == 1)
    empty.management.put("/models/talker", params={"response_timeout": 1})
    asking.join(60)
    assert answers[0].status_code == 500
    assert "did not answer within 1 s (responseTimeout)" in answers[0].json()["message"]


def test_no_worker_is_measured_on_the_event_loop(server, monkeypatch):
    threads, measure = [], Worker.memory
    monkeypatch.setattr(
        Worker,
        "memory",
        lambda worker: threads.append(threading.current_thread().name) or measure(worker),
    )
    (described,) = server.management.get("/models/talker").json()
    assert described["workers"][0]["memoryUsage"] > 1 << 20
    assert threads
    assert "server" not in threads
