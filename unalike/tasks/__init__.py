"""The tasks a client may have, one file each.

A new task is a subclass of `Task` in a file of its own, and a line in `TASKS`.
"""

from contextlib import suppress

from unalike.base.errors import UserError
from unalike.base.registry import find_named, installed_parts
from unalike.tasks.classification import Classification
from unalike.tasks.clustering import Clustering, clustering_scores, federated_scores
from unalike.tasks.kmeans import kmeans
from unalike.tasks.language import Language
from unalike.tasks.multilabel import MultiLabel
from unalike.tasks.regression import Regression
from unalike.tasks.retrieval import Retrieval
from unalike.tasks.segmentation import Segmentation
from unalike.tasks.sequence_labelling import SequenceLabelling
from unalike.tasks.survival import Survival
from unalike.tasks.task import Meter, Task

TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "multilabel": MultiLabel,
    "segmentation": Segmentation,
    "clustering": Clustering,
    "retrieval": Retrieval,
    "regression": Regression,
    "survival": Survival,
    "sequence_labelling": SequenceLabelling,
    "language": Language,
}


def find_task(name: str) -> type[Task]:
    """Return the class of a task by name, e.g. for its part at the server.

    Also of an installed package's task, and of a user's own if its module has been imported.
    Otherwise `Task` itself, whose defaults are those of a task that is learnt from labels.
    """
    if name in TASKS or name in installed_parts("task"):
        with suppress(UserError):
            return find_named("task", name, TASKS)
    classes = [Task]
    for task in classes:  # grows on the way: subclasses of subclasses too
        if getattr(task, "name", None) == name:
            return task
        classes += task.__subclasses__()
    return Task


__all__ = [
    "TASKS",
    "Classification",
    "Clustering",
    "Language",
    "Meter",
    "MultiLabel",
    "Regression",
    "Retrieval",
    "Segmentation",
    "SequenceLabelling",
    "Survival",
    "Task",
    "clustering_scores",
    "federated_scores",
    "find_task",
    "kmeans",
]
