"""Where there is no GPU, Triton's kernels run in its interpreter, which must be asked for before they are imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
