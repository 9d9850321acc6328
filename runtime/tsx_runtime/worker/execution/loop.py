"""The loops of workers whose requests join running ones, by the mode of the load order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Protocol

from tsx_runtime.wire import Frame, Item
from tsx_runtime.worker.channel import FrameSocket
from tsx_runtime.worker.execution import async_handlers
from tsx_runtime.worker.execution.batch import Outcome, ServedModel


class Loop(Protocol):
    """A module with the functions that answer requests in one mode."""

    def serve(
        self,
        channel: FrameSocket,
        model: ServedModel,
        on_control_frame: Callable[[FrameSocket, Frame], None],
        on_request: Callable[[], None],
    ) -> None:
        """Serve until the front end closes or the device is lost.

        Frames other than requests and cancellations are passed to `on_control_frame`.
        """

    def answer(self, model: ServedModel, items: Sequence[Item]) -> Outcome:
        """Answer requests that arrive together, and return once all are complete."""


def find_loop(mode: str) -> Loop:
    """Return the loop of a mode other than batch.

    Except for `async`, it is the module `loop` of the feature with the name of the mode.
    """
    if mode == "async":
        return async_handlers
    loop: Loop = import_module(f"tsx_runtime.features.{mode}.loop")
    return loop
