"""The kinds of forms. Each module here defines one kind, and lists its forms in `FORMS`."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from tsx_runtime.worker.forms.form import Form


@cache
def known_forms() -> dict[str, Form]:
    """Return all forms by name, in the order of their modules and `FORMS`."""
    modules = [
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
    ]
    return {form.name: form for module in modules for form in module.FORMS}
