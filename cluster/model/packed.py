"""Linear layers with their weights laid out once for oneDNN's CPU kernels.

torch has this layout only behind its compiler, so the two operators used here are private ones:
each layer is compared with the plain product when it is made, and the log says which path is on.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

_TOLERANCE = 2.0**-6
"""Largest difference from the plain product, against the largest output: a few bf16 roundings."""


class PackedLinear(nn.Module):
    """A bf16 linear layer in oneDNN's own layout; for inference on a CPU only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias`` over the last dimension."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y


def pack_linears(model: nn.Module) -> int:
    """Replace the model's bf16 linear layers, freeing each original; returns how many.

    All or none: where the operators are missing or one layer's result differs, the model stays
    as it was and a warning says why.
    """
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    reason = _why_not(list(linears.values()))
    if reason:
        logger.warning("linear=plain layers=%d reason=%s", len(linears), reason)
        return 0
    for name in list(linears):
        linear = linears.pop(name)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, PackedLinear(linear))
    logger.info("linear=packed")
    return sum(isinstance(module, PackedLinear) for module in model.modules())


def _why_not(linears: list[nn.Linear]) -> str:
    """Return why packing must not be used for these layers, or an empty string."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "no oneDNN in this torch"
    for linear in linears:
        if linear.weight.dtype is not torch.bfloat16 or linear.weight.device.type != "cpu":
            return f"{linear.weight.dtype} on {linear.weight.device.type}"
        try:
            packed = PackedLinear(linear)
            error = max(_difference(linear, packed, num_rows) for num_rows in (1, 8))
        except (AttributeError, RuntimeError, TypeError) as exc:
            return f"operator failed: {exc}"
        if not error <= _TOLERANCE:
            return f"results differ by {error:.3g}"
    return ""


@torch.inference_mode()
def _difference(linear: nn.Linear, packed: PackedLinear, num_rows: int) -> float:
    count = num_rows * linear.in_features
    x = torch.linspace(-1, 1, count).cos().mul(2).view(1, num_rows, -1).to(linear.weight.dtype)
    plain, other = linear(x).float(), packed(x).float()
    return float((plain - other).abs().max() / plain.abs().max().clamp_min(1e-6))
