"""Evaluation of a whole federation, by the tasks that its clients have. Knows no single task."""

from typing import TYPE_CHECKING, Any

from unalike.tasks import find_task

if TYPE_CHECKING:
    from unalike.core.federation import Federation, Replies


def scored_at_server(fed: "Federation") -> bool:
    """Whether no client can score itself: then the server scores the features of all of them."""
    return not any(info.has("labelled") for info in fed.infos.values())


def score_federation(fed: "Federation", replies: "Replies", **options: Any) -> "Replies":
    """Return the replies with those that the server has to score replaced by their metrics.

    Args:
        replies: by client, `Task.evaluation_reply` or features (`ClientProgram.embed`).
        options: for `Task.score_federation`.
    """
    metrics: dict[str, Any] = dict(replies)
    for name in _task_names(fed):
        own = {client: reply for client, reply in replies.items() if fed.infos[client].task == name}
        if own:
            metrics |= find_task(name).score_federation(fed, own, **options)
    return type(replies)(metrics, replies.failures)


def finish_tasks(fed: "Federation") -> dict[str, Any]:
    """Let each task of the clients do what is left to do after the last evaluation.

    Returns: what tasks add to the results.
    """
    found: dict[str, Any] = {}
    for name in _task_names(fed):
        found |= find_task(name).finish(fed) or {}
    return found


def _task_names(fed: "Federation") -> list[str]:
    return sorted({info.task for info in fed.infos.values()})
