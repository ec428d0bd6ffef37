"""What travels: FedMuscle's bytes per user and round for M = 1 to 5 and each exchange, beside the paper's Table 5."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from unalike.algorithms.fedmuscle import FedMuscle
from unalike.base.message import encoded_size
from unalike.core.client import Client
from unalike.data import Tensors
from unalike.models import MLP
from unalike.runs import run as run_clients
from unalike.tasks import Classification
from unalike.tasks.task import label_names
from unalike.training.loop import Training

# GiB up and down for each M, with B = 20 and 2 bytes a value
PAPER = {
    1: (0.0024, 0.0024),
    2: (0.0024, 0.048),
    3: (0.0024, 0.954),
    4: (0.0024, 19.08),
    5: (0.0024, 381.6),
}
ROWS, BATCH, WIDTH = 5000, 32, 256


def run(quick: bool = False) -> dict:
    """`gradient` is measured in the ledger of a real run; `peers` and `paper` are the encoded sizes of their messages."""
    rows = 320 if quick else ROWS
    measured = {m: ledger(m, rows) for m in (1, 3, 5)}
    table = {}
    for m in range(1, 6):
        up = measured.get(m, measured[3])[0]
        table[str(m)] = {
            "gradient_up": up,
            "gradient_down": measured.get(m, measured[3])[1],
            "peers_down": passes(rows, lambda b, m=m: m * b * WIDTH),
            "paper_down": passes(rows, lambda b, m=m: b**m * (WIDTH + 1)),
            "papers_table_5_down_gib": PAPER[m][1],
        }
    return {
        "rows": rows,
        "batch": BATCH,
        "width": WIDTH,
        "bytes_a_value": 4,
        "by_peers": table,
        "down_equals_up": all(up == down for up, down in measured.values()),
        "same_for_all_peers": len(set(measured.values())) == 1,
    }


def passes(rows: int, values: Callable[..., int]) -> int:
    """Bytes of one pass over the public set, a message for each batch."""
    header = encoded_size(
        {"operation": "align", "number": 1, "round": 1, "body": {"epoch": 0, "batch": 0}}
    )
    starts = list(range(0, rows, BATCH))
    return sum(header + 4 * values(min(BATCH, rows - start)) for start in starts)


def ledger(peers: int, rows: int) -> tuple[int, int]:
    """Bytes up and down of one client in one round, as the ledger counted them."""
    draw = torch.Generator().manual_seed(0)
    public = torch.randn(rows, 16, generator=draw)
    made = [
        Client(
            id=f"c{i}",
            model=partial(MLP, (16,), (16,), 16),
            task=Classification(label_names(3)),
            train=Tensors(torch.randn(12, 16, generator=draw), torch.arange(12) % 3),
        )
        for i in range(6)
    ]
    with tempfile.TemporaryDirectory() as folder:
        results = run_clients(
            FedMuscle(peers=peers, width=WIDTH, batch=BATCH, keep="aligned"),
            made,
            public=public,
            training=Training(rounds=1),
            out=Path(folder) / "run",
            alone=False,
        )
    return results["bytes"]["up"] // 6, results["bytes"]["down"] // 6
