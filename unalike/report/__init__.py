"""Tables, pages and comparisons of finished runs. Reads run folders; knows nothing of clients, models or engines.

Everything heavy (matplotlib, scipy) is imported by the function that needs it, so importing this room is quick.
"""

from unalike.report.compare import compare, show_comparison
from unalike.report.folder import Run, read
from unalike.report.page import write
from unalike.report.table import show, summary

__all__ = ["Run", "compare", "read", "show", "show_comparison", "summary", "write"]
