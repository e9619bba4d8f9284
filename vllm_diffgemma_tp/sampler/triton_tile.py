# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm_diffgemma_tp project
"""One tile of scores, x = softcap(logits) / temperature, on a GPU.

The same as ``tile.TorchTile``, which has the arithmetic in plain torch. Here x is never
stored: each pass reads the logits once, in their own dtype, and forms x in registers.

Both kernels must compute exactly the same x, because at a temperature of 0 its last bit
is worth thousands of nats. So they share ``_load_scores``, and both are launched with
``enable_fp_fusion=False``: fused into one multiply-add, x - peak would keep bits that
were rounded away in the peak, and its exp could overflow.
"""

# Triton types the kernels at launch.
# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl

from vllm_diffgemma_tp.sampler.tile import (
    MIN_TEMPERATURE,
    TileStatistics,
    finite_or_zero,
)

# Ids a program holds in registers at a time.
_MAX_CHUNK = 2048
_MIN_TEMPERATURE = tl.constexpr(MIN_TEMPERATURE)


@triton.jit
def _tanh(y):
    """tanh in fp32, without libdevice, which the interpreter lacks.

    Near 0, where 1 - 2e / (1 + e) would cancel, it is Cephes' odd polynomial for tanhf.
    """
    # Measured in the interpreter for |logit| <= 100 and softcap 30: the capped logit is
    # within 3.8e-6 of torch.tanh's (2.3e-7 relative). Simulated with the exponential
    # and the division both 2 ulp off, as PTX allows: within 7.7e-6.
    z = y * y
    series = tl.fma(z, -5.70498872745e-3, 2.06390887954e-2)
    series = tl.fma(z, series, -5.37397155531e-2)
    series = tl.fma(z, series, 1.33314422036e-1)
    series = tl.fma(z, series, -3.33332819422e-1)
    near = tl.fma(y * z, series, y)
    # The exponent is never positive, so nothing overflows.
    e = tl.exp(-2.0 * tl.abs(y))
    far = 1.0 - 2.0 * e / (1.0 + e)
    return tl.where(tl.abs(y) < 0.625, near, tl.where(y < 0.0, -far, far))


@triton.jit
def _load_scores(
    logits_ptr,
    logits_stride,
    excluded_ptr,
    excluded_stride,
    bias_ptr,
    temperature_ptr,
    softcap,
    row,
    ids,
    num_ids,
):
    """x of some ids of one row, fp32; -inf where excluded or beyond the tile."""
    allowed = ids < num_ids
    x = tl.load(logits_ptr + row * logits_stride + ids, mask=allowed, other=0.0)
    x = x.to(tl.float32)
    inv_temperature = tl.div_rn(
        1.0, tl.maximum(tl.load(temperature_ptr + row), _MIN_TEMPERATURE)
    )
    scale = inv_temperature
    if softcap is not None:
        x = _tanh(x * tl.div_rn(1.0, softcap))
        scale = scale * softcap
    x = x * scale
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + ids, mask=allowed, other=0.0)
        x = x + bias * inv_temperature
    if excluded_ptr is not None:
        excluded = tl.load(
            excluded_ptr + row * excluded_stride + ids, mask=allowed, other=True
        )
        allowed = allowed & ~excluded
    return tl.where(allowed, x, -float("inf"))


