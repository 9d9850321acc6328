"""The token table in docs/guides/security.md, compared with a server that requires tokens."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_reflection.v1alpha.reflection import SERVICE_NAME
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from tsx_runtime.api.access.auth import FAILED
from tsx_runtime.api.access.tokens import FAILED as FAILED_TO_RENEW
from tsx_runtime.api.access.tokens import build_keys
from tsx_runtime.core.registry.registry import Registry
from tsx_runtime.features.grpc.server import GrpcServer
from tsx_runtime.features.grpc.settings import GRPC_ROLES
from tsx_runtime.grpc.pool import POOL
from tsx_runtime.http.build import build_apps
from tsx_runtime.http.page import PREFIXES
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.settings.schema import ROLES, Settings

TOKENS = {
    "none": "",
    "inference_token": "of inference",
    "management_token": "of management",
    "api_token": "of tokens",
}
REFUSAL_TEXTS = FAILED, FAILED_TO_RENEW
# The gRPC client reports this text if the server's error arrives while it is still sending.
CLIENT_ERROR = "Internal error from Core"
ADDRESSES = {
    f"{role}_{'port' if role in GRPC_ROLES else 'address'}": role for role in (*ROLES, *GRPC_ROLES)
}
# The required token by address and route.
TokensByRoute = dict[tuple[str, str], str]


def table_entries() -> Iterator[tuple[str, str, str]]:
    """Yield the token, the address and the pattern of each entry."""
    text = (Path(__file__).parents[2] / "docs" / "guides" / "security.md").read_text(
        encoding="utf-8"
    )
    section = text.partition("## What each token opens\n")[2].partition("\n## ")[0]
    for line in section.splitlines():
        address, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if address.strip("`") in ADDRESSES:
            for token, cell in zip(TOKENS, cells, strict=True):
                yield from (
                    (token, ADDRESSES[address.strip("`")], pattern)
                    for pattern in re.findall(r"`([^`]+)`", cell)
                )


def matches(pattern: str, route: str) -> bool:
    return route.startswith(pattern[:-1]) if pattern.endswith("*") else route == pattern


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    values = {
        "inference_token": TOKENS["inference_token"],
        "management_token": TOKENS["management_token"],
        "max_failed_tokens": 0,
    }
    values |= {f"{role}_address": "http://192.0.2.1:80" for role in ROLES} | {
        "max_requests_per_client": 0,
        "worker_preload": False,
    }
    # The server writes generated tokens to this file.
    values["key_file"] = tmp_path / "key_file.json"
    return Settings(
        **values, model_store=tmp_path, state_dir=tmp_path / "state", cache_dir=tmp_path / "cache"
    )  # type: ignore[arg-type]


def routes_of(router: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the method and path of each route, including those of nested routers."""
    for route in router.routes:
        if (nested_router := getattr(route, "original_router", None)) is not None:
            yield from routes_of(nested_router, prefix + route.include_context.prefix)
        else:
            yield from (
                (method, prefix + route.path)
                for method in getattr(route, "methods", None) or ["GET"]
            )


async def http_tokens(settings: Settings) -> TokensByRoute:
    registry = Registry(settings)
    registry.open()
    tokens_by_route: TokensByRoute = {}
    # GET /token exists only for generated tokens, since tokens from settings do not expire.
    for generated in (False, True):
        keys = build_keys(settings)
        if generated:
            generating_settings = settings.model_copy(
                update={
                    "inference_token": None,
                    "generate_tokens": True,
                    "api_token": TOKENS["api_token"],
                }
            )
            keys = build_keys(generating_settings)
        for role, app in zip(ROLES, build_apps(registry, settings, keys=keys), strict=True):
            documented_routes = {
                (method, path) for path, methods in app.paths.items() for method in methods
            }
            documented_routes |= (
                {("POST", f"{prefix}{{model}}") for prefix in PREFIXES}
                if role == "management"
                else set()
            )
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(app), base_url="http://192.0.2.1"
            ) as client:
                for method, path in sorted({*documented_routes, *routes_of(app)}):
                    is_selected = (
                        (method, path) == ("GET", "/token") if generated else path != "/token"
                    )
                    if method in ("HEAD", "OPTIONS") or not is_selected:
                        continue
                    token = await required_http_token(
                        client,
                        method,
                        re.sub(r"\{[^}]*\}", "x", path) + "?type=inference" * generated,
                    )
                    assert tokens_by_route.setdefault((role, path), token) == token, (
                        f"{method} {path} is opened otherwise than its other methods"
                    )
    await registry.close()
    return tokens_by_route


