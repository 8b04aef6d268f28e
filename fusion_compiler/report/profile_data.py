"""What a profile consists of: the measured units of a step, and what ran outside of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from fusion_compiler.ir.breaks import GraphBreak
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Cost
from fusion_compiler.report.timeline import Event
from fusion_compiler.stitch.units import Unit


@dataclass(frozen=True)
class Measured:
    """One unit. calls: in a step. us: of one call, the median over the repetitions; kernels of the unit alone
    on a device, its range on the host. predicted: what the plan says of one call."""

    unit: Unit
    calls: int
    us: float
    predicted: Cost
    on_device: bool = True

    @property
    def bandwidth(self) -> float | None:
        """Predicted bytes over measured time, in bytes a second; None of host times."""
        moved = self.predicted.bytes_read + self.predicted.bytes_written
        return moved / (self.us * 1e-6) if self.on_device and self.us else None

    @property
    def error(self) -> float | None:
        """Predicted over measured time less one; None of host times."""
        return self.predicted.us / self.us - 1 if self.on_device and self.us else None


@dataclass(frozen=True)
class Unmatched:
    """A kernel that ran outside of every unit: calls and microseconds in a step, on average."""

    kernel: str
    calls: float
    us: float


@dataclass(frozen=True)
class ProfileData:
    """What a step took. All times are microseconds, medians over the repetitions.

    device: what it ran on. planned: the DeviceSpec that was predicted for.
    on_device: units and work are times of kernels on the device; otherwise, where nothing ran on a GPU, the
        host's in each unit's range, with the profiler's own cost in them, and no prediction is compared.
    step_us: from the call until the device is done, without a profiler. work_us: all kernels, or all ranges.
    units: what ran, in order. outside_us: work outside of every unit, or the host's time outside of ranges.
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
