"""The limits of the accuracy loss.

Examples are `top1>=-0.5%`, `cosine>=0.999`, `perplexity<=+1%`, or a tolerance for every number.
"""

from __future__ import annotations

import math
import re
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tsx_cli.bench.search.accuracy import parse_tolerance
from tsx_cli.common.failure import UsageError
from tsx_runtime.settings.traffic_policy import Compare
from tsx_runtime.shared.suggestions import suggestion

SCORES = ("top1", "top5", "map", "cosine", "exact")  # metrics between 0 and 1
METRICS = (*SCORES, "perplexity")
_LIMIT = re.compile(r"\s*([A-Za-z_]\w*)\s*(>=|<=)\s*([+-]?)(\d+(?:\.\d+)?)\s*(%?)\s*")
_EXAMPLES = (
    "write a loss relative to the reference as top1>=-0.5% or perplexity<=+1%, a value as"
    " cosine>=0.999 or perplexity<=12.5"
)

Custom = Callable[[list[Any], list[Any]], float]


class Limit(NamedTuple):
    """The limit of one metric.

    `amount` is the largest accepted loss (0.005). If the limit is not `relative`, it is the worst
    accepted value of the metric.
    """

    metric: str
    amount: float
    relative: bool
    text: str
    tolerance: Compare | None = None  # set for the metric `tolerance`


def parse_limits(
    max_loss: str | None = None, tolerance: str | None = None, custom: str | None = None
) -> tuple[Limit, ...]:
    """Parse --max-loss and --tolerance; `custom` is the name of the --metric.

    Raises:
        UsageError: A limit is wrong or repeated.
    """
    limits = [_limit(part, custom) for part in max_loss.split(",")] if max_loss is not None else []
    for number, limit in enumerate(limits):
        if limit.metric in {earlier.metric for earlier in limits[:number]}:
            raise UsageError(f"--max-loss bounds {limit.metric} twice; give one limit")
    if custom is not None and custom not in {limit.metric for limit in limits}:
        limits.append(_limit(f"{custom}>=-0.5%", custom))
    if tolerance is not None:
        comparison = parse_tolerance(tolerance)
        limits.append(Limit("tolerance", 0.0, True, f"tolerance {tolerance.strip()}", comparison))
    return tuple(limits)


def load_metric(text: str) -> tuple[str, Custom]:
    """Return the name and the function of `--metric FILE.py:FUNCTION`.

    The file runs in this process, with the rights of the user. FUNCTION(answers, labels) returns a
    number; more is better. Answers are decoded JSON, or else bytes. Without --labels, the
    reference's answers are the labels.

    Raises:
        UsageError: The file has no such function, or cannot be imported.
    """
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise UsageError(f"--metric {text}: write the file and the function, such as metrics.py:f1")
    if name in (*METRICS, "tolerance"):
        raise UsageError(
            f"--metric {text}: {name} is a metric of tsx optimize; rename the function"
        )
    if not Path(file).is_file():
        raise UsageError(f"--metric {text}: there is no file '{file}'")
    try:
        namespace = runpy.run_path(file)
    except Exception as error:  # The user's file may raise anything.
        raise UsageError(
            f"--metric {text}: {file} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function = namespace.get(name)
    if not callable(function):
        raise UsageError(
            f"--metric {text}: {file} has no function '{name}'{suggestion(name, namespace)}"
        )
    return name, function


def _limit(part: str, custom: str | None) -> Limit:
    match = _LIMIT.fullmatch(part)
    if match is None:
        raise UsageError(
            f"--max-loss: '{part.strip()}' is not a limit; {_EXAMPLES}; separate several with"
            " commas"
        )
    name, sign, direction, number, percent = match.groups()
    known_metrics: Sequence[str] = METRICS if custom is None else (*METRICS, custom)
    if name not in known_metrics:
        all_known = f"there are {', '.join(known_metrics)}, or --metric FILE.py:FUNCTION"
        raise UsageError(
            f"--max-loss: there is no metric '{name}'{suggestion(name, known_metrics)}; {all_known}"
        )
    text, is_less_better, value = "".join(match.groups()), name == "perplexity", float(number)
    if (sign == "<=") != is_less_better:
        advice = (
            "less perplexity is better: write perplexity<=+1%"
            if is_less_better
            else f"more {name} is better: write {name}>=-0.5%"
        )
        raise UsageError(f"--max-loss: '{text}': {advice}")
    if percent:
        if direction != ("+" if is_less_better else "-"):
            raise UsageError(f"--max-loss: '{text}' does not say whether it is a loss; {_EXAMPLES}")
        if not 0 < value < (math.inf if is_less_better else 100):
            raise UsageError(
                f"--max-loss: '{text}': no number of rows shows a loss of {value:g} %; give more"
                " than 0 and less than 100"
            )
        return Limit(name, value / 100, True, text)
    value = -value if direction == "-" else value
    if not (value > 1 if is_less_better else name not in SCORES or 0 < value < 1):
        raise UsageError(
            f"--max-loss: '{text}': give a value"
            f" {'above 1' if is_less_better else 'between 0 and 1, as no rows show 1'}; {_EXAMPLES}"
        )
    return Limit(name, value, False, text)
