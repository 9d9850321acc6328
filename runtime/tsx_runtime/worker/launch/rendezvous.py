"""The rendezvous of a torchrun group on one machine, which uses only loopback.

torch's own stores listen on all addresses without a password, and its dynamic rendezvous unpickles
their content: anyone who reaches the port can run code. Only groups across machines use them
(docs/guides/security.md).
"""

from __future__ import annotations

import os
import socket
import sys

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not declare it
from torch.distributed.elastic.rendezvous import RendezvousInfo, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

BACKEND, LOOPBACK = "tsx-loopback", "127.0.0.1"
TIMEOUT_S = 600  # the default of torch


class LoopbackRendezvous(StaticTCPRendezvous):
    """A rendezvous of one agent and its ranks, which share a store. Nothing is unpickled."""

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        if self._store is None:
            listener = socket.create_server((LOOPBACK, 0))
            self.master_port = listener.getsockname()[1]
            self._store = TCPStore(
                LOOPBACK,
                self.master_port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        return super().next_rendezvous()


def stay_on_loopback() -> tuple[str, str]:
    """Set up a rendezvous on loopback, and return the arguments of torchrun for it.

    By default, the communication libraries of the ranks use loopback, too.
    """
    rendezvous_handler_registry.register(
        BACKEND,
        lambda parameters: LoopbackRendezvous(LOOPBACK, 0, 0, 1, parameters.run_id, TIMEOUT_S),
    )
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo" if sys.platform == "linux" else "lo0")
    return f"--rdzv-backend={BACKEND}", f"--rdzv-endpoint={LOOPBACK}"
