"""Numbers and names as text for tables and pages. Knows nothing of results, files or terminals."""

from typing import Any

SMALL_NUMBERS = (
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
MISSING = "–"
LARGEST = 1e100


def to_number(value: Any) -> float | None:
    """Return `value` as a float; None if it is missing, no number, NaN or beyond 1e100.

    Larger ones, which nothing measured is, would overflow in means and scales.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return number if abs(number) <= LARGEST else None


def printable(text: Any) -> str:
    """Return `text` on one line, without characters that could steer a terminal or break a page.

    >>> printable("a\\n\\x1b[31mb")
    'a �[31mb'
    """
    return replace_unprintable(" ".join(str(text).split()))


def replace_unprintable(line: str) -> str:
    """Return `line` with every unprintable character replaced."""
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in line
    )


def shorten(name: Any, length: int = 28) -> str:
    """Return a name that fits beside a plot, cut to at most `length` characters."""
    name = printable(name)
    return name if len(name) <= length else name[: length - 1] + "…"


def format_metric(value: Any, unit: str = "%") -> str:
    """Return a metric: one decimal for percentages, else three significant digits.

    >>> format_metric(83.04), format_metric(0.01234, unit=""), format_metric(None)
    ('83.0', '0.0123', '–')
    """
    known = to_number(value)
    if known is None:
        return MISSING
    if unit == "%":
        return f"{known:.1f}"
    return f"{known:.3g}" if abs(known) < 1000 else f"{known:,.0f}"


def with_unit(noun: str, unit: str) -> str:
    """Return an axis label or heading with its unit, if there is one.

    >>> with_unit("value", "%"), with_unit("value", "")
    ('value (%)', 'value')
    """
    return f"{noun} ({unit})" if unit else noun


def format_gain(gain: Any) -> str:
    """Return a gain with its sign; a small one is never rounded to 0.

    >>> format_gain(35.61), format_gain(-0.02), format_gain(0)
    ('+35.6 %', '−0.02 %', '0.0 %')
    """
    known = to_number(gain)
    if known is None:
        return MISSING
    if known == 0:
        return "0.0 %"
    text = f"{known:+.1f} %" if abs(known) >= 0.05 else f"{known:+.1g} %"
    return text.replace("-", "−")


def format_epsilon(spent: Any) -> str:
    """Return the epsilon of a client's privacy entry in the results.

    >>> format_epsilon({"epsilon": 12.345}), format_epsilon({"epsilon": None}), format_epsilon(None)
    ('12.3', 'unbounded', '–')
    """
    if not isinstance(spent, dict):
        return MISSING
    epsilon = to_number(spent.get("epsilon"))
    if epsilon is None:
        return "unbounded"
    return f"{epsilon:.3g}" if epsilon < 1000 else f"{epsilon:.0f}"


def describe_privacy(spent: dict) -> str:
    """Return what an epsilon means.

    >>> describe_privacy({"epsilon": 12.345, "delta": 1e-5, "releases": 20})
    'at most, delta 1e-05, 20 releases'
    """
    releases = spent.get("releases")
    plural = "" if releases == 1 else "s"
    return f"at most, delta {spent.get('delta')}, {releases} release{plural}"


def format_bytes(size: Any) -> str:
    """Return a number of bytes in units of 1000.

    >>> format_bytes(999), format_bytes(1_234_567)
    ('999 B', '1.23 MB')
    """
    known = to_number(size)
    if known is None:
        return MISSING
    scale, unit = byte_unit(known)
    return f"{known:.0f} B" if scale == 1 else f"{known / scale:.3g} {unit}"


def byte_unit(size: float) -> tuple[float, str]:
    """Return how many bytes the unit holds that a size reads best in, and its name."""
    for scale, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= scale * 0.9995:  # so that 999 999 reads 1 MB, not 1e+03 kB
            return scale, unit
    return 1.0, "B"


def format_duration(seconds: Any) -> str:
    """Return a time in seconds, minutes or hours.

    >>> format_duration(20.1), format_duration(200), format_duration(3720)
    ('20.1 s', '3 min 20 s', '1 h 02 min')
    """
    known = to_number(seconds)
    if known is None:
        return MISSING
    if known < 99.95:
        return f"{known:.1f} s"
    minutes, remainder = divmod(round(known), 60)
    if minutes < 60:
        return f"{minutes} min {remainder:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def spell(amount: int) -> str:
    """Return a small number as a word, others as digits.

    >>> spell(3), spell(40)
    ('three', '40')
    """
    is_small = amount in range(len(SMALL_NUMBERS))
    return SMALL_NUMBERS[int(amount)] if is_small else str(amount)


def count_noun(amount: int, noun: str) -> str:
    """Return an amount with its noun.

    >>> count_noun(1, "client"), count_noun(6, "client"), count_noun(40, "client")
    ('one client', 'six clients', '40 clients')
    """
    return f"{spell(amount)} {noun}{'' if amount == 1 else 's'}"


def join_names(names: list, limit: int = 6) -> str:
    """Return names as a list in a sentence, at most `limit` of them.

    >>> join_names(["a", "b", "c"]), join_names(["a", "b", "c", "d"], limit=2)
    ('a, b and c', 'a, b and 2 more')
    """
    texts = [str(name) for name in names]
    if len(texts) > limit:
        return f"{', '.join(texts[:limit])} and {len(texts) - limit} more"
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} and {texts[-1]}"
