"""Better than round-to-nearest: GPTQ's rounding, AWQ's and SmoothQuant's scales.

All three know the inputs of a layer by their second moments H = X^T X, and AWQ and SmoothQuant by
the mean or the largest size of each input.

Legend: O outputs, I inputs, G groups of inputs.
"""

import torch
from torch import Tensor

from penstock.ptq.formats import Grid, Quantized, whole_range

_DAMPING = 0.01  # of the mean of H's diagonal, added to it
_COLUMNS = 128  # rounded before the rest of the matrix hears of it
_STEPS = 20  # of the search for AWQ's exponent
_SMOOTHING = 0.5  # share of an input's size that is moved into the weights
_SMALLEST = 1e-5


def error(weight_OI: Tensor, rounded_OI: Tensor, moments_II: Tensor) -> float:
    """Of the layer's output: the root of its mean square over that of the output itself."""
    difference = weight_OI - rounded_OI
    lost = ((difference @ moments_II) * difference).sum().clamp(min=0)
    whole = ((weight_OI @ moments_II) * weight_OI).sum().clamp(min=1e-30)
    return float((lost / whole).sqrt())


def compensated(weight_OI: Tensor, moments_II: Tensor, grid: Grid) -> Quantized:
    """GPTQ: columns are rounded one after the other, those of the largest inputs first, and the
    others make up for what a column lost."""
    order_I = moments_II.diagonal().argsort(descending=True)
    weight_OI, moments_II = weight_OI[:, order_I], moments_II[order_I][:, order_I]
    in_features = weight_OI.shape[1]
    diagonal_I = moments_II.diagonal()
    weight_OI[:, diagonal_I == 0] = 0  # never an input
    diagonal_I[diagonal_I == 0] = 1.0
    diagonal_I += _DAMPING * diagonal_I.mean()
    inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(moments_II))
    upper_II = torch.linalg.cholesky(inverse_II, upper=True)
    found_OI = torch.empty_like(weight_OI)
    for first in range(0, in_features, _COLUMNS):
        last = min(first + _COLUMNS, in_features)
        lost_OC = torch.empty_like(weight_OI[:, first:last])
        for column in range(first, last):
            w_O1, number = weight_OI[:, column : column + 1], int(order_I[column])
            found_OI[:, number] = w_O1[:, 0]
            lost_O1 = (w_O1 - grid.column(w_O1, number)) / upper_II[column, column]
            weight_OI[:, column:last] -= lost_O1 * upper_II[None, column, column:last]
            lost_OC[:, column - first] = lost_O1[:, 0]
        weight_OI[:, last:] -= lost_OC @ upper_II[first:last, last:]
    return grid.packed(found_OI)


def awq_scales(weights_OI: Tensor, moments_II: Tensor, mean_I: Tensor, group: int) -> Tensor:
    """What inputs of a layer are divided by, and its columns multiplied with: the power of the
    inputs' mean size that loses least."""
    best_I, least = torch.ones_like(mean_I), float("inf")
    for step in range(_STEPS):
        scales_I = mean_I.clamp(min=_SMALLEST).pow(step / _STEPS)
        scales_I = scales_I / (scales_I.amax() * scales_I.amin()).sqrt()
        scaled_OI = weights_OI * scales_I
        rounded = whole_range(scaled_OI, group).packed(scaled_OI).values_OI / scales_I
        if (found := error(weights_OI, rounded, moments_II)) < least:
            best_I, least = scales_I, found
    return best_I


def smoothing_scales(weights_OI: Tensor, largest_I: Tensor) -> Tensor:
    """The same, such that inputs and weights are equally hard to round."""
    weights_I = weights_OI.abs().amax(0).clamp(min=_SMALLEST)
    scales_I = largest_I.clamp(min=_SMALLEST).pow(_SMOOTHING) / weights_I.pow(1 - _SMOOTHING)
    return scales_I.clamp(min=_SMALLEST)
