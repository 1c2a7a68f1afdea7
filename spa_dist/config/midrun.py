"""Keys that may change in the middle of a run: between a checkpoint and going on from it."""

MID_RUN_KEYS = ("optimizer.lr", "attention.mask.l0_lambda", "attention.mask.gumbel.temperature")
"""The model, the data order and the optimizer's state mean the same before and after. Population-based training moves only these."""
