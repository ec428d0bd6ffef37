"""Operations of a round of `muscle-vision` for each client and the server, by method: the last row of the paper's Table 1."""

from unalike.benches import Study
from unalike.benches.muscle_vision import METHODS, scenario
from unalike.benches.rivals_flops import round_of


def run(study: Study) -> dict:
    """Megaflops, counted as in `rivals-flops`, in this process."""
    which, rows = scenario(study), {"local": ["algorithm={name: local}"], **METHODS}
    chosen = [name for name in rows if not study.only or any(word in name for word in study.only)][
        : 2 if study.quick else None
    ]
    told = {
        name: round_of(
            which, [*rows[name], f"device={study.device}", *study.settings], study.data_dir
        )
        for name in chosen
    }
    return {"scenario": which, "rows": told}
