"""What every task does: reads one request, answers those of a batch together, and says what a request costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tsx_runtime.worker.exceptions import InvalidInput
from tsx_runtime.worker.generation.interface import TaskRequest, TaskResult
from tsx_runtime.worker.handlers.huggingface.loading import Loaded
from tsx_runtime.worker.handlers.huggingface.requests import Reader, read_parameters


class Request(NamedTuple):
    """A request that a task has read: its inputs are checked."""

    inputs: list[Any]
    single: bool  # whether it was one input and not a list, and so is answered by one output
    parameters: dict[str, Any]

    @property
    def adapter(self) -> str | None:
        return self.parameters.get("adapter")

    def shaped(self, outputs: list[Any]) -> Any:
        return outputs[0] if self.single else outputs


class Task(Protocol):
    fields: frozenset[str]  # of the task's own shape of a request, in place of `inputs`
    media: bool  # whether a body that is no JSON is a file
    input_kind: str  # for the form on the server's page
    parameters: Mapping[str, Reader]

    def read(self, request: TaskRequest) -> Request:
        """Raises InvalidInput."""

    def answer(self, requests: Sequence[Request]) -> list[TaskResult]:
        """Raises BadRows, by positions in `requests`."""

    def cost(self, request: Request) -> int:
        """In tokens where the task reads text, else in inputs."""

    def example(self) -> TaskRequest:
        """What warms the model up."""


class BaseTask:
    """What the tasks share."""

    fields: frozenset[str] = frozenset()
    media = False
    input_kind = "json"
    parameters: Mapping[str, Reader] = {}
    required: tuple[str, ...] = ()

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded

    def read(self, request: TaskRequest) -> Request:
        given = dict(request.parameters)
        adapter = given.pop("adapter", None)
        self.loaded.adapters.check(adapter)
        parameters = read_parameters(given, self.parameters, self.loaded.task)
        if adapter is not None:
            parameters["adapter"] = adapter
        for name in self.required:
            if name not in parameters:
                raise InvalidInput(f"{self.loaded.task} needs the parameter {name!r}.")
        inputs, single = self.listed(request.inputs)
        if not inputs:
            raise InvalidInput("`inputs` is empty. Send at least one input.")
        return Request([self.read_input(each, parameters) for each in inputs], single, parameters)

    def listed(self, inputs: Any) -> tuple[list[Any], bool]:
        return (inputs, False) if isinstance(inputs, list) else ([inputs], True)

    def read_input(self, given: Any, parameters: dict[str, Any]) -> Any:
        """Raises InvalidInput."""
        raise NotImplementedError

    def cost(self, request: Request) -> int:
        return len(request.inputs)


def a_text(given: Any, name: str = "inputs") -> str:
    """Raises InvalidInput."""
    if not isinstance(given, str):
        raise InvalidInput(f"`{name}` must be text or a list of texts, and not {type(given).__name__}.")
    if not given.strip():
        raise InvalidInput(f"`{name}` is empty: it must have at least one character.")
    return given