@triton.jit
def _statistics_kernel(
    peak_ptr,
    offset_ptr,
    mass_ptr,
    moment_ptr,
    source,  # The first arguments of _load_scores.
    num_ids,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Statistics of one block of one row. Grid (rows, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    lanes = tl.arange(0, CHUNK)

    peak = -float("inf")
    offset = 0
    mass = 0.0
    moment = 0.0
    for start in range(0, BLOCK_SIZE, CHUNK):
        x = _load_scores(*source, row, block * BLOCK_SIZE + start + lanes, num_ids)
        # Strictly greater: of equal maxima the first has the lowest id.
        chunk_peak = tl.max(x, axis=0)
        lowest = tl.min(tl.where(x == chunk_peak, lanes, CHUNK), axis=0)
        higher = chunk_peak > peak
        offset = tl.where(higher, start + lowest, offset)
        new_peak = tl.where(higher, chunk_peak, peak)

        # Rescale the sums so far to the new maximum. Before the first mass there is
        # nothing to rescale, and -inf - -inf would be NaN.
        shift = tl.where(peak == -float("inf"), 0.0, peak - new_peak)
        decay = tl.exp(shift)
        moment = decay * (moment + shift * mass)
        mass = decay * mass
        peak = new_peak

        shifted = x - tl.where(peak == -float("inf"), 0.0, peak)
        weights = tl.exp(shifted)
        mass += tl.sum(weights, axis=0)
        # -inf * 0 would be NaN.
        moment += tl.sum(tl.where(weights == 0.0, 0.0, shifted * weights), axis=0)

    # A maximum ignores NaN, a sum does not.
    peak = tl.where(mass == mass, peak, mass)
    entry = row * tl.num_programs(1) + block
    tl.store(peak_ptr + entry, peak)
    tl.store(offset_ptr + entry, offset)
    tl.store(mass_ptr + entry, mass)
    tl.store(moment_ptr + entry, moment)


@triton.jit
def _probs_kernel(
    probs_ptr,
    probs_stride,
    source,
    reference_ptr,
    block_ptr,
    num_ids,
    width,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """exp(x - reference) of ``width`` ids per row, 0 for an id without mass.

    Starts at the row's block, or at its first id if ``block_ptr`` is None. Grid (rows,
    chunks). May overwrite the logits: each program reads only the ids it writes.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    ids = columns
    if block_ptr is not None:
        ids = columns + tl.load(block_ptr + row) * BLOCK_SIZE
    x = _load_scores(*source, row, ids, num_ids)
    probs = tl.exp(x - tl.load(reference_ptr + row))
    tl.store(probs_ptr + row * probs_stride + columns, probs, mask=columns < width)


class TritonTile:
    """The tile of ``logits [rows, ids]`` of consecutive local ids; needs no scratch."""

    token_ids: torch.Tensor | None = None

    def __init__(
        self,
        logits: torch.Tensor,
        softcap: float | None,
        temperature: torch.Tensor,
        block_size: int,
        excluded: torch.Tensor | None,
        bias: torch.Tensor | None = None,
    ) -> None:
        """As ``TorchTile``, except:

        Args:
            logits: Kept, not copied; rows may be strided.
            block_size: A power of two.
            excluded: Rows may be strided.
        """
        assert logits.stride(1) == 1, "the ids of a row must be contiguous"
        assert excluded is None or excluded.stride(1) == 1
        num_rows, num_ids = logits.shape
        self._logits = logits
        self._block_size = block_size
        # What both kernels compute x from: the first arguments of `_load_scores`.
        self._source = (
            logits,
            logits.stride(0),
            excluded,
            0 if excluded is None else excluded.stride(0),
            bias,
            temperature.contiguous(),
            softcap,
        )
        grid = (num_rows, max(1, triton.cdiv(num_ids, block_size)))
        peak, mass, moment = torch.empty(3, *grid, device=logits.device).unbind()
        offset = torch.empty(grid, dtype=torch.int64, device=logits.device)
        _statistics_kernel[grid](
            peak,
            offset,
            mass,
            moment,
            self._source,
            num_ids,
            BLOCK_SIZE=block_size,
            CHUNK=min(block_size, _MAX_CHUNK),
            enable_fp_fusion=False,
        )
        self.statistics = TileStatistics(peak, offset, mass, moment)

    def block_weights(self, block: torch.Tensor) -> torch.Tensor:
        peak = self.statistics.peak.gather(1, block[:, None])[:, 0]
        weights = torch.empty(len(block), self._block_size, device=block.device)
        self._exp(finite_or_zero(peak), block, out=weights)
        return weights

    def probs(self, reference: torch.Tensor) -> torch.Tensor:
        self._exp(reference, None, out=self._logits)
        return self._logits

    def _exp(
        self, reference: torch.Tensor, block: torch.Tensor | None, out: torch.Tensor
    ) -> None:
        """exp(x - reference) of one block per row, or of whole rows, into ``out``."""
        num_rows, width = out.shape
        # Always a full chunk, even for few ids: then no two threads load the same id,
        # so none can read what another has already overwritten.
        _probs_kernel[(num_rows, triton.cdiv(width, _MAX_CHUNK))](
            out,
            out.stride(0),
            self._source,
            reference,
            block,
            self._logits.shape[1],
            width,
            BLOCK_SIZE=self._block_size,
            CHUNK=_MAX_CHUNK,
            enable_fp_fusion=False,
        )
