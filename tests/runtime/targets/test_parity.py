"""One archive, unchanged, gives the same answers byte for byte from `tsx serve`, a container,
SageMaker and Lambda.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests.runtime.targets.image.test_serve import container as own_container
from tests.support.platforms.lambda_api import answer_of, function, function_url, rest_api
from tests.support.platforms.sagemaker_host import container as endpoint
from tests.support.platforms.sagemaker_host import unpack
from tests.support.platforms.sagemaker_runtime import runtime
from tests.support.servers import FREE_PORTS, serving
from tsx_cli.main import main

DIGITS = Path(__file__).parents[3] / "examples" / "digits"
IMAGES = [(path.read_bytes(), "image/png") for path in sorted((DIGITS / "images").glob("*.png"))]
OTHERS = [(b"no image", "image/png"), (b"", "image/png"), (b'{"a": 1}', "application/json")]

Answer = tuple[int, bytes]
ModelRequest = Callable[[bytes, str], Answer]


def by_http(address: str) -> ModelRequest:
    def ask(body: bytes, content_type: str) -> Answer:
        try:
            with urlopen(
                Request(f"{address}/predictions/digits", body, {"Content-Type": content_type})
            ) as answered:
                return answered.status, answered.read()
        except HTTPError as error:
            return error.code, error.read()

    return ask


def by_sagemaker(client: Any) -> ModelRequest:
    def ask(body: bytes, content_type: str) -> Answer:
        try:
            answered = client.invoke_endpoint(
                EndpointName="digits", Body=body, ContentType=content_type
            )
            return 200, answered["Body"].read()
        except client.exceptions.ModelError as error:
            return error.response["OriginalStatusCode"], error.response["OriginalMessage"].encode()

    return ask


def by_lambda(running: Any, form: Callable[..., dict[str, Any]]) -> ModelRequest:
    def ask(body: bytes, content_type: str) -> Answer:
        answered = running.invoke(
            form("/predictions/digits", body, headers={"content-type": content_type})
        ).json()
        return answered["statusCode"], answer_of(answered)

    return ask


@pytest.fixture(scope="module")
def targets(
    processes: None,
    tmp_path_factory: pytest.TempPathFactory,
    free_ports: Callable[[int], list[int]],
) -> Iterator[dict[str, ModelRequest]]:
    """Each has its own process and its own copy of torch, which is what this takes its time for."""
    place = tmp_path_factory.mktemp("p")
    archive = place / "model" / "digits.mar"
    words = [
        DIGITS / "digits.pth",
        "--model-file",
        DIGITS / "model.py",
        "--handler",
        DIGITS / "handler.py",
    ]
    assert (
        main(
            [
                "archive",
                *map(str, words),
                "--config-file",
                str(DIGITS / "model-config.yaml"),
                "-o",
                str(archive),
            ]
        )
        == 0
    )
    (place / "sagemaker").mkdir()
    unpack(archive, place / "sagemaker")
    one, own = {"TSX_CACHE_DIR": str(place / "cache"), "OMP_NUM_THREADS": "1"}, place / "own"
    own.mkdir()
    with ExitStack() as held:
        enter, ports = held.enter_context, free_ports(3)
        lambdas = {client: place / client for client in ("awslambdaric", "tsx")}
        for directory in lambdas.values():
            directory.mkdir()
        serve = enter(serving(["serve", archive, *FREE_PORTS], place, one))
        enter(own_container(own, ports[:2], TSX_MODEL_DIR=str(archive.parent), **one))
        host = enter(endpoint(place / "sagemaker", ports[2], one))
        host.wait_until_healthy()
        functions = {
            client: enter(
                function(
                    directory,
                    {**one, "TSX_MODEL_DIR": str(archive.parent), "TSX_LAMBDA_RUNTIME": client},
                )
            )
            for client, directory in lambdas.items()
        }
        yield {
            "tsx serve": by_http(serve.address("predictions")),
            "container": by_http(f"http://127.0.0.1:{ports[0]}"),
            "SageMaker": by_sagemaker(enter(runtime(host))),
            "Lambda by awslambdaric": by_lambda(functions["awslambdaric"], function_url),
            "Lambda by tsx's client": by_lambda(functions["tsx"], rest_api),
        }


def test_all_targets_answer_alike(targets: dict[str, ModelRequest]) -> None:
    for body, content_type in [*IMAGES, *OTHERS]:
        answers = {name: ask(body, content_type) for name, ask in targets.items()}
        assert len(set(answers.values())) == 1, answers
        assert answers["tsx serve"][0] == (200 if (body, content_type) in IMAGES else 400), answers
