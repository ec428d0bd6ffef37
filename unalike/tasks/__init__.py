"""The tasks a client may have, one file each. Knows nothing of clients or methods."""

from unalike.tasks.classification import Classification
from unalike.tasks.clustering import Clustering, clustering_scores, federated_scores
from unalike.tasks.kmeans import kmeans
from unalike.tasks.multilabel import MultiLabel
from unalike.tasks.regression import Regression
from unalike.tasks.retrieval import Retrieval
from unalike.tasks.segmentation import Segmentation
from unalike.tasks.task import Meter, Task

TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "multilabel": MultiLabel,
    "segmentation": Segmentation,
    "clustering": Clustering,
    "retrieval": Retrieval,
    "regression": Regression,
}


def find_task(name: str) -> type[Task]:
    """Return the class of a task by name, or `Task` with its defaults if it is not in the list."""
    return TASKS.get(name, Task)


__all__ = [
    "TASKS",
    "Classification",
    "Clustering",
    "Meter",
    "MultiLabel",
    "Regression",
    "Retrieval",
    "Segmentation",
    "Task",
    "clustering_scores",
    "federated_scores",
    "find_task",
    "kmeans",
]
