"""CUDA graphs, on a stand-in without a GPU: input signatures, failed captures, memory pools."""

from contextlib import contextmanager
from weakref import WeakSet

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from unalike.training import cuda_graphs
from unalike.training.cuda_graphs import (
    GraphedForward,
    GraphedFunction,
    capture,
    input_signature,
    is_on_gpu,
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


class Replayed:
    """A graph whose replay is a function."""

    def __init__(self, replay):
        self.replay = replay


def test_a_replayed_backward_pass_leaves_the_gradients_of_autograd():
    """In the layout that autograd gives `.grad`; a parameter that takes no part gets none."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    unused = torch.ones(2, requires_grad=True)
    parameters = [*model.parameters(), unused]
    graphed = GraphedForward(model, parameters)
    x, grad_output = torch.randn(5, 3), torch.randn(5, 2)

    z = graphed(x)  # not captured, as on a CPU
    graphed.backward(z, grad_output)
    expected = [p.grad for p in parameters]

    static_x, static_grad_output = torch.zeros(5, 3), torch.zeros(5, 2)
    static_z, static_grads = torch.zeros(5, 2), [torch.zeros_like(p) for p in parameters[:-1]]

    def replay_backward():
        grads = graphed._gradients(model(static_x), static_grad_output)
        assert grads.pop() is None
        for static_grad, grad in zip(static_grads, grads, strict=True):
            static_grad.copy_(grad)

    captured = (
        Replayed(lambda: static_z.copy_(model(static_x).detach())),
        [static_x],
        static_z,
        Replayed(replay_backward),
        static_grad_output,
        [*static_grads, None],
    )
    for p in parameters:
        p.grad = None
    z = graphed._replay(captured, [x])
    static_z.zero_()  # the next pass may overwrite it
    assert torch.equal(z, model(x))
    graphed.backward(z, grad_output)
    for p, grad in zip(parameters, expected, strict=True):
        assert (p.grad is None and grad is None) or torch.equal(p.grad, grad)
    assert all(p.grad is own for p, own in zip(parameters, static_grads, strict=False))


def test_captured_gradients_have_their_parameters_order_in_memory():
    """A fused optimizer reads both element by element."""
    weight = torch.randn(3, 2, requires_grad=True)
    graphed = GraphedForward(lambda x: (x.T * weight).T, [weight])
    output = graphed(torch.randn(2, 3))
    grad_output = torch.randn(2, 3)
    (plain,) = torch.autograd.grad(output, [weight], grad_output, retain_graph=True)
    assert plain.stride() != weight.stride()
    (grad,) = graphed._gradients(output, grad_output)
    assert grad.stride() == weight.stride() and torch.equal(grad, plain)


def test_inputs_of_any_form_tell_whether_they_are_on_a_gpu():
    x = torch.zeros(2)
    assert not any(map(is_on_gpu, ((x,), ({"image": x, "text": x},), ([x, x], x))))


def test_one_tensor_and_a_list_of_one_have_graphs_of_their_own(monkeypatch):
    """Only what is captured is looked at: there is no GPU."""
    monkeypatch.setattr(cuda_graphs, "is_on_gpu", lambda inputs: True)
    captured = []

    def capture_inputs(self, static_inputs, tree):
        captured.append(tree_unflatten(static_inputs, tree))
        return None

    monkeypatch.setattr(GraphedFunction, "_capture", capture_inputs)
    function = GraphedFunction(lambda value: value)
    x = torch.ones(2)
    for _ in range(4):
        assert function(x) is x
        assert function([x])[0] is x
    assert len(captured) == 2
    assert torch.equal(captured[0][0], x) and torch.equal(captured[1][0][0], x)
