"""Both servers, started once, and their answers to each request."""

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
from tests.differential.pair import Seen, Side, serving


class Pair(NamedTuple):
    theirs: Side
    ours: Side


class Answers(NamedTuple):
    theirs: Seen
    ours: Seen


@pytest.fixture(scope="session")
def torchserve(processes: None) -> Path:
    """Return the programs of a TorchServe, which may be installed from PyPI first.

    TSX_PEER_TORCHSERVE names another one.
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
    ours = [sys.executable, "-m", "tsx_cli.serve.torchserve"]
    with (
        serving(
            [torchserve / "torchserve"], directory / "theirs", store, ports[:5], str(torchserve)
        ) as they,
        serving(ours, directory / "ours", store, ports[5:], str(Path(sys.executable).parent)) as we,
    ):
        yield Pair(they, we)


@pytest.fixture(scope="session")
def answers(pair: Pair) -> dict[Case | int, Answers]:
    """Return the answers by case, or by the number in the story."""
    seen: dict[Case | int, Answers] = {
        case: Answers(pair.theirs.send(case), pair.ours.send(case)) for case in stateless()
    }
    for number, case in enumerate(STORY):
        seen[number] = Answers(pair.theirs.send(case), pair.ours.send(case))
    return seen
