"""List the GPU's mathematical functions by name, on NumPy arrays of float64, for the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


def _torch(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Array], Array]:
    return lambda x: function(torch.from_numpy(np.ascontiguousarray(x))).numpy()


def _half_away(x: Array) -> Array:
    return np.trunc(x + np.copysign(np.where(np.abs(x) < 2.0**52, 0.5, 0.0), x))


# PTX's approximate instructions, by the name before `.approx`.
APPROXIMATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": np.tanh,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
}

# Functions that NumPy has under the same name.
NUMPYS = (
    *("abs", "cbrt", "ceil", "copysign", "cos", "cosh", "exp", "exp2", "expm1"),
    *("floor", "fmod", "hypot", "isfinite", "isinf", "isnan", "log", "log10", "log1p"),
    *("log2", "rint", "signbit", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)

# libdevice's functions, without the prefix and the suffix that say their width.
LIBDEVICE: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in NUMPYS},
    "fabs": np.abs,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "rcbrt": lambda x: 1 / np.cbrt(x),
    "cospi": lambda x: np.cos(np.pi * np.fmod(x, 2)),
    "cyl_bessel_i0": _torch(torch.special.i0),
    "cyl_bessel_i1": _torch(torch.special.i1),
    "div_rn": np.divide,
    "fdivide": np.divide,
    "erf": _torch(torch.erf),
    "erfc": _torch(torch.erfc),
    "erfcinv": lambda x: _torch(torch.erfinv)(1 - x),
    "erfcx": _torch(torch.special.erfcx),
    "erfinv": _torch(torch.erfinv),
    "exp10": lambda x: np.power(10.0, x),
    "fdim": lambda x, y: np.where(np.isnan(x) | np.isnan(y), np.nan, np.fmax(x - y, 0)),
    "finite": np.isfinite,
    "fma": lambda x, y, z: x * y + z,
    "rhypot": lambda x, y: 1 / np.hypot(x, y),
    "ilogb": lambda x: np.frexp(x)[1] - 1,
    "j0": _torch(torch.special.bessel_j0),
    "j1": _torch(torch.special.bessel_j1),
    "ldexp": lambda x, n: np.ldexp(x, n.astype(np.int64)),
    "scalbn": lambda x, n: np.ldexp(x, n.astype(np.int64)),
    "lgamma": _torch(torch.lgamma),
    "llrint": np.rint,
    "llround": _half_away,
    "logb": lambda x: np.frexp(x)[1] - 1,
    "nearbyint": np.rint,
    "normcdf": _torch(torch.special.ndtr),
    "normcdfinv": _torch(torch.special.ndtri),
    "pow": np.power,
    "powi": np.power,
    "rcp_rn": np.reciprocal,
    "round": _half_away,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rsqrt_rn": lambda x: 1 / np.sqrt(x),
    "saturate": lambda x: np.fmin(np.fmax(x, 0), 1),
    "sinpi": lambda x: np.sin(np.pi * np.fmod(x, 2)),
    "sqrt_rn": np.sqrt,
    "y0": _torch(torch.special.bessel_y0),
    "y1": _torch(torch.special.bessel_y1),
}
