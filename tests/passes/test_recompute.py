"""Values that clusters compute again rather than read, in backward passes of batch norms with channels
last."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fusion_compiler as fc
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ops.decompositions import images
from fusion_compiler.passes.rewrites import innermost_channels
from tests.passes.test_innermost_channels import Net, expanding


@pytest.fixture(scope="module")
def backward() -> FusionPlan:
    """The backward plan of a net with batch norms, ReLU and a grouped convolution, channels last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(innermost_channels, "has_tensor_units", lambda x: x.dtype is torch.bfloat16)
        patch.setattr(images, "_on_gpu", lambda x: x.is_floating_point())
        model = Net(expanding(6, 3, nn.ReLU, width=144)).to(torch.bfloat16)
        report = fc.explain(model, torch.empty(256, 3, 28, 28, dtype=torch.bfloat16), device="h200")
    return report.plans[1]


def test_a_batch_norms_gradient_stores_no_centred_image_in_float32(backward: FusionPlan) -> None:
    """Its second kernel subtracts the mean again; that is rounded to 16 bits, in the first kernel as well."""
    stored = [backward.dag.op(name).outputs[0] for c in backward.clusters for name in c.outputs]
    images = [value for value in stored if len(value.shape) == 4 and 1 not in value.shape]
    assert images and not [value for value in images if value.dtype is torch.float32]


def test_no_cluster_computes_only_a_mask_that_others_could(backward: FusionPlan) -> None:
    for cluster in backward.clusters:
        values = [backward.dag.op(name).outputs[0] for name in cluster.outputs]
        assert not all(value.dtype is torch.bool for value in values), cluster.name
