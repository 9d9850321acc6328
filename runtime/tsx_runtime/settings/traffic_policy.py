"""The traffic policy of one model: shares of versions, sticky clients, rules, labels, a shadow.

One form in three places: the JSON of the management API, `[models.NAME.traffic]` of a `tsx.toml`,
and what is kept across restarts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Sized
from functools import lru_cache
from hashlib import sha256
from typing import Annotated, Any, Literal, Protocol

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from tsx_archiver import is_model_name
from tsx_runtime.shared.suggestions import suggestion

# What stands in paths where a version could.
RESERVED = frozenset(
    {
        "all",
        "default",
        "labels",
        "record",
        "rollback",
        "rollout",
        "set-default",
        "shadow",
        "traffic",
    }
)
MOST = 1e9  # of a weight
LONGEST = 4096  # characters of a pattern
# Bytes of memory for one: what is tried on each request must not take longer than a millisecond.
LARGEST = 1 << 16
NEEDS_RE2 = (
    "it needs the package google-re2, whose matching time is bounded for every value: pip install"
    " 'tsx-serve[rules]'"
)
# Rules, weights and labels, of each: rules are tried one after the other on each request.
MOST_ENTRIES = 1000
LONGEST_PATTERNS = 64 << 10  # characters of all patterns of one table
EXPLAINED = 5  # problems of one table that an error names

_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_STICKY = re.compile(r"(header|cookie|field):(.+)")


def _check_target(value: str) -> str:
    if not is_model_name(value):
        raise ValueError(
            "a version or label consists of letters, digits, '_', '-' and '.', and begins with a"
            " letter or digit"
        )
    return value


def _check_label(value: str) -> str:
    if value in RESERVED:
        raise ValueError(f"'{value}' cannot be a label: it is a reserved word")
    return _check_target(value)


def _check_text(value: str) -> str:
    """JSON can say half of a pair of surrogates, which no bytes of a request are."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{value!r} contains half of a character (a lone surrogate), which no request can"
            " contain"
        ) from error
    return value


def _check_header(value: str) -> str:
    if not _TOKEN.fullmatch(value):
        raise ValueError(f"{value!r} cannot be the name of a header")
    return value


class Pattern(Protocol):
    def fullmatch(self, text: str) -> object | None: ...


def compile_pattern(value: str) -> Pattern:
    """By RE2, whose time is linear in the length of what it is tried on: Python's own may take
    years. Raises ValueError.
    """
    made = _compiled(value)
    if isinstance(made, str):
        raise ValueError(made)
    return made


def warm_patterns(values: Sequence[str]) -> None:
    """Compile what one table may have, so that the event loop finds it done."""
    if sum(map(len, values)) <= LONGEST_PATTERNS and len(values) <= MOST_ENTRIES:
        for value in values:
            _compiled(value)


@lru_cache(maxsize=2048)
def _compiled(value: str) -> Pattern | str:
    """Or why it is none."""
    try:
        import re2  # here, because it is an extra
    except ImportError:
        return NEEDS_RE2
    options = re2.Options()
    options.log_errors, options.never_capture, options.max_mem = False, True, LARGEST
    try:
        made: Pattern = re2.compile(value, options)
    except re2.error as error:
        return (
            "it is not a regular expression of RE2, which has no lookaround and no backreferences:"
            f" {_reason(error)}"
        )
    return made


def _reason(error: Exception) -> str:
    reason = error.args[0] if error.args else ""
    return reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)


def _check_pattern(value: str) -> str:
    compile_pattern(value)
    return value


def _check_sticky(value: str) -> str:
    found = _STICKY.fullmatch(_check_text(value))
    if found is None or (found[1] != "field" and not _TOKEN.fullmatch(found[2])):
        raise ValueError(
            "it takes header:NAME, cookie:NAME, or field:NAME of a JSON body (of one inside"
            " another: field:user.id)"
        )
    return value


def _check_path(value: str) -> str:
    if not all(_check_text(value).split(".")):
        raise ValueError("it takes the name of a field, or of one inside others: outputs.*.name")
    return value


def _check_count(entries: object) -> object:
    """Before each is looked at."""
    if isinstance(entries, Sized) and len(entries) > MOST_ENTRIES:
        raise ValueError(f"there are {len(entries)} entries; at most {MOST_ENTRIES} can be")
    return entries


