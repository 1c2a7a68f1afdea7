"""Checkpoints: written by all ranks, committed by one manifest, readable at any layout."""
