"""What a process imports, and that optimizers without torch's compiler do what those of torch do."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from unalike.training import eager

TRAIN_AND_COUNT = """
import sys
import torch
from torch import nn
from unalike.models.flops import count_flops
from unalike.training.loop import Training, build_optimizer, step
model = nn.Sequential(nn.Flatten(), nn.Linear(3, 3))
for name in ("adamw", "adam", "sgd"):
    optimizer = build_optimizer(list(model.parameters()), Training(optimizer=name))
    step(model(torch.randn(2, 3)).sum(), optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
assert count_flops(model, torch.randn(2, 3)) == 36
print(sorted({"torch._dynamo", "sympy"} & set(sys.modules)))
"""


def test_training_and_counting_operations_do_not_import_the_compiler():
    process = subprocess.run(
        [sys.executable, "-c", TRAIN_AND_COUNT], capture_output=True, text=True, check=True
    )
    assert process.stdout == "[]\n"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_an_optimizer_without_the_compiler_takes_the_steps_of_torch(name, fused):
    models = [nn.Linear(3, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    options = {"lr": 0.1, "weight_decay": 0.2, "fused": fused}
    if name == "SGD":
        options["momentum"] = 0.9
    optimizers = [
        getattr(namespace, name)(model.parameters(), **options)
        for namespace, model in zip((torch.optim, eager), models, strict=True)
    ]
    x = torch.arange(12.0).reshape(4, 3)
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert torch.equal(models[0].weight, models[1].weight)
    assert str(optimizers[0].state_dict()) == str(optimizers[1].state_dict())


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_a_fused_step_is_torchs_whatever_the_parameters_hold(name):
    """Groups of their own, a parameter without gradient, a scaled step, a state that was loaded."""
    models = [nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers: list[torch.optim.Optimizer] = []
    for namespace, model in zip((torch.optim, eager), models, strict=True):
        groups = [
            {"params": model[0].parameters()},
            {"params": [*model[1].parameters(), *model[2].parameters()], "weight_decay": 0.3},
        ]
        optimizers.append(getattr(namespace, name)(groups, lr=0.1, fused=True))
    x = torch.arange(12.0).reshape(4, 3)
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            hidden = model[1](model[0](x))
            (model[2](hidden) if step % 2 else hidden).square().mean().backward()
            if step == 2:
                optimizer.load_state_dict(optimizer.state_dict())
            if step == 4:
                optimizer.grad_scale = torch.tensor(4.0)
                optimizer.found_inf = torch.tensor(0.0)
            optimizer.param_groups[1]["lr"] = 0.1 / (1 + step)
            optimizer.step()
            if step == 4:
                del optimizer.grad_scale, optimizer.found_inf
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert str(optimizers[0].state_dict()) == str(optimizers[1].state_dict())


def test_hooks_and_the_profiler_see_the_steps():
    model = nn.Linear(3, 2)
    optimizer = eager.AdamW(model.parameters(), fused=True)
    seen = []

    def take_step():
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    take_step()
    before = optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    after = optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    take_step()
    before.remove()
    after.remove()
    take_step()
    assert seen == ["before", "after"]
    with torch.profiler.profile() as profile:
        take_step()
    assert any("Optimizer.step" in event.key for event in profile.key_averages())
    assert [state["step"].item() for state in optimizer.state.values()] == [4, 4]


def test_gradients_are_removed_or_set_to_zero():
    model = nn.Linear(3, 2)
    optimizer = eager.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert model.weight.grad is not None and not model.weight.grad.any()
    optimizer.zero_grad()
    assert model.weight.grad is None and model.bias.grad is None
