"""Engine (the only importer of deepspeed), trainer, checkpoints, callbacks."""