_few = BeforeValidator(_check_count)
FieldPath = Annotated[str, AfterValidator(_check_path)]
Target = Annotated[str, AfterValidator(_check_target)]  # a version, or a label
Label = Annotated[str, AfterValidator(_check_label)]
Weight = Annotated[int | float, Field(ge=0, le=MOST, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_serializer(mode="wrap")
    def _short(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what is not set."""
        return {name: value for name, value in whole(self).items() if value not in (None, [], {})}


class Rule(_Part):
    """Requests with such a header go to one version.

    `matches` is a regular expression of RE2 for the whole value.
    """

    header: Annotated[str, AfterValidator(_check_header)]
    equals: Annotated[str, AfterValidator(_check_text)] | None = None
    matches: Annotated[str, Field(max_length=LONGEST), AfterValidator(_check_pattern)] | None = None
    to: Target

    @model_validator(mode="after")
    def _one_of_two(self) -> Rule:
        if (self.equals is None) == (self.matches is None):
            raise ValueError("a rule has either 'equals' or 'matches'")
        return self


class Compare(_Part):
    """How the answers of a shadow are compared with those that clients got
    (`core/shadowing/comparison.py`).
    """

    kind: Literal["numeric", "exact", "top-k", "plugin"] = "numeric"
    ignore: Annotated[
        list[FieldPath], _few
    ] = []  # fields of JSON that do not count: a.b, or a.*.b for those of each item
    # How far a number may be off, as a part of the client's; else by precision.
    rtol: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    # And how far in any case.
    atol: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    k: Annotated[int, Field(ge=1, le=1000)] | None = None
    name: str | None = None  # of the plugin
    # Seconds that the plugin may take for one comparison.
    timeout: Annotated[float, Field(gt=0, le=60)] | None = None

    @model_validator(mode="after")
    def _fits_kind(self) -> Compare:
        for name, kind in _BELONGS.items():
            if getattr(self, name) is not None and self.kind != kind:
                raise ValueError(f"'{name}' is for the kind {kind}, not for {self.kind}")
        if self.kind == "plugin" and self.name is None:
            raise ValueError("the kind plugin needs the 'name' of a plugin")
        if self.kind == "plugin" and self.ignore:
            raise ValueError(
                "'ignore' does not apply to a plugin, which itself decides what to compare"
            )
        return self


_BELONGS = {
    "rtol": "numeric",
    "atol": "numeric",
    "k": "top-k",
    "name": "plugin",
    "timeout": "plugin",
}


class Shadow(_Part):
    """A share of the requests goes to another version as well, whose answers no client sees."""

    to: Target
    share: Annotated[int | float, Field(gt=0, le=100, allow_inf_nan=False)]  # percent
    compare: Compare = Compare()
    # Of answers that differ are kept, the newest; 20 where it is not set.
    examples: Annotated[int, Field(ge=0, le=100)] | None = None


def _check_patterns(rules: object) -> object:
    """Before any is compiled."""
    given = rules if isinstance(rules, list | tuple) else ()
    patterns = [
        rule.get("matches") if isinstance(rule, dict) else getattr(rule, "matches", None)
        for rule in given
    ]
    if (
        length := sum(len(pattern) for pattern in patterns if isinstance(pattern, str))
    ) > LONGEST_PATTERNS:
        raise ValueError(
            f"their patterns have {length} characters together; at most {LONGEST_PATTERNS} can be"
        )
    return rules


class Traffic(_Part):
    """The traffic policy of one model.

    Entries for a version that is not registered or not ready have no effect until it is.
    """

    weights: Annotated[dict[Target, Weight], _few] = Field(
        default={}, description="by version or label; only their proportions matter"
    )
    sticky: Annotated[str, AfterValidator(_check_sticky)] | None = None
    rules: Annotated[
        list[Rule], BeforeValidator(_check_patterns), _few
    ] = []  # the first that fits counts
    labels: Annotated[dict[Label, Target], _few] = Field(
        default={}, description="the version of each label"
    )
    shadow: Shadow | None = None

    @model_validator(mode="after")
    def _labels_mean_versions(self) -> Traffic:
        """A label of a label would mean nothing: no version has its name."""
        for label, version in self.labels.items():
            if version in self.labels:
                raise ValueError(
                    f"label '{label}' must point to a version, but '{version}' is itself a label,"
                    f" for {self.labels[version]}"
                )
        return self

    @property
    def splits(self) -> bool:
        """Whether requests that name no version may go elsewhere than to the default one, or to
        another as well.
        """
        return bool(self.weights or self.rules or self.shadow)

    @property
    def targets(self) -> list[str]:
        """The versions and labels that it names."""
        rules = [rule.to for rule in self.rules]
        return [
            *self.weights,
            *self.labels.values(),
            *rules,
            *([self.shadow.to] if self.shadow else []),
        ]

    def as_json(self) -> dict[str, Any]:
        """As JSON, without what is not set."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """The same for the same."""
        return sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:16]

    def changed(self, changes: Mapping[str, Any]) -> Traffic:
        """With changes merged in, where null removes (RFC 7396). Raises ValueError."""
        return parse_traffic(_merged(self.as_json(), changes))

    def renamed(self, old: str, new: str) -> Traffic:
        """With another version in the place of one."""

        def name(word: str) -> str:
            return new if word == old else word

        weights: dict[str, float] = {}
        for word, weight in self.weights.items():
            weights[name(word)] = weights.get(name(word), 0) + weight
        changes: dict[str, Any] = {
            "weights": weights,
            "rules": [rule.model_copy(update={"to": name(rule.to)}) for rule in self.rules],
            "labels": {label: name(version) for label, version in self.labels.items()},
            "shadow": self.shadow and self.shadow.model_copy(update={"to": name(self.shadow.to)}),
        }
        return self.model_copy(update=changes)


NOTHING = Traffic()


def parse_traffic(given: object) -> Traffic:
    """Raises ValueError in words, which name the place and, of a key that is not known, the
    nearest.
    """
    try:
        return Traffic.model_validate(given)
    except ValidationError as error:
        # An unknown key often makes the other problems.
        problems = sorted(
            error.errors(include_url=False, include_input=False),
            key=lambda problem: problem["type"] != "extra_forbidden",
        )
        texts = [_explained(**problem) for problem in problems[:EXPLAINED]]
        more = len(problems) - EXPLAINED
        raise ValueError(
            "; ".join([*texts, f"and {more} more problems"] if more > 0 else texts)
        ) from error


def _explained(type: str, loc: tuple[int | str, ...], msg: str, **more: object) -> str:
    place = ".".join(str(part) for part in loc if part not in ("[key]", "int", "float"))
    if type == "extra_forbidden":
        names = {name for part in (Traffic, Rule, Shadow, Compare) for name in part.model_fields}
        return f"traffic has no '{place}'{suggestion(str(loc[-1]), names)}"
    return f"{place or 'traffic'}: {msg.removeprefix('Value error, ')}"


def _merged(old: object, new: object) -> object:
    if not isinstance(new, Mapping):
        return new
    result = dict(old) if isinstance(old, Mapping) else {}
    for key, value in new.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merged(result.get(key), value)
    return result
