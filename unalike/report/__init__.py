"""Tables, pages and comparisons of finished runs, read from their folders.

matplotlib and scipy are imported by the functions that need them, so importing this is fast.
"""

from unalike.report.compare import compare, show_comparison
from unalike.report.comparison_formats import FORMATS, format_comparison
from unalike.report.comparison_plot import plot_comparison
from unalike.report.folder import Run, read
from unalike.report.page import write
from unalike.report.table import show, summary

__all__ = [
    "FORMATS",
    "Run",
    "compare",
    "format_comparison",
    "plot_comparison",
    "read",
    "show",
    "show_comparison",
    "summary",
    "write",
]
