"""The other nets of the models' table: convolutions, attention with a bias, experts, a state space."""

from __future__ import annotations

from benchmarks.attentions import evoformer, swin, t5
from benchmarks.convolutions import convnext, resnet, resnet_by_channel, resnet_folded, unet_block
from benchmarks.experts import deepseek, mamba, mamba_2, mixtral
from benchmarks.workloads import Workload

_RESNET = {"batch": 128, "width": 64, "depth": 6, "side": 224}
_RESNET_QUICK = {"batch": 2, "width": 8, "depth": 1, "side": 32}
_T5 = {"length": 512, "hidden": 1024, "layers": 6, "heads": 16, "vocabulary": 32128}

NETS: tuple[Workload, ...] = (
    Workload("ResNet-50, train, 128 images", resnet, _RESNET, _RESNET_QUICK, train=True),
    Workload(
        "ResNet-50 channel by channel, train, 128 images", resnet_by_channel, _RESNET, _RESNET_QUICK,
        train=True,
    ),
    Workload("ResNet-50, folded, 128 images", resnet_folded, _RESNET, _RESNET_QUICK, train=False),
    Workload(
        "ConvNeXt-T, train, 64 images", convnext,
        {"batch": 64, "width": 96, "depth": 9, "side": 224},
        {"batch": 2, "width": 8, "depth": 1, "side": 32}, train=True,
    ),
    Workload(
        "diffusion U-Net block, train, 8 x 320 x 64 x 64", unet_block,
        {"batch": 8, "channels": 320, "heads": 10, "side": 64},
        {"batch": 2, "channels": 16, "heads": 2, "side": 8}, train=True,
    ),
    Workload(
        "Swin-T stage, train, 64 x 28 x 28", swin,
        {"batch": 64, "side": 28, "channels": 192, "heads": 6, "window": 7, "layers": 4},
        {"batch": 2, "side": 8, "channels": 16, "heads": 2, "window": 4, "layers": 2}, train=True,
    ),
    Workload(
        "Evoformer block, train, 128 x 256", evoformer,
        {"batch": 1, "sequences": 128, "length": 256, "channels": 256, "pair": 128, "heads": 8},
        {"batch": 1, "sequences": 3, "length": 8, "channels": 32, "pair": 16, "heads": 4}, train=True,
    ),
    Workload(
        "T5-large 6 + 6 layers, train, 8 x 512", t5, {"batch": 8, **_T5},
        {"batch": 2, "length": 16, "hidden": 64, "layers": 2, "heads": 4, "vocabulary": 128}, train=True,
    ),
    Workload(
        "Mixtral 4 layers of 8 experts, train, 2 x 2048", mixtral,
        {"batch": 2, "length": 2048, "hidden": 1024, "inner": 3584, "layers": 4, "heads": 16, "experts": 8},
        {"batch": 2, "length": 16, "hidden": 64, "inner": 96, "layers": 1, "heads": 4, "experts": 4},
        train=True,
    ),
    Workload(
        "DeepSeek-V3's experts, train, 4 x 2048", deepseek,
        {"batch": 4, "length": 2048, "hidden": 2048, "inner": 1024, "experts": 32, "chosen": 4},
        {"batch": 2, "length": 16, "hidden": 32, "inner": 16, "experts": 8, "chosen": 2}, train=True,
    ),
    Workload(
        "Mamba-2 4 layers, train, 2 x 2048", mamba_2,
        {"batch": 2, "length": 2048, "hidden": 768, "layers": 4, "state": 64, "chunk": 64},
        {"batch": 2, "length": 20, "hidden": 32, "layers": 1, "state": 8, "chunk": 8}, train=True,
    ),
    Workload(
        "Mamba 2 layers, train, 2 x 64", mamba,
        {"batch": 2, "length": 64, "hidden": 768, "layers": 2},
        {"batch": 2, "length": 8, "hidden": 32, "layers": 1}, train=True,
    ),
)  # fmt: skip
