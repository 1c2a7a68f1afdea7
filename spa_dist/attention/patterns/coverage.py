"""No feature may vanish and no projected dimension may be dead: every row and column of a support holds a non-zero.

At d_k′ = 32 and 95 % sparsity an i.i.d. random S leaves an expected 19 % of its rows empty, and those query dimensions
are lost. The repair moves non-zeros and keeps their number.
"""

from torch import Tensor


def cover(mask: Tensor, priority: Tensor) -> tuple[Tensor, int]:
    """Move non-zeros into the empty rows and columns of `mask`; returns the new mask and how many were moved.

    mask bool [rows, columns] with at least max(rows, columns) non-zeros; priority [rows, columns], all distinct, settles
    which non-zero gives way (the lowest of the fullest row or column), so an exchangeable mask stays exchangeable.

    An empty row takes a non-zero from the fullest row, within that non-zero's column: column counts do not change, and
    with at least as many non-zeros as rows an empty row means that some row holds two. Then the same for columns. So each
    empty row or column costs exactly one move, and no move undoes another.
    """
    if int(mask.sum()) < max(mask.shape):
        raise ValueError(f"{int(mask.sum())} non-zeros cannot cover {mask.shape[0]} rows and {mask.shape[1]} columns")
    mask, row_moves = _fill_rows(mask.clone(), priority)
    mask, column_moves = _fill_rows(mask.T, priority.T)
    return mask.T.contiguous(), row_moves + column_moves


def _fill_rows(mask: Tensor, priority: Tensor) -> tuple[Tensor, int]:
    empty = (~mask.any(dim=1)).nonzero().flatten().tolist()
    for row in empty:
        counts = mask.sum(dim=1, keepdim=True)
        candidates = mask & (counts == counts.max())
        donor = int(priority.masked_fill(~candidates, float("inf")).argmin())
        donor_row, column = divmod(donor, mask.shape[1])
        mask[donor_row, column] = False
        mask[row, column] = True
    return mask, len(empty)
