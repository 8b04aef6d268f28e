"""Convolutional nets in plain PyTorch, as users write them; images lie channels last."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.workloads import Built


def conv_norm(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    """ResNet v1.5's block (He et al. 2016): [n, inputs, h, w] -> [n, 4 width, h / stride, w / stride]."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            *conv_norm(inputs, width, 1), nn.ReLU(inplace=True),
            *conv_norm(width, width, 3, stride), nn.ReLU(inplace=True), *conv_norm(width, 4 * width, 1),
        )  # fmt: skip
        self.downsample: nn.Module | None = None
        if stride > 1 or inputs != 4 * width:
            self.downsample = nn.Sequential(*conv_norm(inputs, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.convs(x)
        out += identity
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    """Images [n, 3, side, side] -> logits [n, classes]; ResNet-50 is width 64, depths (3, 4, 6, 3)."""

    def __init__(self, width: int, depths: tuple[int, ...], classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_norm(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        blocks: list[nn.Module] = []
        inputs = width
        for stage, depth in enumerate(depths):
            for i in range(depth):
                blocks.append(Bottleneck(inputs, width << stage, 2 if stage and not i else 1))
                inputs = 4 * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


class InvertedResidual(nn.Module):
    """MobileNetV2's block (Sandler et al. 2018): 1 x 1 to more channels, 3 x 3 of each, 1 x 1 to fewer."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        wider = [] if expansion == 1 else [*conv_norm(inputs, inner, 1), nn.ReLU6(inplace=True)]
        narrower = conv_norm(inner, outputs, 1)
        each = [*conv_norm(inner, inner, 3, stride, inner), nn.ReLU6(inplace=True)]
        self.conv = nn.Sequential(*wider, *each, *narrower)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNetV2(nn.Module):
    """Images [n, 3, side, side] -> logits [n, 1000]; stages of (expansion, channels, blocks, stride)."""

    STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
              (6, 320, 1, 1))  # fmt: skip

    def __init__(self, stages: int) -> None:
        super().__init__()
        layers, inputs = [*conv_norm(3, 32, 3, 2), nn.ReLU6(inplace=True)], 32
        for expansion, outputs, blocks, stride in self.STAGES[:stages]:
            for i in range(blocks):
                layers.append(InvertedResidual(inputs, outputs, stride if i == 0 else 1, expansion))
                inputs = outputs
        self.features = nn.Sequential(*layers, *conv_norm(inputs, 1280, 1), nn.ReLU6(inplace=True))
        self.classifier = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


class LayerNorm2d(nn.LayerNorm):
    """Over the channels of [n, c, h, w]."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Liu et al. 2022: depthwise 7x7, norm, two products with GELU, layer scale; [n, c, h, w] as it comes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1 = nn.Linear(channels, 4 * channels)
        self.pwconv2 = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(torch.full((channels,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Images [n, 3, side, side] -> logits [n, classes]."""

    def __init__(self, width: int, depths: tuple[int, ...], classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4), LayerNorm2d(width, eps=1e-6)]
        for stage, depth in enumerate(depths):
            channels = width << stage
            if stage:
                layers += [LayerNorm2d(channels // 2, eps=1e-6), nn.Conv2d(channels // 2, channels, 2, 2)]
            layers += [ConvNeXtBlock(channels) for _ in range(depth)]
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(width << (len(depths) - 1), eps=1e-6)
        self.head = nn.Linear(width << (len(depths) - 1), classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(x).mean((2, 3))))


class ResidualBlock(nn.Module):
    """Residual block of a U-Net (Ho et al. 2020): [n, inputs, h, w], time [n, t] -> [n, outputs, h, w]."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.skip = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class SpatialAttention(nn.Module):
    """Attention from every pixel to every other: [n, c, h, w] -> the same."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        tokens = self.norm(x).permute(0, 2, 3, 1).reshape(n, h * w, c)
        q, k, v = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + y.transpose(1, 2).reshape(n, c, h, w)


class UNetBlock(nn.Module):
    """One level of a diffusion U-Net: down, attention, up, joined with what came before."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        time = 4 * channels
        self.first = ResidualBlock(channels, channels, time)
        self.down = nn.Conv2d(channels, channels, 3, 2, 1)
        self.middle = ResidualBlock(channels, 2 * channels, time)
        self.attention = SpatialAttention(2 * channels, heads)
        self.up = nn.Conv2d(2 * channels, channels, 3, padding=1)
        self.last = ResidualBlock(2 * channels, channels, time)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.first(x, time)
        h = self.attention(self.middle(self.down(x), time))
        h = self.up(F.interpolate(h, scale_factor=2.0, mode="nearest"))
        return self.last(torch.cat((x, h), 1), time)


def resnet(batch: int, width: int, depth: int, side: int) -> Built:
    """depth: blocks of the third stage; ResNet-50 has 6."""
    depths = (3, 4, depth, 3) if depth > 1 else (1, 1)
    model = ResNet(width, depths).to(memory_format=torch.channels_last)
    return model, {"x": images(batch, 3, side)}


def resnet_by_channel(batch: int, width: int, depth: int, side: int) -> Built:
    """Its images and weights channel by channel, as PyTorch makes them."""
    model, inputs = resnet(batch, width, depth, side)
    return model.to(memory_format=torch.contiguous_format), {n: x.contiguous() for n, x in inputs.items()}


def mobilenet(batch: int, stages: int, side: int) -> Built:
    """stages: 7 of MobileNetV2."""
    model = MobileNetV2(stages).to(memory_format=torch.channels_last)
    return model, {"x": images(batch, 3, side)}


def resnet_folded(batch: int, width: int, depth: int, side: int) -> Built:
    """Every batch norm in the weights of the convolution before it."""
    model, inputs = resnet(batch, width, depth, side)
    model.eval()
    for module in list(model.modules()):
        _fold(module)
    return model, inputs


def _fold(module: nn.Module) -> None:
    children = list(module.named_children())
    for (name, conv), (norm_name, norm) in itertools.pairwise(children):
        if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            setattr(module, name, nn.utils.fusion.fuse_conv_bn_eval(conv, norm))
            setattr(module, norm_name, nn.Identity())


def convnext(batch: int, width: int, depth: int, side: int) -> Built:
    """depth: blocks of the third stage; ConvNeXt-T has 9."""
    depths = (3, 3, depth, 3) if depth > 1 else (1, 1)
    return ConvNeXt(width, depths).to(memory_format=torch.channels_last), {"x": images(batch, 3, side)}


def unet_block(batch: int, channels: int, heads: int, side: int) -> Built:
    model = UNetBlock(channels, heads).to(memory_format=torch.channels_last)
    x = images(batch, channels, side).requires_grad_()
    return model, {"x": x, "time": torch.randn(batch, 4 * channels)}


def images(batch: int, channels: int, side: int) -> Tensor:
    return torch.randn(batch, channels, side, side).contiguous(memory_format=torch.channels_last)
