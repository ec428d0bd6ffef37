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
