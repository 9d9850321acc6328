"""Validates the parameters of a request by a pydantic model: an error names each wrong parameter, its value, and the reason."""

from __future__ import annotations

import reprlib
from collections.abc import Collection
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from tsx_runtime.errors import BadRequest
from tsx_runtime.shared.suggestions import suggestion

MOST = 5  # problems of one request that its answer names: a body may have thousands
_SHOWN = reprlib.Repr()  # of a client's value as much as a person reads, however large it is, and however deeply nested
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 200

ParametersT = TypeVar("ParametersT", bound=BaseModel)


def parameters_of(kind: type[ParametersT], given: dict[str, Any], **own: Any) -> ParametersT:
    """`own` overrides `given`. Raises BadRequest."""
    try:
        return kind.model_validate(given | own)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False), kind.model_fields) from error


def from_validation(problems: Any, known: Collection[str] = ()) -> BadRequest:
    """Names each parameter and its value. (TorchServe takes the default for a number that does not parse.) `known`: the valid names."""
    texts = []
    for problem in problems[:MOST]:
        name = ".".join(str(part) for part in problem["loc"] if part not in ("query", "body", "path"))
        if problem["type"] == "extra_forbidden" and known:
            others = f"; there are {', '.join(known)}."
            texts.append(f"Parameter {name} is not known{suggestion(name, known) or others}")
            continue
        texts.append(f"Parameter {name or 'body'} is {_SHOWN.repr(problem.get('input'))}: {problem['msg'].removeprefix('Value error, ')}.")
    if len(problems) > MOST:
        texts.append(f"There are {len(problems) - MOST} more problems.")
    return BadRequest(" ".join(texts))
