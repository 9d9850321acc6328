"""The limits of a model as pydantic fields, for requests, settings, snapshots and descriptions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from tsx_archiver.metadata.model_limits import BY_KEY, LIMITS
from tsx_archiver.quantities import for_text, parse_bytes, parse_seconds

ModelT = TypeVar("ModelT", bound=BaseModel)


class Accepts:
    """A description of a setting's values, for errors, if the Python type does not tell them."""

    def __init__(self, text: str) -> None:
        self.text = text


class OneOf(Accepts):
    """A restriction to a few numbers."""

    def __init__(self, choices: tuple[int, ...]) -> None:
        super().__init__(" or ".join(map(str, choices)))
        self._choices = choices

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: int) -> int:
        if value not in self._choices:
            raise ValueError(f"it must be {self.text}")
        return value


class NumberUnit(NamedTuple):
    """A description of the unit with which a whole number may be written, such as 8GB."""

    text: str


def _whole_seconds(text: str) -> float:
    seconds = parse_seconds(text)
    # The field's type, int, refuses a fraction.
    return int(seconds) if seconds.is_integer() else seconds


Bytes = Annotated[
    int, BeforeValidator(for_text(parse_bytes)), NumberUnit("a size such as 100MB or 8GB")
]
Seconds = Annotated[
    int, BeforeValidator(for_text(_whole_seconds)), NumberUnit("a time such as 30s, 10m or 2h")
]
UNITS: dict[str, Any] = {
    "max_batch_bytes": Bytes,
    "max_queue_bytes": Bytes,
    "response_timeout": Seconds,
    "startup_timeout": Seconds,
    "max_worker_age": Seconds,
}


def limit_field(name: str, default: Any = None, **options: Any) -> Any:
    limit = LIMITS[name]
    bounds: dict[str, Any] = {} if limit.choices else {"ge": limit.minimum, "lt": limit.below}
    return Field(default, description=limit.description, **bounds, **options)


def server_default(name: str) -> Any:
    """Return the field of a server's setting, which is the default for models without the limit."""
    return limit_field(name, LIMITS[name].default)


def described(name: str) -> Any:
    """Return the field of a version's description, which always has the changeable limits."""
    return limit_field(name, ... if LIMITS[name].changeable else None, alias=LIMITS[name].key)


def with_limits(
    names: Iterable[str] = LIMITS, make: Callable[[str], Any] = limit_field
) -> Callable[[type[ModelT]], type[ModelT]]:
    """Return a class decorator that adds the limits that the class does not declare.

    The new fields follow the inherited ones. The class also accepts a limit under its key in
    model-config.yaml, such as batchSize.
    """

    def decorate(model: type[ModelT]) -> type[ModelT]:
        fields: dict[str, Any] = {}
        for name in names:
            if name not in model.model_fields:
                field, choices = make(name), LIMITS[name].choices
                annotation: Any = (
                    Annotated[int, OneOf(choices)] if choices else UNITS.get(name, int)
                )
                fields[name] = (annotation if field.is_required() else annotation | None, field)
        is_keyed = "alias_generator" in model.model_config  # The generated aliases are these keys.
        validators: Any = (
            {} if is_keyed else {"by_key": model_validator(mode="before")(_rename_keys)}
        )
        base: Any = create_model(
            f"{model.__name__}Limits", __base__=model.__base__, __validators__=validators, **fields
        )
        return create_model(
            model.__name__,
            __base__=(model, base),
            __module__=model.__module__,
            __doc__=model.__doc__,
        )

    return decorate


def _rename_keys(values: Any) -> Any:
    return (
        {BY_KEY.get(name, name): value for name, value in values.items()}
        if isinstance(values, dict)
        else values
    )
