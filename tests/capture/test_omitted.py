"""Fields of a model's result that are left out in training, so that its loss runs in chunks."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_compiler as fc
from fusion_compiler.errors import FusionWarning, InvalidOptionError, OmittedFieldError
from fusion_compiler.passes.chunks import chunk
from fusion_compiler.passes.chunks.chunk import Limits
from tests.exactness import not_as_close

VOCABULARY, HIDDEN, ROWS = 72, 12, 10


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk, "LIMITS", Limits(bytes=0, width=6, rows=4, columns=30, alignment=8))


@dataclasses.dataclass
class Output:
    loss: Tensor | None
    logits: Tensor | None


class Head(nn.Module):
    """It returns a dataclass, a dict or a tuple."""

    def __init__(self, returned: type = Output) -> None:
        super().__init__()
        self.head, self.returned = nn.Linear(HIDDEN, VOCABULARY, bias=False), returned

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(x)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        if self.returned is tuple:
            return loss, logits
        return self.returned(loss=loss, logits=logits)


def fields_of(result: Any) -> dict[str, Any]:
    return vars(result) if isinstance(result, Output) else result


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, HIDDEN), torch.randint(0, VOCABULARY, (ROWS,))


@pytest.mark.parametrize("returned", [Output, dict])
def test_a_loss_beside_omitted_logits_runs_in_chunks(returned: type) -> None:
    model = Head(returned)
    truth = copy.deepcopy(model).double()
    x, labels = batch()
    fields_of(truth(x.double(), labels))["loss"].backward()
    fields_of(model(x, labels))["loss"].backward()
    eager, model.head.weight.grad = model.head.weight.grad, None
    compiled = fc.compile(model, backend="eager")
    compiled(x, labels)
    assert "the model returns it" in str(compiled.plan) and "omitted" not in str(compiled.plan)

    fast = fc.compile(model, backend="interpret", omit=("logits",))
    result = fast(x, labels)
    assert type(result) is returned and fields_of(result)["logits"] is None
    fields_of(result)["loss"].backward()
    assert not_as_close(model.head.weight.grad, eager, truth.head.weight.grad, 1e-7) is None
    (plan,) = (plan for plan in fast.plan if plan.name == "graph0.forward")
    notes = plan.notes
    assert notes["omitted results"] == "logits: None beside the loss, in training"
    assert notes["chunked loss"].startswith("done: ")


def test_logits_are_kept_without_a_loss_a_gradient_or_training() -> None:
    model = Head()
    fast = fc.compile(model, backend="eager", omit=("logits",))
    x, labels = batch()
    assert fast(x).logits is not None
    with torch.no_grad():
        assert fast(x, labels).logits is not None
    assert fast(x, labels).logits is None
    fast.eval()
    torch.testing.assert_close(fast(x, labels).logits, model(x, labels).logits)


def test_a_forward_that_another_library_sets_is_compiled_without_them_too() -> None:
    """Accelerate wraps `forward` of the instance, as for mixed precision."""
    fast = fc.compile(Head(), backend="eager", omit=("logits",))
    inner = fast.forward
    fast.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    result = fast(*batch())
    assert result.logits is None and result.loss is not None
    copied = copy.deepcopy(Head())
    assert copy.deepcopy(fc.compile(copied, backend="eager", omit=("logits",)))(*batch()).logits is None


def test_a_result_without_the_fields_warns_once() -> None:
    for model, omit in ((Head(tuple), ("logits",)), (Head(), ("logit",))):
        with pytest.warns(FusionWarning, match="leaves nothing out: the result, a") as caught:
            fast = fc.compile(model, backend="eager", omit=omit)
            fast(*batch())
            fast(*batch())
        assert len(caught) == 1
        torch._dynamo.reset()
    with pytest.raises(OmittedFieldError, match="has no field 'logit'"):
        fc.compile(Head(), backend="interpret", strict=True, omit=("logit",))(*batch())


def test_what_cannot_be_left_out_is_an_error() -> None:
    with pytest.raises(InvalidOptionError, match="a function returns its loss alone"):
        fc.compile(lambda x: x, omit=("logits",))
    with pytest.raises(InvalidOptionError, match="a tuple of names of fields"):
        fc.compile(Head(), omit="logits")  # pyright: ignore[reportCallIssue, reportArgumentType]
    fast = torch.compile(Head(), backend="fusion_compiler", options={"omit": ("logits",)})
    with pytest.raises(Exception, match=r"give omit to fusion_compiler\.compile\(model\)"):
        fast(*batch())


def test_transformers_models_train_without_logits() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, VOCABULARY, (2, 6))
    fast = fc.compile(model, backend="eager", fullgraph=True, omit=("logits",))
    result = fast(input_ids=ids, labels=ids, use_cache=False)
    assert type(result) is type(model(input_ids=ids)) and list(result.keys()) == ["loss"]
    assert result.logits is None and torch.equal(result[0], result.loss)
    torch.testing.assert_close(result.loss, model(input_ids=ids, labels=ids).loss)
    assert "chunked loss: done" in str(fast.plan)
