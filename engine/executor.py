"""The seam between policy and mechanism. `engine.model_executor` runs a model; `engine.simulate` pretends to."""

from abc import ABC, abstractmethod

from engine.plan import StepPlan, StepResult


class DeviceFailure(RuntimeError):
    """The device cannot be trusted any more: the engine must end, not retry."""


class Executor(ABC):
    """Runs one plan at a time, on every rank alike."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the plan's row changes, then run its spans; an empty plan gives an empty result.

        Post: one result per span, in order. Row changes are applied exactly once even when this raises, so the caller
        may retry with `StepPlan.only`. Raises DeviceFailure when no retry can help; any other exception concerns the
        spans of this call. Never counts, never sees a request id.
        """
