"""The limits of a model as pydantic fields of requests, settings, snapshots and descriptions."""

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
    """The accepted values of a setting in words, for errors, if its Python type does not tell."""

    def __init__(self, text: str) -> None:
        self.text = text


class OneOf(Accepts):
    """A restriction to some numbers."""

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
    """The text that a whole number may be written as."""

    text: str


def _whole_seconds(text: str) -> float:
    seconds = parse_seconds(text)
    return int(seconds) if seconds.is_integer() else seconds  # The type refuses a fraction.


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
    """Return the field of a server's setting: the default for models that set no limit."""
    return limit_field(name, LIMITS[name].default)


def described(name: str) -> Any:
    """Return the field of a version's description; only a changeable limit is always present."""
    return limit_field(name, ... if LIMITS[name].changeable else None, alias=LIMITS[name].key)


def with_limits(
    names: Iterable[str] = LIMITS, make: Callable[[str], Any] = limit_field
) -> Callable[[type[ModelT]], type[ModelT]]:
    """Return a class decorator that adds the limits which the class does not declare.

    The new fields follow the inherited ones. A limit may also be given by its key in
    model-config.yaml, such as batchSize.
    """

    def decorate(model: type[ModelT]) -> type[ModelT]:
        added: dict[str, Any] = {}
        for name in names:
            if name not in model.model_fields:
                field, choices = make(name), LIMITS[name].choices
                kind: Any = Annotated[int, OneOf(choices)] if choices else UNITS.get(name, int)
                added[name] = (kind if field.is_required() else kind | None, field)
        is_keyed = "alias_generator" in model.model_config  # Its fields have the keys already.
        validators: Any = (
            {} if is_keyed else {"by_key": model_validator(mode="before")(_rename_keys)}
        )
        base: Any = create_model(
            f"{model.__name__}Limits", __base__=model.__base__, __validators__=validators, **added
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
