"""TorchServe and tsx, started once, and their responses to each request."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.peers.environments import Missing, default_directory, environment_of
from tests.differential.cases import STORY, Case, stateless
from tests.differential.models import write_store
from tests.differential.pair import ServerResponse, Side, serving


class Pair(NamedTuple):
    theirs: Side
    ours: Side


class Answers(NamedTuple):
    theirs: ServerResponse
    ours: ServerResponse


@pytest.fixture(scope="session")
def torchserve(processes: None) -> Path:
    """Return TorchServe's directory of programs, and install it from PyPI if necessary.

    TSX_PEER_TORCHSERVE names another environment.
    """
    if shutil.which("java") is None:
        pytest.skip("the comparison with TorchServe needs Java, which is not here")
    try:
        return environment_of("TorchServe", default_directory()) / "bin"
    except Missing as missing:
        pytest.skip(f"the comparison with TorchServe cannot be made: {missing}")


@pytest.fixture(scope="session")
def pair(
    torchserve: Path,
    tmp_path_factory: pytest.TempPathFactory,
    free_ports: Callable[[int], list[int]],
) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("differential")
    store = directory / "store"
    write_store(store)
    ports = free_ports(10)
    our_command = [sys.executable, "-m", "tsx_cli.serve.torchserve"]
    with (
        serving(
            [torchserve / "torchserve"], directory / "theirs", store, ports[:5], str(torchserve)
        ) as their_side,
        serving(
            our_command, directory / "ours", store, ports[5:], str(Path(sys.executable).parent)
        ) as our_side,
    ):
        yield Pair(their_side, our_side)


@pytest.fixture(scope="session")
def answers(pair: Pair) -> dict[Case | int, Answers]:
    """Return the responses by case, or by the number of the step in the story."""
    responses: dict[Case | int, Answers] = {
        case: Answers(pair.theirs.send(case), pair.ours.send(case)) for case in stateless()
    }
    for number, case in enumerate(STORY):
        responses[number] = Answers(pair.theirs.send(case), pair.ours.send(case))
    return responses
