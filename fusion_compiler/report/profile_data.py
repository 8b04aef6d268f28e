"""The data of a profile: the measured units of a step, and the work outside of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from fusion_compiler.ir.breaks import GraphBreak
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Cost
from fusion_compiler.report.timeline import Event
from fusion_compiler.stitch.units import Unit


@dataclass(frozen=True)
class Measured:
    """A `Measured` is one unit. calls: their number in a step. us: the time of one call, the median over the
    repetitions; on a device that of the unit's kernels alone, on the host that of its range. predicted: the
    plan's cost of one call."""

    unit: Unit
    calls: int
    us: float
    predicted: Cost
    on_device: bool = True

    @property
    def bandwidth(self) -> float | None:
        """Return predicted bytes over measured time, in bytes a second, or None for host times."""
        return self.predicted.moved / (self.us * 1e-6) if self.on_device and self.us else None

    @property
    def error(self) -> float | None:
        """Return predicted over measured time less one, or None for host times."""
        return self.predicted.us / self.us - 1 if self.on_device and self.us else None


@dataclass(frozen=True)
class Unmatched:
    """An `Unmatched` is a kernel that ran outside of every unit. calls, us: averages of a step, us in
    microseconds."""

    kernel: str
    calls: float
    us: float


@dataclass(frozen=True)
class ProfileData:
    """The data of a profile describe one step. All times are microseconds, medians over the repetitions.

    device: the device that ran the step. planned: the DeviceSpec of the predictions.
    on_device: True if times of units and work are those of kernels on the device. False if nothing ran on a
        GPU: times are the host's in each unit's range, including the profiler's own cost, and no prediction
        is compared.
    step_us: from the call until the device is done, without a profiler. work_us: all kernels, or all ranges.
    units: those that ran, in order. outside_us: work outside of every unit, or host time outside of ranges.
    """

    model: str
    device: str
    planned: str
    on_device: bool
    repetitions: int
    step_us: float
    work_us: float
    outside_us: float
    units: tuple[Measured, ...]
    unmatched: tuple[Unmatched, ...]
    plans: tuple[FusionPlan, ...] = field(default=(), repr=False, compare=False)
    events: tuple[Event, ...] = field(default=(), repr=False, compare=False)
    breaks: tuple[GraphBreak, ...] = field(default=(), repr=False, compare=False)