async def required_http_token(client: httpx.AsyncClient, method: str, path: str) -> str:
    for name, token in TOKENS.items():
        answer = await client.request(
            method, path, headers={"authorization": f"Bearer {token}"} if token else {}
        )
        if answer.status_code not in (400, 401, 403) or not any(
            text in answer.text for text in REFUSAL_TEXTS
        ):
            return name
    raise AssertionError(f"no token opens {method} {path}")


async def grpc_tokens(settings: Settings) -> TokensByRoute:
    registry = Registry(settings)
    tokens_by_route: TokensByRoute = {}
    for role in GRPC_ROLES:
        server = GrpcServer(
            registry, settings, build_keys(settings), [role], "127.0.0.1:0", None, ResponseCounts()
        )
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            for service in await services(channel, TOKENS[f"{role.removeprefix('grpc_')}_token"]):
                for method in POOL.FindServiceByName(service).methods:
                    texts = {
                        name: await answer_of(channel, f"/{service}/{method.name}", token)
                        for name, token in TOKENS.items()
                    }
                    required_token = next(
                        name for name, text in texts.items() if FAILED not in text
                    )
                    # The package is left out, since two packages contain the Open Inference Protocol.
                    short_name = f"{service.rpartition('.')[2]}/{method.name}"
                    assert (
                        tokens_by_route.setdefault((role, short_name), required_token)
                        == required_token
                    )
        await server.stop(0)
    await registry.close()
    return tokens_by_route


async def services(channel: grpc.aio.Channel, token: str) -> list[str]:
    call_reflection = channel.stream_stream(
        f"/{SERVICE_NAME}/ServerReflectionInfo",
        request_serializer=ServerReflectionRequest.SerializeToString,
        response_deserializer=ServerReflectionResponse.FromString,
    )
    request = iter([ServerReflectionRequest(list_services="")])
    async for answer in call_reflection(request, metadata=(("authorization", f"Bearer {token}"),)):
        return [service.name for service in answer.list_services_response.service]
    raise AssertionError("reflection lists nothing")


async def answer_of(channel: grpc.aio.Channel, path: str, token: str) -> str:
    """Return the text of an error, or an empty text if there is none."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    text = CLIENT_ERROR
    for _ in range(20):
        call = channel.stream_stream(path)(iter([b""]), metadata=metadata, timeout=60)
        try:
            await call.read()
            return ""
        except grpc.aio.AioRpcError as error:
            text = str(error.details())
        finally:
            call.cancel()
        if text != CLIENT_ERROR:
            break
    return text


def _upper(parameter: re.Match[str]) -> str:
    return parameter[1].upper()


def test_the_table_of_tokens_agrees_with_the_routes_and_methods(settings: Settings) -> None:
    tokens_by_route = asyncio.run(http_tokens(settings)) | asyncio.run(grpc_tokens(settings))
    required_tokens = {
        (address, re.sub(r"\{(\w+)[^}]*\}", _upper, route)): token
        for (address, route), token in tokens_by_route.items()
    }
    patterns = list(table_entries())
    for (address, route), token in required_tokens.items():
        matching = [row for row in patterns if row[1] == address and matches(row[2], route)]
        best = max(matching, key=lambda row: len(row[2]), default=("nothing", address, route))
        assert best[0] == token, (
            f"docs/guides/security.md says of {route} at the {address} address: {best[0]}. It is {token}."
        )
    unused = [
        row
        for row in patterns
        if not any(
            row[1] == address and matches(row[2], route) for address, route in required_tokens
        )
    ]
    assert not unused, "docs/guides/security.md names what no server has"
