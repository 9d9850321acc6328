"""The traffic policy of one model: weights of versions, sticky clients, rules, labels, a shadow.

The same form is used in three places: the JSON of the management API, `[models.NAME.traffic]` in a
`tsx.toml`, and the state that is saved across restarts.
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

# Words that a path of the API has in the place of a version, so no version may have these names.
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
MAX_WEIGHT = 1e9
MAX_CHARS = 4096
# The memory limit keeps a match, which each request needs, below a millisecond.
MAX_RE2_BYTES = 1 << 16
NEEDS_RE2 = (
    "it needs the package google-re2, whose matching time is bounded for every value: pip install"
    " 'tsx-serve[rules]'"
)
# The limit of rules, of weights and of labels: each request tries the rules one after another.
MAX_ENTRIES = 1000
MAX_TABLE_CHARS = 64 << 10  # total length of the patterns in one table
MAX_REPORTED_PROBLEMS = 5  # problems of one table that an error lists

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
    """Refuse a lone surrogate, which JSON can express but no request contains."""
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
    """Compile a pattern with RE2, whose time is linear in the length of the text.

    Raises:
        ValueError: The pattern is invalid, or RE2 is not installed.
    """
    pattern = _compile_cached(value)
    if isinstance(pattern, str):
        raise ValueError(pattern)
    return pattern


def warm_patterns(values: Sequence[str]) -> None:
    """Compile the patterns of one table into the cache, in a thread instead of the event loop."""
    if sum(map(len, values)) <= MAX_TABLE_CHARS and len(values) <= MAX_ENTRIES:
        for value in values:
            _compile_cached(value)


@lru_cache(maxsize=2048)
def _compile_cached(value: str) -> Pattern | str:
    """Return the compiled pattern, or the reason why it cannot be compiled."""
    try:
        import re2  # an optional dependency
    except ImportError:
        return NEEDS_RE2
    options = re2.Options()
    options.log_errors = False
    options.never_capture = True
    options.max_mem = MAX_RE2_BYTES
    try:
        pattern: Pattern = re2.compile(value, options)
    except re2.error as error:
        return (
            "it is not a regular expression of RE2, which has no lookaround and no backreferences:"
            f" {_reason(error)}"
        )
    return pattern


def _reason(error: Exception) -> str:
    reason = error.args[0] if error.args else ""
    return reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)


def _check_regex(value: str) -> str:
    compile_pattern(value)
    return value


def _check_sticky(value: str) -> str:
    match = _STICKY.fullmatch(_check_text(value))
    if match is None or (match[1] != "field" and not _TOKEN.fullmatch(match[2])):
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
    """Check the number of entries before they are validated."""
    if isinstance(entries, Sized) and len(entries) > MAX_ENTRIES:
        raise ValueError(f"there are {len(entries)} entries; at most {MAX_ENTRIES} can be")
    return entries


_limited = BeforeValidator(_check_count)
FieldPath = Annotated[str, AfterValidator(_check_path)]
Target = Annotated[str, AfterValidator(_check_target)]  # a version or a label
Label = Annotated[str, AfterValidator(_check_label)]
Weight = Annotated[int | float, Field(ge=0, le=MAX_WEIGHT, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_serializer(mode="wrap")
    def _serialize(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit fields that are not set."""
        return {name: value for name, value in dump(self).items() if value not in (None, [], {})}


class Rule(_Part):
    """A rule that sends requests with a certain header to one version.

    `matches` is a regular expression of RE2 that must match the whole value.
    """

    header: Annotated[str, AfterValidator(_check_header)]
    equals: Annotated[str, AfterValidator(_check_text)] | None = None
    matches: Annotated[str, Field(max_length=MAX_CHARS), AfterValidator(_check_regex)] | None = None
    to: Target

    @model_validator(mode="after")
    def _check_condition(self) -> Rule:
        if (self.equals is None) == (self.matches is None):
            raise ValueError("a rule has either 'equals' or 'matches'")
        return self


class Compare(_Part):
    """The settings of the comparison between a shadow's answers and those that clients get."""

    kind: Literal["numeric", "exact", "top-k", "plugin"] = "numeric"
    # Fields of JSON that are not compared: a.b, or a.*.b for the field b of each item of a.
    ignore: Annotated[list[FieldPath], _limited] = []
    # The relative tolerance of a number; by default it depends on the model's precision.
    rtol: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    # The absolute tolerance of a number.
    atol: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    k: Annotated[int, Field(ge=1, le=1000)] | None = None
    name: str | None = None  # the name of the plugin
    # The time that the plugin may take for one comparison, in seconds.
    timeout: Annotated[float, Field(gt=0, le=60)] | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> Compare:
        for name, kind in _KIND_OF_FIELD.items():
            if getattr(self, name) is not None and self.kind != kind:
                raise ValueError(f"'{name}' is for the kind {kind}, not for {self.kind}")
        if self.kind == "plugin" and self.name is None:
            raise ValueError("the kind plugin needs the 'name' of a plugin")
        if self.kind == "plugin" and self.ignore:
            raise ValueError(
                "'ignore' does not apply to a plugin, which itself decides what to compare"
            )
        return self


