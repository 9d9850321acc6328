"""The number of processes and GPUs of one worker, from `parallelType`, `parallelLevel` and `torchrun`. Contract section 6.7."""

from __future__ import annotations

from typing import NamedTuple

from tsx_archiver import ModelConfig, TorchRun
from tsx_runtime.errors import BadRequest
from tsx_runtime.shared.cores import cpu_count


class Parallel(NamedTuple):
    """A worker with one rank and without `torchrun` is a plain worker."""

    ranks: int = 1  # processes of one worker on this machine
    gpus: int = 1  # of one worker, where there are GPUs
    broadcast: bool = True  # whether every rank gets the requests; a pipeline is fed by rank 0
    torchrun: TorchRun | None = None  # None: one process, which may still see several GPUs
    threads: int | None = None  # of each process

    @property
    def is_group(self) -> bool:
        return self.torchrun is not None

    def arguments(self, group: str) -> tuple[str, ...]:
        """Return torchrun's arguments; `group` names the group among those of this machine.

        Processes on one machine have no `rdzv-backend`: they meet by worker/launch/rendezvous.py.
        """
        asked = self.torchrun or TorchRun()
        meeting = (asked.nnodes or 1) > 1
        given = {
            "nnodes": asked.nnodes or 1,
            "nproc-per-node": self.ranks,
            "node-rank": asked.node_rank or 0,
            "max-restarts": 0,  # the front end restarts a group, with pauses, and logs it
            "monitor-interval": asked.monitor_interval or None,  # seconds; torch's own is a tenth of one
            "rdzv-id": group,
            "rdzv-backend": (asked.rdzv_backend or "c10d") if meeting else None,
            "rdzv-endpoint": asked.rdzv_endpoint if meeting else None,
            "rdzv-conf": asked.rdzv_conf if meeting else None,
        }
        return tuple(f"--{name}={value}" for name, value in given.items() if value is not None)


def parallel_of(config: ModelConfig, gpus: int) -> Parallel:
    """Raises BadRequest for a worker that takes more GPUs than there are, or for nodes that cannot meet.

    A group is asked for by `torchrun`, or by a `parallelType` of pp, tp or pptp with a `parallelLevel`; `custom` without `torchrun`
    is one process that sees as many GPUs as `parallelLevel` says.
    """
    asked = config.torchrun
    if asked is None and config.parallel_type in ("pp", "tp", "pptp") and (config.parallel_level or 1) > 1:
        asked = TorchRun()
    if asked is None:
        found = Parallel(gpus=config.parallel_level or 1)
    else:
        ranks = _ranks(asked.nproc_per_node, config.parallel_level, gpus)
        broadcast = config.parallel_type != "pp"
        found = Parallel(ranks, config.parallel_level or ranks, broadcast, asked, asked.omp_number_threads)
        if (asked.nnodes or 1) > 1 and not asked.rdzv_endpoint:
            raise BadRequest(
                f"torchrun in model-config.yaml asks for {asked.nnodes} nodes: set rdzv-endpoint as well, the HOST:PORT where they meet."
            )
    if found.ranks > 1 and found.broadcast:
        _check_step(config)
    if 0 < gpus < found.gpus and config.device_type != "cpu":
        raise BadRequest(
            f"A worker of this model takes {found.gpus} GPUs, and this server has {gpus}. "
            "Lower parallelLevel, or torchrun's nproc-per-node, in model-config.yaml."
        )
    return found


def _check_step(config: ModelConfig) -> None:
    """Ranks meet in their collectives, so each runs the same batches in the same order. Raises BadRequest where that cannot be."""
    for asked, key in ((config.continuous_batching, "continuousBatching"), (config.async_communication, "asyncCommunication")):
        if asked:
            raise BadRequest(
                f"model-config.yaml asks for {key} and for a torchrun group whose ranks all get the requests: they would get out of sync. "
                "Leave one of them out, or use parallelType: pp, where rank 0 alone gets them."
            )


def _ranks(asked: int | str | None, level: int | None, gpus: int) -> int:
    """torchrun's own words for nproc-per-node are a number, cpu, gpu and auto."""
    if asked is None:
        return level or 1
    if isinstance(asked, int):
        return asked
    word = asked.strip().lower()
    if word.isdecimal() and int(word):
        return int(word)
    if word == "cpu" or (word == "auto" and not gpus):
        return cpu_count()
    if word in ("gpu", "auto") and gpus:
        return gpus
    why = "this server has no GPU" if word == "gpu" else "it must be a number, cpu, gpu or auto"
    raise BadRequest(f"nproc-per-node under torchrun in model-config.yaml is {asked!r}: {why}.")
