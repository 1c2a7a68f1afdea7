"""Widths that the Triton kernels are built for, and the block sizes of each: one place, read by the launcher and the tests.

Sizes are chosen so that every configuration compiles for sm_80, sm_90 and sm_100 without spilling a register and within the
163 KiB of shared memory of an A100 block.
"""

from typing import NamedTuple

QK_PARTS: dict[int, tuple[int, int]] = {16: (16, 0), 32: (32, 0), 48: (32, 16), 64: (64, 0), 96: (64, 32), 128: (128, 0)}
"""d_qk → the two power-of-two parts that it is computed in; a width in between pays for itself, not for the next power."""
V_WIDTHS = (32, 64, 128, 256, 512)
KERNELS = ("forward", "dkdv", "dq")


class Config(NamedTuple):
    """Block sizes and launch options of one kernel; `d_v` columns of the values per program or step, `parts` of them."""

    block_m: int
    block_n: int
    d_v: int
    parts: int
    warps: int
    stages: int


def config(kernel: str, d_qk: int, d_v: int, bytes_per_element: int) -> Config:
    """The configuration of `kernel` ("forward", "dkdv" or "dq") for widths of the tables above."""
    table = _FORWARD if kernel == "forward" else _DKDV if kernel == "dkdv" else _DQ
    for bytes_up_to, qk_widths, v_widths, (block_m, block_n, part, warps, stages) in table:
        if bytes_per_element <= bytes_up_to and d_qk in qk_widths and d_v in v_widths:
            part = min(part, d_v)
            return Config(block_m, block_n, part, d_v // part, warps, stages)
    raise ValueError(f"no Triton configuration for {kernel} at d_qk = {d_qk}, d_v = {d_v}")


_Row = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, int, int, int, int]]
_ALL_QK = tuple(QK_PARTS)
# A row: (bytes per element at most, d_qk, d_v, (block_m, block_n, columns of the values at a time, warps, stages)).
_FORWARD: tuple[_Row, ...] = (
    (2, (32, 64), (64,), (128, 64, 64, 8, 1)),
    (2, (128,), (64,), (128, 32, 64, 8, 2)),
    (2, _ALL_QK, (32, 64), (128, 64, 64, 8, 2)),
    (2, (16,), (128,), (128, 64, 128, 8, 2)),
    (2, (32, 64), (128,), (128, 32, 128, 8, 2)),
    (2, _ALL_QK, (128,), (64, 64, 128, 8, 2)),
    (2, (16, 32, 64), (256, 512), (64, 64, 256, 8, 2)),
    (2, _ALL_QK, (256, 512), (64, 32, 256, 8, 2)),
    (4, (16,), (128, 256, 512), (32, 32, 128, 4, 1)),
    (4, (16, 32), V_WIDTHS, (64, 32, 128, 8, 1)),
    (4, (48, 64, 96), (32,), (64, 32, 32, 8, 1)),
    (4, (48, 96), (64,), (32, 16, 64, 4, 1)),
    (4, (48, 64, 96), V_WIDTHS, (32, 32, 128, 4, 1)),
    (4, (128,), (32,), (32, 16, 32, 4, 1)),
    (4, (128,), V_WIDTHS, (16, 32, 64, 4, 1)),
)
_DKDV: tuple[_Row, ...] = (
    (2, (16,), (64,), (32, 32, 128, 8, 1)),
    (2, (32, 128), (32,), (32, 32, 128, 8, 1)),
    (2, (32, 64), (256,), (32, 64, 64, 8, 1)),
    (2, (48,), (512,), (32, 64, 64, 8, 1)),
    (2, (128,), (128, 256), (32, 32, 128, 8, 1)),
    (2, (16, 32), (32, 64, 128, 256), (32, 64, 128, 8, 1)),
    (2, (64, 128), (32, 64), (32, 64, 64, 8, 1)),
    (2, (64, 128), (128, 256), (32, 32, 128, 4, 1)),
    (2, (48, 96), (32, 64, 128, 256), (32, 32, 64, 8, 1)),
    (2, (16, 32, 64), (512,), (32, 64, 64, 8, 1)),
    (2, (128,), (512,), (32, 32, 64, 8, 1)),
    (2, (48, 96), (512,), (32, 32, 32, 4, 1)),
    (4, (32,), (64,), (16, 16, 64, 4, 1)),
    (4, (64,), (64,), (16, 32, 32, 8, 1)),
    (4, (16,), (64,), (16, 16, 32, 8, 1)),
    (4, (32,), (32,), (16, 16, 32, 8, 1)),
    (4, (96,), (64, 256, 512), (16, 16, 32, 8, 1)),
    (4, _ALL_QK, V_WIDTHS, (16, 16, 32, 4, 1)),
)
_DQ: tuple[_Row, ...] = (
    (2, (16, 64), (64,), (64, 64, 128, 8, 1)),
    (2, (32,), (512,), (32, 64, 128, 8, 1)),
    (2, (16, 64, 128), (512,), (64, 32, 128, 8, 1)),
    (2, (64,), (256,), (64, 32, 128, 8, 1)),
    (2, (96,), (512,), (64, 32, 64, 8, 1)),
    (2, (16, 32), (32, 64, 128), (64, 64, 128, 4, 2)),
    (2, (16, 32), (256, 512), (64, 64, 128, 8, 2)),
    (2, (64, 128), (32, 64, 128), (64, 64, 128, 8, 2)),
    (2, (64, 128), (256, 512), (32, 64, 128, 4, 2)),
    (2, (48, 96), (32, 64, 128), (64, 32, 128, 4, 2)),
    (2, (48, 96), (256, 512), (64, 32, 128, 8, 1)),
    (4, (96,), (32, 64), (16, 16, 32, 4, 1)),
    (4, (128,), (64,), (32, 16, 32, 8, 1)),
    (4, (128,), V_WIDTHS, (16, 16, 32, 4, 1)),
    (4, (96,), (128, 256, 512), (32, 16, 32, 8, 1)),
    (4, (64,), (32,), (32, 16, 32, 8, 1)),
    (4, _ALL_QK, V_WIDTHS, (32, 16, 32, 4, 1)),
)