_KIND_OF_FIELD = {
    "rtol": "numeric",
    "atol": "numeric",
    "k": "top-k",
    "name": "plugin",
    "timeout": "plugin",
}


class Shadow(_Part):
    """A copy of some requests to another version, whose answers no client sees."""

    to: Target
    share: Annotated[int | float, Field(gt=0, le=100, allow_inf_nan=False)]  # percent
    compare: Compare = Compare()
    # The number of newest differing answers that are stored; 20 if not set.
    examples: Annotated[int, Field(ge=0, le=100)] | None = None


def _check_patterns(rules: object) -> object:
    """Check the total length of the patterns before one is compiled."""
    items = rules if isinstance(rules, list | tuple) else ()
    patterns = [
        rule.get("matches") if isinstance(rule, dict) else getattr(rule, "matches", None)
        for rule in items
    ]
    if (
        length := sum(len(pattern) for pattern in patterns if isinstance(pattern, str))
    ) > MAX_TABLE_CHARS:
        raise ValueError(
            f"their patterns have {length} characters together; at most {MAX_TABLE_CHARS} can be"
        )
    return rules


class Traffic(_Part):
    """The traffic policy of one model.

    Entries for a version have no effect while it is not registered or not ready.
    """

    weights: Annotated[dict[Target, Weight], _limited] = Field(
        default={}, description="by version or label; only their proportions matter"
    )
    sticky: Annotated[str, AfterValidator(_check_sticky)] | None = None
    # The first matching rule applies.
    rules: Annotated[list[Rule], BeforeValidator(_check_patterns), _limited] = []
    labels: Annotated[dict[Label, Target], _limited] = Field(
        default={}, description="the version of each label"
    )
    shadow: Shadow | None = None

    @model_validator(mode="after")
    def _check_labels(self) -> Traffic:
        """Refuse a label that points to a label."""
        for label, version in self.labels.items():
            if version in self.labels:
                raise ValueError(
                    f"label '{label}' must point to a version, but '{version}' is itself a label,"
                    f" for {self.labels[version]}"
                )
        return self

    @property
    def splits(self) -> bool:
        """Whether requests without a version may go to a version other than the default.

        This includes a shadow, which gets copies of them.
        """
        return bool(self.weights or self.rules or self.shadow)

    @property
    def targets(self) -> list[str]:
        """The versions and labels that the policy names."""
        rules = [rule.to for rule in self.rules]
        return [
            *self.weights,
            *self.labels.values(),
            *rules,
            *([self.shadow.to] if self.shadow else []),
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the policy as JSON values, without fields that are not set."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """Return a digest, which is equal for equal policies."""
        return sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:16]

    def changed(self, changes: Mapping[str, Any]) -> Traffic:
        """Return the policy with changes merged in; null removes a field (RFC 7396).

        Raises:
            ValueError: The result is not a valid policy.
        """
        return parse_traffic(_merge(self.as_json(), changes))

    def renamed(self, old: str, new: str) -> Traffic:
        """Return the policy with one version or label replaced by another."""

        def name(target: str) -> str:
            return new if target == old else target

        weights: dict[str, float] = {}
        for target, weight in self.weights.items():
            weights[name(target)] = weights.get(name(target), 0) + weight
        changes: dict[str, Any] = {
            "weights": weights,
            "rules": [rule.model_copy(update={"to": name(rule.to)}) for rule in self.rules],
            "labels": {label: name(version) for label, version in self.labels.items()},
            "shadow": self.shadow and self.shadow.model_copy(update={"to": name(self.shadow.to)}),
        }
        return self.model_copy(update=changes)


NOTHING = Traffic()


def parse_traffic(value: object) -> Traffic:
    """Validate a traffic policy.

    Raises:
        ValueError: The policy is invalid. The message names the fields, and suggests the
            nearest known key for an unknown one.
    """
    try:
        return Traffic.model_validate(value)
    except ValidationError as error:
        # Unknown keys come first, since they often cause the other problems.
        problems = sorted(
            error.errors(include_url=False, include_input=False),
            key=lambda problem: problem["type"] != "extra_forbidden",
        )
        texts = [_explain(**problem) for problem in problems[:MAX_REPORTED_PROBLEMS]]
        omitted_count = len(problems) - MAX_REPORTED_PROBLEMS
        raise ValueError(
            "; ".join(
                [*texts, f"and {omitted_count} more problems"] if omitted_count > 0 else texts
            )
        ) from error


def _explain(type: str, loc: tuple[int | str, ...], msg: str, **context: object) -> str:
    path = ".".join(str(part) for part in loc if part not in ("[key]", "int", "float"))
    if type == "extra_forbidden":
        names = {name for part in (Traffic, Rule, Shadow, Compare) for name in part.model_fields}
        return f"traffic has no '{path}'{suggestion(str(loc[-1]), names)}"
    return f"{path or 'traffic'}: {msg.removeprefix('Value error, ')}"


def _merge(old: object, new: object) -> object:
    if not isinstance(new, Mapping):
        return new
    result = dict(old) if isinstance(old, Mapping) else {}
    for key, value in new.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _merge(result.get(key), value)
    return result
