"""Channel groups of transformers models are those that torch-pruning finds, where it succeeds."""

import pytest
import torch
from pretrained import READERS, save_reader, small
from torch import nn

from unalike.data.text_codes import texts_to_codes
from unalike.models import build_encoder
from unalike.models.submodels import find_channel_groups

pytest.importorskip("transformers")
FAMILIES = [
    *("vit", "dinov2", "registers", "swin", "convnext", "resnet", "segformer"),
    *("bert", "distilbert", "roberta", "llama", "clip", "siglip", "mobilenet"),
]  # torch-pruning 1.6 fails on GPT-2


def encoder_and_rows(family, folder):
    if family in READERS:
        save_reader(folder, family, ["a", "the", "dog", "cat", "runs"])
        encoder = build_encoder("reader", (20,), {"model": str(folder), "length": 6})
        return encoder, encoder.trunk(texts_to_codes(["a dog runs", "the cat"], 20))
    torch.manual_seed(0)
    small(family).save_pretrained(folder)
    size = {"size": 32} if family in ("convnext", "segformer") else {}
    encoder = build_encoder("hub", (3, 32, 32), {"model": str(folder), **size})
    return encoder, torch.rand(2, 3, 32, 32)


def tied_by_torch_pruning(graph, names, layer):
    """(weight, axis) of all layers that lose channel 0 with this one."""
    prune = graph.get_pruner_of_module(layer).prune_out_channels
    tied = set()
    for dependency, _ in graph.get_pruning_group(layer, prune, idxs=[0]):
        module = dependency.target.module
        if module in names:
            loses_output = dependency.handler.__name__ == "prune_out_channels"
            is_table = isinstance(module, nn.Embedding)
            is_norm = isinstance(module, nn.LayerNorm | nn.BatchNorm2d)
            axis = 0 if is_norm or (loses_output and not is_table) else 1
            tied.add((f"{names[module]}.weight", axis))
    return tied


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_layers_are_tied_as_by_torch_pruning(family, tmp_path):
    """But for layers it does not see: those without effect on the output, and RMS norms."""
    pruning = pytest.importorskip("torch_pruning")
    encoder, x = encoder_and_rows(family, tmp_path)
    model = nn.Sequential(encoder, nn.Linear(encoder.width, 3)).eval()
    graph = pruning.DependencyGraph().build_dependency(model, example_inputs=x)
    names = {module: name for name, module in model.named_modules()}
    layers = dict(model.named_modules())
    compared = 0
    for group in find_channel_groups(model, x):
        first = group.slices[0]
        layer = layers[first.tensor.rpartition(".")[0]]
        if layer not in graph.module2node or first.entries.shape[1] > 1:
            continue  # heads: torch-pruning must be told their number
        ours = {(s.tensor, s.axis) for s in group.slices if s.tensor.endswith(".weight")}
        seen = {s for s in ours if layers[s[0].rpartition(".")[0]] in graph.module2node}
        assert seen == tied_by_torch_pruning(graph, names, layer)
        compared += 1
    assert compared > 1
