"""Measurements of the package itself: each module has `run(quick)` and returns a flat dict; the caller writes it down."""
