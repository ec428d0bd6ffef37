"""CUDA graphs, on a stand-in without a GPU: input signatures, failed captures, memory pools."""

from contextlib import contextmanager
from weakref import WeakSet

import pytest
import torch
from torch.utils._pytree import tree_flatten

from unalike.training.cuda_graphs import (
    GraphedForward,
    GraphedFunction,
    capture,
    input_signature,
    new_memory_pool,
)

leaf = torch.ones(1, requires_grad=True)


def test_equal_shapes_under_different_names_get_separate_graphs():
    """Otherwise the graph of an image would be replayed for a text."""
    z = torch.zeros(2, 3)
    inputs = {"image": z}, {"text": z}, {"image": z + 1}, [z], {"image": z.double()}
    kinds = [input_signature(*tree_flatten(each)) for each in inputs]
    assert kinds[0] == kinds[2] and len(set(kinds)) == 4


@pytest.fixture
def recordings(monkeypatch):
    """A stand-in for torch's CUDA graphs.

    A pool's memory goes with the last graph in it, and a failed capture stays on its own stream.
    Returns: the name of the current stream, in a list, and the living graphs.
    """
    now, living = ["usual"], WeakSet()

    class Recording:
        def pool(self):
            return self.place

    @contextmanager
    def recording(graph, pool=None):
        if pool is not None and pool not in {each.place for each in living}:
            raise RuntimeError("memory is gone\nmore of it")
        graph.place = pool or object()
        was, now[0] = now[0], "aside"
        yield
        living.add(graph)
        now[0] = was

    for name, fake in {
        "CUDAGraph": Recording,
        "graph": recording,
        "synchronize": lambda: None,
        "current_stream": lambda: now[0],
        "set_stream": lambda stream: now.__setitem__(0, stream),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device="cpu": zeros(*size))
    monkeypatch.setattr(GraphedFunction, "shared_pool", None)
    return now, living


def test_a_failed_capture_restores_the_stream(recordings, caplog):
    now, _ = recordings

    def fails():
        raise RuntimeError("looks at values\nmore of it")

    with caplog.at_level("INFO"):
        assert capture(fails, new_memory_pool()) is None and now == ["usual"]
    assert (
        "cannot be recorded" in caplog.text
        and "looks at values" in caplog.text
        and "more of it" not in caplog.text
    )
    assert capture(lambda: "given", new_memory_pool())[1] == "given" and now == ["usual"]


@pytest.mark.parametrize(
    "kind", [GraphedFunction, lambda function: GraphedForward(function, [leaf])]
)
def test_a_memory_pool_outlives_the_graphs_in_it(kind, recordings):
    """A later run in the same process can capture when all graphs of the first are gone.

    So can a function whose graphs were cleared.
    """
    living = recordings[1]
    first = kind(lambda x: 2 * x * leaf)
    for _ in range(2):
        first.graphs["shapes"] = first._capture([torch.ones(1)], tree_flatten([0])[1])
        assert first.graphs["shapes"] is not None
        first.clear()
    assert len(living) == (GraphedFunction.shared_pool is not None), (
        "what is forgotten gives its memory back, but for what all share"
    )
    assert kind(lambda x: x * leaf)._capture([torch.ones(1)], tree_flatten([0])[1]) is not None
