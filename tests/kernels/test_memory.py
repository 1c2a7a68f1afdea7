"""No block of N² is allocated: the profiler's record of every allocation, not an argument."""

import torch
from torch.profiler import ProfilerActivity, profile

from spa_dist.kernels import attention


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


def test_forward_and_backward_at_4096_allocate_a_multiple_of_the_inputs():
    length, d_qk, d_v = 4096, 16, 32
    q, k, v = (torch.randn(1, 1, length, width, requires_grad=True) for width in (d_qk, d_qk, d_v))
    inputs = 4 * length * (2 * d_qk + d_v)
    score_matrix = 4 * length * length

    def run(backend):
        attention(q, k, v, scale=0.25, causal=True, backend=backend).sum().backward()

    largest, peak = largest_and_peak(lambda: run("tiled"))
    assert 0 < largest < score_matrix / 4
    assert peak < 24 * inputs
    assert largest_and_peak(lambda: run("reference"))[0] >= score_matrix  # the measurement sees such a block
