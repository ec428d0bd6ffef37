"""A comparison as tables in the terminal. Knows what `compare` returns, nothing of runs or files."""

from string import ascii_uppercase

from rich import box
from rich.table import Table
from rich.text import Text

from unalike.report import formatting as words

LOST = "▼"  # as on the page; colour alone is not seen everywhere


def tables(result: dict, width: int = 80) -> list:
    """The groups by letter, their averages, each client, and the differences against the first."""
    groups = {_letter(place): group for place, group in enumerate(result["groups"])}
    parts: list = [
        Text(
            words.printable(f"{result['scenario']}: {words.count(len(groups), 'group')}"),
            style="bold",
        )
    ]
    for letter, group in groups.items():
        seeds = f"seed{'s' * (group['n'] > 1)} {words.listed(group['seeds'], 12)}"
        parts += [
            Text.assemble(
                f"  {letter}  ", (words.printable(group["label"]), "bold"), (f"  {seeds}", "dim")
            )
        ]
    units = result.get("units", {})
    unit = _common_unit(units)
    parts += [_averages(groups, unit), *_federation(groups, unit)]
    parts += _clients(groups, result["clients"], width, units)
    if result["differences"]:
        parts += [_differences(result, groups)]
    return parts + _footnotes(result, groups)


def _common_unit(units: dict[str, str]) -> str:
    """Return the unit of all clients' metrics, or "" if they differ."""
    different = set(units.values()) or {"%"}
    return different.pop() if len(different) == 1 else ""


def _averages(groups: dict, unit: str) -> Table:
    mean = f"mean value {unit}".strip()
    table = _table("", "Delta %", mean, "losers", "up", "down", "time")
    for letter, group in groups.items():
        sent = [words.data(group["bytes"][way]["mean"]) for way in ("up", "down")]
        losers = group["losers"]["mean"]
        lost = Text(
            words.NOTHING if losers is None else f"{losers:.3g}", style="bold red" if losers else ""
        )
        averages = [_average(group["delta"], sign=True), _average(group["value"], unit=unit)]
        table.add_row(letter, *averages, lost, *sent, words.duration(group["seconds"]["mean"]))
    return table


def _federation(groups: dict, unit: str) -> list[Table]:
    """Figures of all clients together, where these are more than means of the clients' own."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group["federation"]))
    table = _table("federation", *(f"{name} {unit}".strip() for name in names))
    for letter, group in groups.items():
        table.add_row(
            letter, *(_average(group["federation"].get(name, {"mean": None})) for name in names)
        )
    return [table] if names else []


def _clients(groups: dict, clients: list[str], width: int, units: dict[str, str]) -> list[Table]:
    """Each client's value in each group; as many groups side by side as fit."""
    fit, parts = max(1, (width - 18) // 15), []
    for start in range(0, len(groups), fit):
        program = dict(list(groups.items())[start : start + fit])
        table = _table("client", *program)
        for client in clients:
            cells = [
                _average(
                    group["clients"][client],
                    lost=bool(group["lost"][client]),
                    unit=units.get(client, "%"),
                )
                for group in program.values()
            ]
            table.add_row(Text(words.printable(client)), *cells)
        parts.append(table)
    return parts


def _differences(result: dict, groups: dict) -> Table:
    letters = {group["label"]: letter for letter, group in groups.items()}
    units = result.get("units", {})
    unit = _common_unit(units)
    table = _table("", f"mean difference {unit}".strip(), "pairs", "worst client", "")
    for told in result["differences"]:
        verdict = {None: "one pair: too few to say", True: "clear of 0", False: "not clear of 0"}[
            told["excludes_zero"]
        ]
        if not told["n"]:
            verdict = "no seed in common"
        known = {
            client: its["mean"]
            for client, its in told["clients"].items()
            if its["mean"] is not None
        }
        least = min(known, key=lambda client: known[client]) if known else None
        worst = words.NOTHING
        if least is not None:
            change = _change(known[least], units.get(least, "%"))
            worst = f"{words.printable(least)} {change}"
        name = f"{letters[told['group']]} − {letters[told['reference']]}"
        style = "" if not told["excludes_zero"] else "green" if told["mean"] > 0 else "red"
        table.add_row(
            name,
            _average(told, sign=True, unit=unit),
            str(told["n"]),
            Text(worst),
            Text(verdict, style=style),
        )
    return table


def _footnotes(result: dict, groups: dict) -> list[Text]:
    notes = [
        f"± is half of the {result['level']:.0%} interval over seeds (Student's t); each stands alone, uncorrected for their number."
    ]
    single = [letter for letter, group in groups.items() if group["n"] == 1]
    if single:
        notes += [f"{words.listed(single)}: one seed only, so no interval."]
    if any(count for group in groups.values() for count in group["lost"].values()):
        notes += [f"{LOST} this client lost against itself alone in at least one run."]
    if falling := result.get("lower_is_better"):
        notes += [
            f"Lower is better for {words.listed(falling)}; differences are positive where better."
        ]
    letters = {group["label"]: letter for letter, group in groups.items()}
    if others := [
        letters[told["group"]] for told in result["differences"] if told["same_alone"] is False
    ]:
        first = letters[result["differences"][0]["reference"]]
        notes += [
            f"Alone, clients of {words.listed(others)} did not do as those of {first} did: their Deltas and losers are against "
            "different baselines and cannot be compared; the values can."
        ]
    if result["left_out"]:
        notes += [
            f"Left out, for want of a value in every run: {words.listed(result['left_out'])}."
        ]
    return [Text(words.printable(note), style="dim") for note in notes]


def _average(told: dict, sign: bool = False, lost: bool = False, unit: str = "%") -> Text:
    if told["mean"] is None:
        return Text(words.NOTHING)
    half = ""
    if told["low"] is not None:
        half = f" ±{words.metric_value((told['high'] - told['low']) / 2, unit)}"
    value = _change(told["mean"], unit) if sign else words.metric_value(told["mean"], unit)
    return Text.assemble((f"{LOST} {value}", "bold red") if lost else value, (half, "dim"))


def _change(value: float, unit: str = "%") -> str:
    sign = "−" if value < 0 else "+"
    return f"{sign}{words.metric_value(abs(value), unit)}"


def _letter(place: int) -> str:
    return (ascii_uppercase[place // 26 - 1] if place >= 26 else "") + ascii_uppercase[place % 26]


def _table(first: str, *names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold")
    for name in names:
        table.add_column(name, justify="right")
    return table
