"""Every error and warning of the compiler: what happened, where, and what to do next.

An error is a class with a message template; raising one fills the template in. `where` is the
user's own source line when it is known.
"""

from __future__ import annotations

from typing import ClassVar


class FusionError(Exception):
    """Base of all errors. Subclasses set `template` (fields in braces) and `next_step`."""

    template: ClassVar[str] = "{detail}"
    next_step: ClassVar[str] = ""

    def __init__(self, where: object = None, **fields: object) -> None:
        self.where = where
        self.fields = fields
        text = self.template.format(**fields)
        if where is not None:
            text += f"\n  at {where}"
        if self.next_step:
            text += f"\n  what to do: {self.next_step.format(**fields)}"
        super().__init__(text)


class FusionWarning(UserWarning):
    """Something runs eager that could have been fused: names the place, the reason and what to do."""


class KernelError(FusionError):
    template = "kernel {kernel} failed to {action}: {detail}"
    next_step = "report it with the source from FUSION_DUMP=dir; strict=False runs this part eager"


class CacheError(FusionError):
    template = "the cache at {path} cannot be used: {detail}"
    next_step = "set FUSION_CACHE_DIR to a writable directory"
