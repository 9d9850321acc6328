"""Health checking and reflection, asked by their own clients."""

from __future__ import annotations

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from tests.runtime.grpc.conftest import TIMEOUT, Client

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


def test_the_server_its_services_and_its_models_are_asked_by_name(client: Client) -> None:
    stub = HealthStub(client.inference_channel)
    for name in (
        "",
        "inference.GRPCInferenceService",
        "org.pytorch.serve.grpc.inference.InferenceAPIsService",
        "talker",
        "talker/1.0",
    ):
        assert stub.Check(HealthCheckRequest(service=name), timeout=TIMEOUT).status == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(HealthCheckRequest(service="nope"), timeout=TIMEOUT)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_who_watches_a_model_is_notified_when_it_comes_serves_and_goes(client: Client) -> None:
    management = client.management
    watched = HealthStub(client.management_channel).Watch(
        HealthCheckRequest(service="talker/2.0"), timeout=TIMEOUT
    )
    assert next(watched).status == HealthCheckResponse.SERVICE_UNKNOWN
    client.models.RegisterModel(management.RegisterModelRequest(url="talker2.mar"), timeout=TIMEOUT)
    assert next(watched).status == NOT_SERVING
    client.models.ScaleWorker(
        management.ScaleWorkerRequest(model_name="talker", model_version="2.0", min_worker=1),
        timeout=TIMEOUT,
    )
    assert next(watched).status == SERVING
    client.models.UnregisterModel(
        management.UnregisterModelRequest(model_name="talker", model_version="2.0"), timeout=TIMEOUT
    )
    seen = [next(watched).status]
    while seen[-1] != HealthCheckResponse.SERVICE_UNKNOWN:
        seen.append(next(watched).status)
    assert set(seen) <= {NOT_SERVING, HealthCheckResponse.SERVICE_UNKNOWN}
    watched.cancel()


def test_reflection_shows_every_service_with_its_messages(client: Client) -> None:
    shown = ProtoReflectionDescriptorDatabase(client.inference_channel)
    services = set(shown.get_services())
    assert services == {
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "inference.GRPCInferenceService",
        "org.pytorch.serve.grpc.inference.InferenceAPIsService",
        "org.pytorch.serve.grpc.openinference.GRPCInferenceService",
    }
    for service in services:
        file = shown.FindFileContainingSymbol(service)
        assert service.rpartition(".")[2] in [each.name for each in file.service]
    assert set(ProtoReflectionDescriptorDatabase(client.management_channel).get_services()) == {
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "org.pytorch.serve.grpc.management.ManagementAPIsService",
    }
