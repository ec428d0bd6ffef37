"""Files of a whole model, with what is frozen: in the layout of transformers and peft, or ours.

A model whose encoder is a transformers model is written so that transformers reads the folder by
itself (`AutoModel.from_pretrained`): config.json and model.safetensors, with adapters also
adapter_config.json and adapter_model.safetensors, and its tokenizer or preprocessor. What we added,
projection and head, is in head.safetensors. Of any other model, model.safetensors has everything.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from unalike.base.errors import UserError
from unalike.models.frozen import whole_state

WEIGHTS = "model.safetensors"
HEAD = "head.safetensors"
ADAPTER = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # of names in peft's files


def all_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of a model by name, with what is frozen, also in an unregistered encoder."""
    state = dict(whole_state(model))
    encoder = model.__dict__.get("encoder")
    if isinstance(encoder, nn.Module):
        state |= {f"encoder.{name}": tensor for name, tensor in whole_state(encoder).items()}
    return state


def write_weights(model: nn.Module, folder: Path) -> list[str]:
    """Write all weights of a model; return a line about each file."""
    state = all_weights(model)
    found = find_transformer(model)
    if found is None:
        _save(state, folder / WEIGHTS)
        return [f"{folder / WEIGHTS}   {_count(model):,} parameters"]
    path, transformer = found
    inner, rest = _split(state, f"{path}.")
    base, adapters = split_adapters(inner)
    transformer.save_pretrained(folder, state_dict=base)
    lines = [
        f"{folder / WEIGHTS}   {_numel(base):,} parameters of the encoder, with config.json: "
        "transformers reads this folder"
    ]
    if adapters:
        _save({PEFT_PREFIX + name: t for name, t in adapters.items()}, folder / ADAPTER)
        _adapter_config(transformer, getattr(model, "encoder", model)).save_pretrained(str(folder))
        lines.append(f"{folder / ADAPTER}   {_numel(adapters):,} parameters of adapters, for peft")
    save_preprocessing = getattr(getattr(model, "encoder", None), "save_preprocessing", None)
    if callable(save_preprocessing):
        save_preprocessing(folder)
    _save(rest, folder / HEAD)
    lines.append(f"{folder / HEAD}   {_numel(rest):,} numbers beside the encoder")
    return lines


def read_weights(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """All weights that `write_weights` wrote, by the names that they have in the model.

    Args:
        model: built like the one that was written.
    """
    if not (folder / HEAD).is_file():
        return load_file(folder / WEIGHTS)
    found = find_transformer(model)
    if found is None:
        raise UserError(
            f"{folder} holds a transformers model, and this client's model is none; make the "
            "client as it was for the run"
        )
    import transformers

    path, transformer = found
    auto = "AutoModelForCausalLM" if transformer.can_generate() else "AutoModel"
    loaded = getattr(transformers, auto).from_pretrained(folder)
    names = whole_state(transformer).keys()
    stored = {name: t for name, t in loaded.state_dict().items() if name in names}
    if names - stored.keys():
        raise UserError(f"{folder} lacks {sorted(names - stored.keys())[0]} of the client's model")
    return load_file(folder / HEAD) | {f"{path}.{name}": t for name, t in stored.items()}


def find_transformer(model: nn.Module) -> tuple[str, Any] | None:
    """The transformers model inside a model, and its path; None where there is none or several.

    A model that was made narrower is none: its config says other widths.
    """
    if "transformers" not in sys.modules:  # then nothing is one of its models
        return None
    from transformers import PreTrainedModel

    found: list[tuple[str, Any]] = []
    for path, module in model.named_modules():
        outer = [name for name, _ in found if path.startswith(f"{name}.")]
        if isinstance(module, PreTrainedModel) and not outer:
            found.append((path, module))
    if len(found) != 1 or not _fits_config(found[0][1]):
        return None
    return found[0]


def _fits_config(transformer: Any) -> bool:
    """Whether the weights have the shapes that the model's config says."""
    with torch.device("meta"):
        plain = type(transformer)(transformer.config).state_dict()
    base, _ = split_adapters(whole_state(transformer))
    return all(name in plain and plain[name].shape == t.shape for name, t in base.items())


def split_adapters(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of a model without adapters, and the adapters by the names of peft's files."""
    base, adapters = {}, {}
    for name, tensor in state.items():
        if ".lora_" in name:
            adapters[name.replace(".default.", ".")] = tensor
        else:
            base[name.replace(".base_layer.", ".")] = tensor
    return base, adapters


def _adapter_config(transformer: Any, encoder: nn.Module) -> Any:
    """The LoraConfig of a model's adapters, ready to be saved."""
    owners = [transformer, *encoder.modules()]
    configs = next(m.peft_config for m in owners if getattr(m, "peft_config", None))
    config = configs["default"]
    config.base_model_name_or_path = transformer.name_or_path or None
    config.inference_mode = True
    return config


def _split(state: dict[str, Tensor], prefix: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Entries whose names start with a prefix, without it, and all others."""
    inner, rest = {}, {}
    for name, tensor in state.items():
        if name.startswith(prefix):
            inner[name.removeprefix(prefix)] = tensor
        else:
            rest[name] = tensor
    return inner, rest


def _save(state: dict[str, Tensor], file: Path) -> None:
    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, file)


def _numel(state: dict[str, Tensor]) -> int:
    return sum(tensor.numel() for tensor in state.values())


def _count(model: nn.Module) -> int:
    """Number of parameters, those of an unregistered encoder included."""
    modules = [model]
    encoder = model.__dict__.get("encoder")
    if isinstance(encoder, nn.Module):
        modules.append(encoder)
    return sum(p.numel() for module in modules for p in module.parameters())
