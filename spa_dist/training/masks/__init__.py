"""Training of a learned S: the penalty on its gates, the updates of its mask, the guard, and what is logged of it."""
