"""FedNCA against its rivals: VOC 2012 at two skews over three seeds; quick, canvases of digits."""

from unalike.benches import Row, Study, averages
from unalike.report import Run

ASL = "clients.0.task.criterion=asymmetric"
METHODS: dict[str, tuple[str, list[str]]] = {
    "fednca": ("fednca", []),
    "fedavg, BCE": ("fedavg", []),
    "ETF alone": ("fednca", ["disentangle=false", "rejection=0", "prototype=0"]),
    "fedavg, ASL": ("fedavg", [ASL]),
    "fedprox, BCE": ("fedprox", []),
    "fedprox, ASL": ("fedprox", [ASL]),
    "local, BCE": ("local", []),
}
ALPHAS = (0.1, 0.5)
QUICK = ("rounds=2", "epochs=1", "data.options={train: 240, test: 100, most: 2}")
SHOWN = ("macro_f1", "macro_auc", "micro_f1", "micro_auc", "mAP", "CF1", "OF1")
BARS = {  # how far ahead at alpha 0.1: of whom, in what, by how much at least
    "macro_f1_lead": ("fedavg, BCE", "macro_f1", 3.0),
    "macro_auc_lead": ("fedavg, BCE", "macro_auc", 1.5),
    "macro_f1_lead_on_etf": ("ETF alone", "macro_f1", 0.0),
}


def run(study: Study) -> dict:
    """A row for each method and skew, and one for everyone's rows together; leads, and what the skew costs, where their rows were run."""
    scenario = "fednca-digits" if study.quick else "fednca-voc"
    rows: dict[str, Row] = {}
    for alpha in ALPHAS:
        for name, (method, settings) in METHODS.items():
            rows[row(name, alpha)] = (
                scenario,
                [*plain(method), f"data.partition.alpha={alpha}", *settings],
            )
    rows["centralised, BCE"] = (
        scenario,
        [*plain("fedavg"), "clients.0.count=1", "data.partition={name: iid}"],
    )
    made = {
        name: averages(runs, figures) for name, runs in study.runs(rows, QUICK, range(3)).items()
    }
    told: dict = {"scenario": scenario, "rows": made}
    for key, (rival, metric, bar) in BARS.items():
        ours, theirs = made.get(row("fednca", ALPHAS[0])), made.get(row(rival, ALPHAS[0]))
        if ours and theirs:
            told |= {key: round(ours[metric] - theirs[metric], 3), f"{key}_bar": bar}
    for key, name in (("macro_f1_drop", "fednca"), ("macro_f1_drop_bar", "fedavg, BCE")):
        skewed, even = (made.get(row(name, alpha)) for alpha in ALPHAS)
        if skewed and even:
            told[key] = round(even["macro_f1"] - skewed["macro_f1"], 3)
    return told


def row(name: str, alpha: float) -> str:
    return f"{name}, alpha {alpha}"


def plain(method: str) -> list[str]:
    return ["alone=false", "evaluations=1", f"algorithm={{name: {method}}}"]


def figures(run: Run) -> dict[str, float]:
    told = (run.results or {})["metrics"]
    return {name: told[name] for name in SHOWN}
