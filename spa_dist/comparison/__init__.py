"""Comparing kinds of attention: the variants, two tasks that train each of them, statistics over seeds, tables.

`tools/compare_attention.py` is the command. A run is a job; every finished job is one JSON file, and tables are made of these files
alone.
"""
