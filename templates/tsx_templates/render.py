"""From a directory of templates to the files of a user's directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from jinja2 import Environment, PackageLoader, StrictUndefined

SUFFIX = ".j2"


def render_tree(tree: str, values: Mapping[str, object]) -> dict[PurePosixPath, str]:
    """The files of the template directory `tree`, by their path; a value that a template misses is an error."""
    loader = PackageLoader("tsx_templates", tree)
    # No escaping: the files are no HTML.
    environment = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False)
    names = [name for name in loader.list_templates() if name.endswith(SUFFIX)]
    return {PurePosixPath(name.removesuffix(SUFFIX)): environment.get_template(name).render(values) for name in names}
