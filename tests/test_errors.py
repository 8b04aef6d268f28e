"""Every error names what happened, the user's line and the next step."""

from __future__ import annotations

import pickle
import re
import string
import sys
import threading
import warnings

import pytest
import torch
from torch import nn

import fusion_compiler as fc
import fusion_compiler.errors as errors
from fusion_compiler.errors import FusionError, FusionWarning, WarnOnce
from fusion_compiler.ir.dag import Source
from fusion_compiler.ir.device import DEVICES, device_spec, spec_of_properties
from fusion_compiler.options import Options

SOURCE = Source("model.mlp", "/home/me/model.py", 12, "    y = F.gelu(x)  ")


def all_errors() -> list[type[FusionError]]:
    def below(cls: type[FusionError]) -> list[type[FusionError]]:
        return [cls, *(deep for sub in cls.__subclasses__() for deep in below(sub))]

    return [cls for cls in below(FusionError)[1:] if cls.__module__ == errors.__name__]


def template_fields(cls: type[FusionError]) -> dict[str, object]:
    text = cls.template + cls.next_step
    return {name: f"<{name}>" for _, name, _, _ in string.Formatter().parse(text) if name}


@pytest.mark.parametrize("cls", all_errors(), ids=lambda cls: cls.__name__)
def test_message_has_fields_place_and_next_step(cls: type[FusionError]):
    fields = template_fields(cls)
    error = cls(SOURCE, **fields)
    text = str(error)
    assert all(str(value) in text for value in fields.values())
    assert "\n  at /home/me/model.py:12: y = F.gelu(x)  (in model.mlp)" in text
    assert "\n  what to do: " in text and cls.next_step
    assert "{" not in text
    documented = re.findall(r"\w+", (cls.__doc__ or "").partition("Fields:")[2])
    assert set(fields) <= set(documented), "the docstring lists the fields"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls and str(again) == text and again.where == SOURCE


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (errors.NotCallableError(got="Tensor"), "compile() takes an nn.Module or a function, not Tensor\n"),
        (
            errors.RewriteNotEqualError(
                pattern="norm", what="output 0", error="3.1e-02 (float64)", counterexample="x = [nan, nan]"
            ),
            "the replacement of pattern norm does not equal the pattern: output 0 differs by "
            "3.1e-02 (float64)\n  counterexample: x = [nan, nan]\n",
        ),
        (
            errors.PatternConflictError(first="a", second="b", op="softmax_3"),
            "patterns a and b both claim op softmax_3\n  what to do: remove one of them, or order them",
        ),
        (
            errors.HardwareExceededError(
                kernel="k", resource="shared memory", needed="300 KB", available="227 KB", device="h200"
            ),
            "kernel k needs 300 KB of shared memory, but h200 has 227 KB",
        ),
        (errors.MissingTritonError(detail="No module named 'triton'"), "compile(..., backend='eager')"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, FusionError) else "",
)
def test_text(error: FusionError, text: str):
    assert text in str(error)


def test_errors_are_the_builtin_ones_too():
    assert issubclass(errors.NotCallableError, TypeError)
    assert issubclass(errors.InvalidOptionError, ValueError)
    assert issubclass(errors.MissingTritonError, ImportError)
    assert issubclass(errors.HardwareExceededError, errors.KernelError)


def test_unknown_option_suggests_the_closest_name():
    with pytest.raises(errors.UnknownOptionError) as raised:
        Options.of(stict=True)
    text = str(raised.value)
    assert "unknown option 'stict'; did you mean 'strict'?" in text
    assert "the options are backend, numerics, dynamic, verify, strict, fullgraph, device, tune" in text
    with pytest.raises(errors.UnknownOptionError) as raised:
        Options.of(zzz=1)
    assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backend": "cuda"}, "option backend='cuda' is not valid\n  what to do: give backend one of auto"),
        ({"numerics": "fp16"}, "option numerics='fp16' is not valid"),
        ({"strict": 1}, "option strict=1 is not valid\n  what to do: give strict True or False"),
        ({"dynamic": "yes"}, "give dynamic None, True or False"),
        ({"graph_memory": 1.5}, "give graph_memory a share of the free memory from 0.0 to 1.0"),
        ({"graph_memory": -1}, "option graph_memory=-1 is not valid"),
        ({"graph_memory": True}, "option graph_memory=True is not valid"),
        ({"device": "h2000"}, "device 'h2000' has no kernels"),
        ({"device": 3.5}, "device 3.5 has no kernels"),
    ],
)
def test_invalid_option(options: dict[str, object], text: str):
    with pytest.raises(FusionError, match=re.escape(text)):
        Options.of(**options)
    with pytest.raises(FusionError, match=re.escape(text)):
        Options(**options)  # pyright: ignore[reportArgumentType]


