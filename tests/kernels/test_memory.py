"""No block of N² is allocated: the profiler's record of every allocation, not an argument."""

import torch
from torch.profiler import ProfilerActivity, profile

from spa_dist.kernels import attention, tiled


def largest_and_peak(function):
    """(largest single allocation, peak of live bytes above the start) on the CPU while function runs."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    live = peak = largest = 0
    for event in record.profiler.kineto_results.events():
        if event.name() != "[memory]":
            continue
        live += event.nbytes()
        peak, largest = max(peak, live), max(largest, event.nbytes())
    return largest, peak


def inputs_and_run(length, backend):
    """Bytes of q, k and v, and a function that runs one layer forward and backward."""
    q, k, v = (torch.randn(1, 2, length, width, requires_grad=True) for width in (32, 32, 64))
    d_out = torch.randn(1, 2, length, 64)

    def run():
        return torch.autograd.grad(attention(q, k, v, scale=0.2, causal=True, backend=backend), (q, k, v), d_out)

    return sum(x.numel() * 4 for x in (q, k, v)), run


def test_forward_and_backward_hold_five_times_the_inputs_and_no_score_matrix():
    """At 2,048 and 4,096 positions, scratch tiles included; so the growth from one to the other is linear too."""
    for length in (2048, 4096):
        tiled._kept.__dict__.clear()
        inputs, run = inputs_and_run(length, "auto")
        largest, peak = largest_and_peak(run)
        assert 0 < largest <= 2 * inputs and largest < 4 * length * length / 4
        assert peak < 5 * inputs
    assert largest_and_peak(inputs_and_run(4096, "reference")[1])[0] >= 4 * 4096 * 4096  # the measurement sees such a block


def test_a_thread_keeps_no_more_than_two_scratch_tiles_of_16_mib():
    """What a long sequence needed is let go at the next call."""
    tiled._kept.scratch = {0: torch.empty(tiled.KEPT_BYTES + 1, dtype=torch.uint8)}
    inputs_and_run(256, "tiled")[1]()
    assert sorted(tiled._kept.scratch) == [0, 1]
    assert all(tile.numel() <= tiled.KEPT_BYTES for tile in tiled._kept.scratch.values())
