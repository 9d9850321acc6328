"""The base class of tasks, which read requests and answer a batch of them together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from tsx_runtime.features.generation.worker.interface import TaskRequest, TaskResult
from tsx_runtime.features.huggingface.worker.batches import run_batched
from tsx_runtime.features.huggingface.worker.loading import Loaded
from tsx_runtime.features.huggingface.worker.requests import Reader, read_parameters
from tsx_runtime.worker.exceptions import InvalidInput, map_rows

Fields: TypeAlias = Mapping[str, Any]  # the parameters of a request, or tensors by name

# The limit of a request's inputs, parts of texts, pairs of text and label, or proposed words.
MAX_PARTS = 10_000


class Request(NamedTuple):
    """A request with checked inputs."""

    inputs: Sequence[Any]
    # Whether `inputs` was a single input instead of a list, so that there is one output.
    single: bool
    parameters: dict[str, Any]

    @property
    def adapter(self) -> str | None:
        return self.parameters.get("adapter")

    def shaped(self, outputs: list[Any]) -> Any:
        """Return the outputs: the only one for a single input, or else the list."""
        return outputs[0] if self.single else outputs


class Unit(NamedTuple):
    """The model's input for one input of a request, or for a part of it.

    Attributes:
        request: The position of the request in the batch.
        input: The index of the input in the request.
        tensors: The input of the model, without padding.
        length: The cost in tokens, or in other units.
        key: Only units with equal keys run in one call of the model.
        options: The options of the call and of the conversion of its result.
    """

    request: int
    input: int
    tensors: Any
    length: int
    key: Hashable = None
    options: Any = None


class Task(ABC):
    """A task of a model.

    Attributes:
        fields: The fields that a request may have in place of `inputs`.
        media: Whether a body that is not JSON is a file.
        input_kind: The kind of input, which selects the form on the server's page.
        parameters: The readers of the parameters.
        required: The names of required parameters.
        max_parts: The largest number of units of a request.
    """

    fields: frozenset[str] = frozenset()
    media = False
    input_kind = "json"
    parameters: Mapping[str, Reader] = {}
    required: tuple[str, ...] = ()
    max_parts = MAX_PARTS

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        # It is replaced by the model with the adapter of the current call.
        self.model = loaded.model
        self.budget = loaded.budget

    def use(self, model: Any) -> None:
        self.model = model

    def read(self, request: TaskRequest) -> Request:
        """Check a request.

        Raises:
            InvalidInput: An input or a parameter cannot be used.
        """
        parameter_values = dict(request.parameters)
        adapter = parameter_values.pop("adapter", None)
        # A list, since the client's value may not be hashable.
        adapter_names = list(self.loaded.adapters)
        if adapter is not None and adapter not in adapter_names:
            raise InvalidInput(
                f"The model has no adapter {adapter!r}; it has"
                f" {', '.join(adapter_names) or 'none'}."
            )
        parameters = read_parameters(parameter_values, self.parameters, self.loaded.task)
        if adapter is not None:
            parameters["adapter"] = adapter
        for name in self.required:
            if name not in parameters:
                raise InvalidInput(f"{self.loaded.task} needs the parameter {name!r}.")
        inputs, single = self.as_list(request.inputs)
        if not inputs:
            raise InvalidInput("`inputs` is empty. Send at least one input.")
        if len(inputs) > MAX_PARTS:
            raise InvalidInput(
                f"`inputs` has {len(inputs)} entries; at most {MAX_PARTS} are taken. Send several"
                " requests."
            )
        return Request(self.read_inputs(inputs, parameters), single, parameters)

    def as_list(self, inputs: Any) -> tuple[list[Any], bool]:
        """Return the inputs as a list, and whether there was a single input instead of a list."""
        return (inputs, False) if isinstance(inputs, list) else ([inputs], True)

    @abstractmethod
    def read_inputs(self, inputs: list[Any], parameters: Fields) -> Sequence[Any]:
        """Return checked inputs.

        Raises:
            InvalidInput: An input cannot be used.
        """

    @abstractmethod
    def example(self) -> TaskRequest:
        """Return a request that warms the model up."""

    @abstractmethod
    def cost(self, request: Request) -> int:
        """Return the cost in tokens, or in inputs if the task reads no text."""

    def answer(self, requests: Sequence[Request]) -> list[TaskResult]:
        """Return the results of the requests of a batch.

        Raises:
            BadRows: Some requests cannot be answered.
        """
        units = self.units(requests)
        keys = [(requests[unit.request].adapter, unit.key) for unit in units]

        def run(positions: list[int]) -> Sequence[Any]:
            adapter, _ = keys[positions[0]]
            self.use(self.loaded.model if adapter is None else self.loaded.adapters[adapter])
            try:
                return self.run([units[position] for position in positions])
            except ValueError as error:  # `generate` or the model refuses the input.
                raise InvalidInput(f"The model cannot take the input: {error}") from error

        parts: list[list[list[Any]]] = [[[] for _ in request.inputs] for request in requests]
        tokens = [0] * len(requests)
        for unit, result in zip(
            units, run_batched([unit.length for unit in units], keys, self.budget, run), strict=True
        ):
            parts[unit.request][unit.input].append(result)
            tokens[unit.request] += 0 if self.media else unit.length
        outputs = map_rows(
            lambda position, request: self.output(request, parts[position]), requests
        )
        return [TaskResult(*result) for result in zip(outputs, tokens, strict=True)]

    def check_parts(self, parts: int) -> None:
        """Check the number of units of a request.

        Raises:
            InvalidInput: There are too many units.
        """
        if parts > self.max_parts:
            raise InvalidInput(
                f"The request makes more than {self.max_parts} parts, the most that one may make."
                " Send several requests, or longer parts."
            )

    def units(self, requests: Sequence[Request]) -> list[Unit]:
        """Return the units of all requests.

        Raises:
            BadRows: Some requests cannot be prepared.
        """
        return [unit for units in map_rows(self.units_of, requests) for unit in units]

    def units_of(self, position: int, request: Request) -> list[Unit]:
        """Return the units of one request.

        Raises:
            ValueError: The request cannot be prepared; the message is for the client.
        """
        raise NotImplementedError

    @abstractmethod
    def run(self, units: Sequence[Unit]) -> Sequence[Any]:
        """Call the model once, and return a result for each unit."""

    @abstractmethod
    def output(self, request: Request, parts: list[list[Any]]) -> Any:
        """Convert the results for each input to the response.

        Raises:
            ValueError: A parameter does not fit; the message is for the client.
        """
