"""Values that trial runs write over come back, wherever their copies lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion_compiler.runtime import preserved as module
from fusion_compiler.runtime.preserved import preserved


@pytest.mark.parametrize("room", [0, 1 << 20])
def test_values_come_back_and_no_version_counts_it(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL", 64)
    tensors = [torch.randn(4), torch.randn(64, 32).t()[::2], torch.randn(512, requires_grad=True)]
    before = [tensor.detach().clone() for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    with pytest.raises(ValueError, match="a trial"), preserved(tensors, room) as restore:
        for turn in range(2):
            for tensor in tensors:
                tensor.data.fill_(turn)
            restore()
            assert torch.equal(tensors[0], before[0])
            assert torch.equal(tensors[2], before[2]) == bool(room), "it is put back at the end"
        raise ValueError("a trial")
    assert all(map(torch.equal, tensors, before))
    assert [tensor._version for tensor in tensors] == versions


def test_copies_on_the_device_take_no_more_than_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SMALL", 16)
    to_host: list[int] = []
    to: Any = torch.Tensor.to

    def copied(tensor: torch.Tensor, *where: Any, **how: Any) -> torch.Tensor:
        to_host.append(tensor.nbytes)
        return to(tensor, *where, **how)

    monkeypatch.setattr(torch.Tensor, "to", copied)
    with preserved([torch.zeros(size) for size in (100, 4, 200, 50, 20)], 700):
        assert to_host == [800]
    with preserved([torch.zeros(size) for size in (100, 4, 25)], 0):
        assert to_host == [800, 400, 100]
