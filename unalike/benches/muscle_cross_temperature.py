"""A large temperature between clients that mark pixels and clients that read, in `muscle-multimodal` (the paper's Table 9)."""

from unalike.benches import Study
from unalike.benches.muscle_multimodal import FREE
from unalike.benches.muscle_vision import scenario, table

PIXELS, NEWS = (6, 7), (8, 9)  # places of these clients in the scenario
LARGE = 100.0


def run(study: Study) -> dict:
    """Both temperatures of such a pair are large, in the proportion of the others."""
    clients, apart = (6, ((0, 1), (2, 3))) if study.quick else (10, (PIXELS, NEWS))
    upper, lower = (
        matrix(clients, apart, usual, large)
        for usual, large in ((0.2, LARGE), (0.15, 0.75 * LARGE))
    )
    settings = {
        "0.2 for all": [FREE],
        "100 between pixels and news": [FREE, f"temperature={upper}", f"lower_temperature={lower}"],
    }
    return table(
        study,
        {name: (scenario(study, "muscle-multimodal"), each) for name, each in settings.items()},
    )


def matrix(
    clients: int, apart: tuple[tuple[int, ...], tuple[int, ...]], usual: float, large: float
) -> list[list[float]]:
    """One per pair of clients, large between the two groups."""
    far = {pair for a in apart[0] for b in apart[1] for pair in ((a, b), (b, a))}
    return [[large if (a, b) in far else usual for b in range(clients)] for a in range(clients)]
