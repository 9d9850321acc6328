"""A model's current or last rollout, as saved across restarts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tsx_runtime.core.rollouts.policy import Counts, RolloutPlan

Status = Literal["running", "finished", "went back", "stopped"]


class RolloutState(BaseModel):
    model_config = ConfigDict(extra="forbid")

    plan: RolloutPlan
    old: str  # the version that had the requests before
    default: str = ""  # the default version before
    before: dict[str, Any]  # the traffic that holds again when it goes back
    began: float  # time.time()
    changed: float  # time.time() of the last step, or of the end
    status: Status = "running"
    step: int = 0
    seconds: float = 0.0  # at this step, while the server ran
    new: Counts = Counts()  # at this step
    old_now: Counts = Counts()  # at this step
    old_last: Counts = Counts()  # at the step before, for the one at which the old version has no requests
    reason: str = ""  # of the last decision

    @property
    def share(self) -> float:
        """Percent."""
        return self.plan.steps[self.step]

    def weights(self, step: int) -> dict[str, float]:
        share = self.plan.steps[step]
        return {self.old: 100.0 - share, self.plan.version: share}

    @property
    def weights_after_a_restart(self) -> list[dict[str, float]]:
        """Those that are its own: a server that was killed may have kept the weights of a step, and not yet that it had begun."""
        return [self.weights(step) for step in (self.step, self.step + 1) if step < len(self.plan.steps)]
