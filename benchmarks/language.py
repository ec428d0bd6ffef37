"""A causal language model of a few hundred million parameters, adapted by LoRA."""

from pathlib import Path
from typing import Any

from benchmarks.study import Study, averages, benchmark, megabytes
from unalike.report import Run

SCENARIO = str(Path(__file__).with_suffix(".yaml"))
METHODS = {
    "fedavg": "algorithm={name: fedavg}",
    "hetlora": "algorithm={name: hetlora}",
    "local": "algorithm={name: local}",
}
SMALL = (
    *("rounds=1", "clients.0.train=16", "clients.0.test=16"),
    "clients.0.model.config={model_type: llama, vocab_size: 256, hidden_size: 16, "
    "intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2, "
    "max_position_embeddings: 128}",
)


@benchmark("language")
def bench_language(study: Study) -> dict[str, Any]:
    """Next bytes of news by a Llama of 300 million random weights with LoRA; for a GPU.

    Perplexity, what learns, and traffic; three seeds. The weights are random: none are fetched.
    """
    rows = {name: (SCENARIO, [method]) for name, method in METHODS.items()}
    runs = study.runs(rows, SMALL, range(3))
    return {"rows": {name: averages(found, figures) for name, found in runs.items()}}


def figures(run: Run) -> dict[str, float]:
    """Perplexity over clients, parameters in all and those that learn, and traffic."""
    clients = list(run.clients.values())
    return {
        "perplexity": (run.results or {})["metrics"].get("perplexity", clients[0]["value"]),
        "parameters": clients[0].get("parameters", 0),
        "trainable": clients[0].get("trainable", 0),
        "megabytes": megabytes(run),
    }
