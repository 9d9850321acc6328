"""The health checking and reflection services, called by their standard clients."""

from __future__ import annotations

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.runtime.features.grpc.conftest import TIMEOUT, Client, failure_of

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


def test_the_health_of_server_services_and_models_is_checked_by_name(client: Client) -> None:
    stub = HealthStub(client.inference_channel)
    for name in (
        "",
        "inference.GRPCInferenceService",
        "org.pytorch.serve.grpc.inference.InferenceAPIsService",
        "talker",
        "talker/1.0",
    ):
        assert stub.Check(HealthCheckRequest(service=name), timeout=TIMEOUT).status == SERVING
    error = failure_of(lambda: stub.Check(HealthCheckRequest(service="nope"), timeout=TIMEOUT))
    assert error.code() is grpc.StatusCode.NOT_FOUND


def test_a_health_watcher_is_notified_of_a_models_changes(client: Client) -> None:
    unknown = HealthCheckResponse.SERVICE_UNKNOWN
    version = {"model_name": "talker", "model_version": "2.0"}
    watch = HealthStub(client.management_channel).Watch(
        HealthCheckRequest(service="talker/2.0"), timeout=TIMEOUT
    )
    assert next(watch).status == unknown
    client.manage("RegisterModel", url="talker2.mar")
    assert next(watch).status == NOT_SERVING
    client.manage("ScaleWorker", **version, min_worker=1)
    assert next(watch).status == SERVING
    client.manage("UnregisterModel", **version)
    statuses = [next(watch).status]
    while statuses[-1] != unknown:
        statuses.append(next(watch).status)
    assert set(statuses) <= {NOT_SERVING, unknown}
    watch.cancel()


def test_reflection_lists_every_service_and_message(client: Client) -> None:
    database = ProtoReflectionDescriptorDatabase(client.inference_channel)
    services = set(database.get_services())
    assert services == {
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "inference.GRPCInferenceService",
        "org.pytorch.serve.grpc.inference.InferenceAPIsService",
        "org.pytorch.serve.grpc.openinference.GRPCInferenceService",
    }
    for name in services:
        file = database.FindFileContainingSymbol(name)
        assert name.rpartition(".")[2] in [service.name for service in file.service]
    assert set(ProtoReflectionDescriptorDatabase(client.management_channel).get_services()) == {
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "org.pytorch.serve.grpc.management.ManagementAPIsService",
    }
