"""The parsing of untrusted YAML: plain types only, and a limited expansion of aliases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tsx_archiver.errors import InvalidConfig

MAX_BYTES = 1 << 20
MAX_NODES = 20_000  # about a second of parsing
MAX_SEPARATORS = 2 * MAX_NODES  # commas and line ends, counted before the parsing
MAX_DEPTH = 64


def load_yaml(content: bytes, *, source: str) -> Any:
    """Parse a document to plain Python values.

    Aliases can expand a few lines to gigabytes (a YAML bomb), so nodes are counted with all aliases
    expanded.

    Raises:
        InvalidConfig: The document cannot be used; the message names `source`.
    """
    if len(content) > MAX_BYTES:
        raise InvalidConfig(
            f"{source} has {len(content)} bytes; a configuration may have {MAX_BYTES}. Put data"
            " into an extra file."
        )
    if content.count(b",") + content.count(b"\n") > MAX_SEPARATORS:
        raise InvalidConfig(
            f"{source} has more than {MAX_SEPARATORS} lines and commas. Put data into an extra"
            " file."
        )
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(content.decode("utf-8-sig"))
        node = loader.get_single_node()
        if node is None:
            return None
        if _count_nodes(node, {}, 0) > MAX_NODES:
            raise InvalidConfig(
                f"{source} expands to more than {MAX_NODES} values through its aliases. Write it"
                " without them."
            )
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise InvalidConfig(
            f"{source} cannot be read as YAML: {_brief(error)}. Correct it; only plain values are"
            " allowed."
        ) from error
    except (ValueError, TypeError) as error:
        # The cause is invalid UTF-8, an impossible date, or an unhashable key.
        raise InvalidConfig(f"{source} cannot be read as YAML: {error}. Correct it.") from error
    except RecursionError as error:
        raise InvalidConfig(f"{source} is nested too deeply. Make it flatter.") from error
    finally:
        if loader is not None:
            loader.dispose()


def load_yaml_file(path: Path) -> Any:
    """Parse a file, like `load_yaml`."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {error.strerror}. Check the path.") from error
    return load_yaml(content, source=str(path))


def _count_nodes(node: yaml.Node, counts: dict[int, int], depth: int) -> int:
    """Count nodes with all aliases expanded; a node that contains itself exceeds MAX_NODES."""
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value) // 16  # A long text with many aliases is a YAML bomb, too.
    size = counts.get(id(node))
    if size is not None:
        return size
    # If the node contains itself, its inner occurrence exceeds the limit.
    counts[id(node)] = MAX_NODES + 1
    if isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    else:
        children = node.value if isinstance(node, yaml.SequenceNode) else []
    size = 1 + sum(_count_nodes(child, counts, depth + 1) for child in children)
    counts[id(node)] = size
    return size


def _brief(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    return f"{problem} (line {mark.line + 1}, column {mark.column + 1})" if mark else str(problem)