def test_valid_options():
    assert Options.of(backend="interpret", device="H200", dynamic=None) == Options("interpret", device="H200")


def test_warn_once_per_object():
    first, second = WarnOnce(), WarnOnce()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        assert first.warn("a", "the first")
        assert not first.warn("a", "the first")
        assert first.warn("b", "another")
        assert second.warn("a", "the first")
    assert [str(w.message) for w in caught] == ["the first", "another", "the first"]
    assert all(w.category is FusionWarning for w in caught)


def test_warning_is_shown_at_the_users_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        WarnOnce().warn("a", "text", SOURCE)
        WarnOnce().warn("a", "text")
        line = sys._getframe().f_lineno - 1
    assert (caught[0].filename, caught[0].lineno) == ("/home/me/model.py", 12)
    assert (caught[1].filename, caught[1].lineno) == (__file__, line)


def test_warn_once_from_many_threads():
    warned, count = WarnOnce(), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=lambda: count.append(warned.warn("k", "m"))) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(count) == 1


def test_fall_back_warns_or_raises():
    error = errors.KernelError(SOURCE, kernel="gelu_0", action="compile", detail="PTX error")
    with pytest.warns(FusionWarning, match=r"(?s)gelu_0 failed to compile: PTX error.*this part runs eager"):
        WarnOnce().fall_back("gelu_0", error)
    with pytest.raises(errors.KernelError, match="PTX error"):
        WarnOnce(strict=True).fall_back("gelu_0", error)


class Properties:
    """The properties of a GPU that no row names, as torch.cuda.get_device_properties returns them."""

    name = "NVIDIA L40S"
    major, minor = 8, 9
    multi_processor_count = 142
    max_threads_per_multi_processor = 1536
    L2_cache_size = 96 << 20
    memory_clock_rate = 9_001_000  # kHz
    memory_bus_width = 384


def test_unknown_gpu_is_made_from_its_properties():
    with pytest.warns(
        FusionWarning, match=r"(?s)no hardware numbers for 'NVIDIA L40S'.*Add a row to DEVICES"
    ):
        spec = spec_of_properties(Properties())
    assert (spec.target, spec.sms, spec.l2_bytes) == ("sm_89", 142, 96 << 20)
    assert spec.copy_bandwidth == pytest.approx(864e9 * 4.28 / 4.8, rel=1e-3)  # datasheet: 864 GB/s


def test_known_gpu_with_fewer_multiprocessors():
    class Slice(Properties):
        name, multi_processor_count = "NVIDIA H200 MIG 3g.71gb", 60

    spec = spec_of_properties(Slice())
    assert (spec.name, spec.sms, spec.target) == ("h200", 60, "sm_90")


def test_device_spec():
    assert [device_spec(spec.name) for spec in DEVICES] == list(DEVICES)
    assert device_spec("cpu").name == device_spec(torch.device("meta")).name == "h200"
    if not torch.cuda.is_available():
        assert device_spec("cuda:0").name == "h200"
    with pytest.raises(errors.UnsupportedDeviceError, match="plan for one of h200, h100, a100"):
        device_spec("h300")
    with pytest.raises(errors.UnsupportedDeviceError):
        device_spec("mps")


def test_rows_agree_with_datasheets():
    """float32 peak in TFLOPS, as the vendors print it (a multiply-add counts as two)."""
    datasheet = {"h200": 67, "h100": 67, "a100": 19.5, "b200": 75, "mi300x": 163.4, "rtx4090": 82.6}
    for spec in DEVICES:
        assert 2 * spec.fp32_per_s / 1e12 == pytest.approx(datasheet[spec.name], rel=0.02)


def test_the_device_is_named_once_for_all_models():
    x = torch.randn(2, 8)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            fc.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()))(x)
    assert ["is on cpu" in str(w.message) for w in warned] == [True]


def test_a_filter_that_raises_the_warning_raises_it_for_every_model():
    x = torch.randn(2, 8)
    for _ in range(2):
        with pytest.raises(Exception, match="is on cpu"):
            fc.compile(nn.Sequential(nn.Linear(8, 8), nn.GELU()))(x)
