"""The report of a check: each requirement with its limit, the measurement, and what to do if it
fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tsx_cli.bench.search.machine import MachineCounters, judge, noise_between, read_counters
from tsx_cli.common.output import milliseconds, print_json, print_table

MARKS = {True: "ok", False: "FAILED", None: "-"}


@dataclass(frozen=True)
class Check:
    """One check. `ok` is None if there was nothing to check with; `way` says why."""

    what: str
    ok: bool | None
    measured: str = ""
    limit: str = ""
    way: str = ""


@dataclass
class Report:
    contract: str
    model: str
    checks: list[Check] = field(default_factory=list)
    log: Sequence[str] = ()  # the last lines of a container that did not do what it must
    before: MachineCounters = field(default_factory=read_counters)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.ok is False]

    def add(
        self,
        what: str,
        ok: bool | None,
        measured: str = "",
        limit: str = "",
        way: str = "",
        *,
        timed: bool = False,
    ) -> bool:
        """Return whether it holds. `way` says what to do where it does not.

        `timed`: the limit is one of time. If the machine was busy, `way` begins with what
        disturbed it.
        """
        if (
            timed
            and ok is False
            and (busy := judge(noise_between(self.before, read_counters()), self.before.cores))
        ):
            way = (
                "the machine was busy, so run the check again when it is idle:"
                f" {'; '.join(busy)}. If it still fails: {way}"
            )
        self.checks.append(Check(what, ok, measured, limit, "" if ok else way))
        return bool(ok)

    def not_checked(self, what: str, samples: Sequence[object]) -> None:
        """Note that no request was answered with 200, so `what` was not measured."""
        way = (
            "no sample was answered with 200"
            if samples
            else "no sample; add --sample FILE, or pack one with tsx archive --sample FILE"
        )
        self.add(what, None, "not checked", "", way)

    def within(self, what: str, seconds: float, most: float, way: str) -> bool:
        return self.add(
            what, seconds <= most, time_of(seconds), f"within {time_of(most)}", way, timed=True
        )

    def as_json(self) -> dict[str, Any]:
        text = {"contract": self.contract, "model": self.model, "holds": not self.failed}
        return text | {"checks": [asdict(check) for check in self.checks], "log": list(self.log)}

    def show(self, *, as_json: bool) -> None:
        if as_json:
            print_json(self.as_json())
            return
        rows = [(MARKS[check.ok], check.what, check.measured, check.limit) for check in self.checks]
        print_table(["", f"{self.contract}: {self.model}", "measured", "must be"], rows)
        for check in self.checks:
            if check.way:
                print(
                    f"{MARKS[check.ok] if check.ok is False else 'note'}: {check.what}: {check.way}"
                )


def time_of(seconds: float) -> str:
    return milliseconds(1000 * seconds)
