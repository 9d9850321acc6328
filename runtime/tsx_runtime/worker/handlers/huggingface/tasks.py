"""What every task does: reads one request, answers those of a batch together, and says what a
request costs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from tsx_runtime.worker.exceptions import InvalidInput, each_or_bad
from tsx_runtime.worker.generation.interface import TaskRequest, TaskResult
from tsx_runtime.worker.handlers.huggingface.batches import run_batched
from tsx_runtime.worker.handlers.huggingface.loading import Loaded
from tsx_runtime.worker.handlers.huggingface.requests import Reader, read_parameters

Fields: TypeAlias = Mapping[str, Any]  # the parameters of a request, or tensors by name

# of one request: inputs, parts of long texts, pairs of text and label, proposals for masked words
MOST_PARTS = 10_000


class Request(NamedTuple):
    """A request that a task has read: its inputs are checked."""

    inputs: Sequence[Any]
    single: bool  # whether it was one input and not a list, and so is answered by one output
    parameters: dict[str, Any]

    @property
    def adapter(self) -> str | None:
        return self.parameters.get("adapter")

    def shaped(self, outputs: list[Any]) -> Any:
        return outputs[0] if self.single else outputs


class Unit(NamedTuple):
    """What the model is given for one input, or for a part of one."""

    request: int  # its position in the batch
    input: int
    tensors: Any  # without padding
    length: int  # in tokens, or in what costs about as much
    key: Hashable = None  # only units of equal keys go into one call of the model
    options: Any = None  # of that call, and of what follows it


class Task(ABC):
    fields: frozenset[str] = (
        frozenset()
    )  # of the task's own shape of a request, in place of `inputs`
    media = False  # whether a body that is no JSON is a file
    input_kind = "json"  # for the form on the server's page
    parameters: Mapping[str, Reader] = {}
    required: tuple[str, ...] = ()
    most_parts = MOST_PARTS

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.model = loaded.model  # with the adapter of the requests that run
        self.budget = loaded.budget

    def use(self, model: Any) -> None:
        self.model = model

    def read(self, request: TaskRequest) -> Request:
        """Raises InvalidInput."""
        given = dict(request.parameters)
        adapter = given.pop("adapter", None)
        names = list(self.loaded.adapters)  # what the client sends may not be hashable
        if adapter is not None and adapter not in names:
            raise InvalidInput(
                f"The model has no adapter {adapter!r}; it has {', '.join(names) or 'none'}."
            )
        parameters = read_parameters(given, self.parameters, self.loaded.task)
        if adapter is not None:
            parameters["adapter"] = adapter
        for name in self.required:
            if name not in parameters:
                raise InvalidInput(f"{self.loaded.task} needs the parameter {name!r}.")
        inputs, single = self.listed(request.inputs)
        if not inputs:
            raise InvalidInput("`inputs` is empty. Send at least one input.")
        if len(inputs) > MOST_PARTS:
            raise InvalidInput(
                f"`inputs` has {len(inputs)} entries; at most {MOST_PARTS} are taken. Send several"
                " requests."
            )
        return Request(self.read_inputs(inputs, parameters), single, parameters)

    def listed(self, inputs: Any) -> tuple[list[Any], bool]:
        return (inputs, False) if isinstance(inputs, list) else ([inputs], True)

    @abstractmethod
    def read_inputs(self, inputs: list[Any], parameters: Fields) -> Sequence[Any]:
        """Raises InvalidInput."""

    @abstractmethod
    def example(self) -> TaskRequest:
        """What warms the model up."""

    @abstractmethod
    def cost(self, request: Request) -> int:
        """In tokens where the task reads text, else in inputs."""

    def answer(self, requests: Sequence[Request]) -> list[TaskResult]:
        """Raises BadRows, by positions in `requests`."""
        units = self.units(requests)
        keys = [(requests[unit.request].adapter, unit.key) for unit in units]

        def run(positions: list[int]) -> Sequence[Any]:
            adapter, _ = keys[positions[0]]
            self.use(self.loaded.model if adapter is None else self.loaded.adapters[adapter])
            try:
                return self.run([units[position] for position in positions])
            except (
                ValueError
            ) as error:  # in transformers' words, of what `generate` or the model cannot do
                raise InvalidInput(f"The model cannot take the input: {error}") from error

        parts: list[list[list[Any]]] = [[[] for _ in request.inputs] for request in requests]
        tokens = [0] * len(requests)
        for unit, result in zip(
            units, run_batched([unit.length for unit in units], keys, self.budget, run), strict=True
        ):
            parts[unit.request][unit.input].append(result)
            tokens[unit.request] += 0 if self.media else unit.length
        outputs = each_or_bad(
            lambda position, request: self.output(request, parts[position]), requests
        )
        return [TaskResult(*each) for each in zip(outputs, tokens, strict=True)]

    def check_parts(self, parts: int) -> None:
        """Of all inputs of a request. Raises InvalidInput."""
        if parts > self.most_parts:
            raise InvalidInput(
                f"The request makes more than {self.most_parts} parts, the most that one may make."
                " Send several requests, or longer parts."
            )

    def units(self, requests: Sequence[Request]) -> list[Unit]:
        """Raises BadRows."""
        return [unit for units in each_or_bad(self.units_of, requests) for unit in units]

    def units_of(self, position: int, request: Request) -> list[Unit]:
        """Return the units of one request. Raises ValueError."""
        raise NotImplementedError

    @abstractmethod
    def run(self, units: Sequence[Unit]) -> Sequence[Any]:
        """One call of the model: for each unit a result."""

    @abstractmethod
    def output(self, request: Request, parts: list[list[Any]]) -> Any:
        """The answer, of the results of each input. Raises ValueError, in words for the client."""
