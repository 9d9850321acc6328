"""The report of a check.

For each requirement, it contains the limit, the measurement, and advice if the requirement is not
met.
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
    """A requirement and its result.

    `ok` is None if the requirement was not checked; `way` is the advice.
    """

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
    log: Sequence[str] = ()  # last lines of the log of a container that failed
    before: MachineCounters = field(default_factory=read_counters)

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.ok is False]

    def add(
        self,
        label: str,
        ok: bool | None,
        measured: str = "",
        limit: str = "",
        advice: str = "",
        *,
        timed: bool = False,
    ) -> bool:
        """Add a requirement, and return whether it is met.

        `advice` is shown if it is not met. With `timed`, the limit is a time. If the machine was
        busy, the advice then begins with this fact.
        """
        if (
            timed
            and ok is False
            and (
                disturbances := judge(
                    noise_between(self.before, read_counters()), self.before.cores
                )
            )
        ):
            advice = (
                "the machine was busy, so run the check again when it is idle:"
                f" {'; '.join(disturbances)}. If it still fails: {advice}"
            )
        self.checks.append(Check(label, ok, measured, limit, "" if ok else advice))
        return bool(ok)

    def not_checked(self, label: str, samples: Sequence[object]) -> None:
        """Add `label` as not checked, because no request was answered with 200."""
        advice = (
            "no sample was answered with 200"
            if samples
            else "no sample; add --sample FILE, or pack one with tsx archive --sample FILE"
        )
        self.add(label, None, "not checked", "", advice)

    def within(self, label: str, seconds: float, limit_s: float, advice: str) -> bool:
        return self.add(
            label,
            seconds <= limit_s,
            time_of(seconds),
            f"within {time_of(limit_s)}",
            advice,
            timed=True,
        )

    def as_json(self) -> dict[str, Any]:
        summary = {"contract": self.contract, "model": self.model, "holds": not self.failed}
        return summary | {"checks": [asdict(check) for check in self.checks], "log": list(self.log)}

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
