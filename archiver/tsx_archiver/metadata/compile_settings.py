"""The key `pt2` of model-config.yaml, as a worker and a deployment read it."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("tsx.archive")


def compile_options(pt2: Any) -> dict[str, Any] | None:
    """Return the arguments for torch.compile, or None if it is off.

    `pt2` is a backend's name, or `{compile: {enable: true, backend: ..., mode: ...}}`. In the old
    form it is the mapping of the arguments itself.
    """
    if not pt2:
        return None
    if isinstance(pt2, str):
        return {"backend": pt2}
    if not isinstance(pt2, dict):
        logger.warning(
            "pt2 in model-config.yaml is %r; it must be a backend's name or a mapping, so the model"
            " is not compiled",
            pt2,
        )
        return None
    if "compile" in pt2:
        options = pt2["compile"]
        if not isinstance(options, dict):
            return {} if options is True else None
        if options.get("enable") is not True:
            return None
        return {name: value for name, value in options.items() if name != "enable"}
    if "export" in pt2:  # The model was compiled when it was packed.
        return None
    return dict(pt2)


def is_compiled_ahead(pt2: Any) -> bool:
    """Tell whether AOTInductor compiles, or has compiled, the model before its first call.

    `pt2` is then `{export: {aot_compile: true}}`.
    """
    export = pt2.get("export") if isinstance(pt2, dict) else None
    return isinstance(export, dict) and export.get("aot_compile") is True


def needs_compiler(pt2: Any) -> bool:
    """Tell whether a C++ compiler runs when the model is loaded or first called.

    AOTInductor and torch.compile's default backend need one.
    """
    options = compile_options(pt2)
    return is_compiled_ahead(pt2) or (
        options is not None and options.get("backend", "inductor") == "inductor"
    )
