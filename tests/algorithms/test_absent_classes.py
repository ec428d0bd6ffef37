"""Masking of classes that only other clients of a group have."""

import pytest
import torch

from unalike import Classification, MultiLabel
from unalike.algorithms import FedMusclePlus
from unalike.core.privacy import Privacy
from unalike.core.runtime import ClientRuntime
from unalike.methods.absent_classes import MASK, classes_in_groups
from unalike.methods.group_averaging import average_groups


@pytest.fixture
def parted(toys, tmp_path):
    """Three who classify, two of them alike, of four classes of which a has two and b two; and one
    with several labels."""
    x, y = toys.blobs(24, 3)
    client_with = lambda id, y, **about: toys.client(
        id, train=(x.double(), y), test=(x.double(), y), **about
    )
    words = Classification(tuple("wxyz"))
    several = client_with(
        "d", torch.nn.functional.one_hot(y, 4).double(), task=MultiLabel(list("pqrs"))
    )
    fed = toys.federation(
        tmp_path / "run",
        toys.method("fedmuscleplus", average_heads="round", mask_absent_classes=True),
        [
            client_with("a", y % 2),
            client_with("b", 1 + y % 2, model=toys.noisy),
            client_with("c", y, task=words),
            several,
        ],
    )
    fed.start_round(1)
    fed.call("train")
    return fed


def test_classes_that_only_other_clients_of_the_group_have_are_masked(parted):
    """They are no negatives in the local loss, and no row of the head learns of them; a class of no
    client is one."""
    calls, call, programs = [], parted.call, parted.engine.host.programs
    parted.call = lambda operation, **about: (
        calls.append((operation, about.get("clients"))) or call(operation, **about)
    )
    for _ in range(2):
        average_groups(parted, classes_in_groups)
    assert [entry for entry in calls if entry[0] == "present"] == [("present", ["a", "b"])]
    parted.call("train")
    assert [programs[c].masked_classes.tolist() for c in "ab"] == [
        [False, False, True, False],
        [True, False, False, False],
    ]
    assert not any(programs[c].masked_classes.any() for c in "cd")
    for c, classes in (("a", [0, 1, 3]), ("b", [1, 2, 3])):
        program = programs[c]
        program.model.eval()
        x, y = program.training_batch(torch.arange(24))
        loss = program.task_loss(x, y)
        log_probabilities = program.model(x)[:, classes].log_softmax(1)
        torch.testing.assert_close(
            loss,
            -log_probabilities[
                torch.arange(24), [classes.index(label) for label in y.tolist()]
            ].mean(),
        )
        moved = torch.autograd.grad(loss, program.model.head[-1].weight)[0].abs().sum(1) > 0
        assert moved.nonzero().flatten().tolist() == classes
        torch.testing.assert_close(program.head_loss(x, y), loss)


def test_classes_of_clients_that_left_stay_masked(parted):
    """The averaged head knows them; classes of another group do not count."""
    kind = parted.engine.host.programs["a"].kind_of()
    parted.state["kinds"] = {"gone": kind, "other": "another"}
    parted.state["present"] = {
        "gone": torch.tensor([False, False, False, True]),
        "other": torch.tensor([True, True, True, True]),
    }
    average_groups(parted, classes_in_groups)
    assert [parted.engine.host.programs[c].memory[MASK].tolist() for c in "ab"] == [
        [False, False, True, True],
        [True, False, False, True],
    ]


def test_clients_send_their_classes_only_with_masking(toys, tmp_path, parted):
    """And never with privacy, whatever the server asks for."""
    fed = toys.federation(
        tmp_path / "run", toys.method("fedmuscleplus", average_heads="round"), toys.clients(2)
    )
    fed.start_round(1)
    assert "only with mask_absent_classes" in str(
        fed.call("present", clients=["a"], quorum=0).failures["a"]
    )
    program, other = parted.engine.host.programs["a"], fed.engine.host.programs["a"]
    private = ClientRuntime(program, Privacy(noise=4.0))
    assert private.perform("present", 1, 0, {}) is None
    before = {name: tensor.clone() for name, tensor in program.averaged_parameters().items()}
    more = {name: tensor + 1 for name, tensor in before.items()}
    with pytest.raises(ValueError, match=r"expected a class mask of shape \(4,\), got \(3,\)"):
        program.take(more, had=torch.ones(3))
    assert all(
        torch.equal(program.averaged_parameters()[name], tensor) for name, tensor in before.items()
    ), "what is refused changes nothing"
    with pytest.raises(ValueError, match="masks no absent classes"):
        other.take(other.averaged_parameters(), had=torch.ones(4))
    assert (
        "set algorithm.mask_absent_classes to false"
        in (FedMusclePlus(average_heads="round", mask_absent_classes=True).privacy_problem() or "")
        and FedMusclePlus().privacy_problem() is None
    )
