"""Smaller copies of data files and weights, for a machine to which little can be carried.

    python -m benchmarks.cut_data FROM TO voc2012_cls_96_jpeg=3300 cifar10=3000 efficientnet-lite0

Weights of EfficientNet-lite are written in half precision, without their classifier, and those of
all-minilm-l6-v2 as a folder, in half precision too. Rows are drawn at random in the proportions of parts (training, test), classes and domains, and are
the same ones whenever they are drawn. Numbers measured on such files are said to be of cut data.
"""

import json
import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from unalike.base.randomness import stream
from unalike.models.efficientnet import find_weights
from unalike.models.minilm import FOLDER as MINILM
from unalike.models.minilm import find_weights as find_minilm

Arrays = Mapping[str, np.ndarray]


def cut_file(source: Path, target: Path, rows: int) -> None:
    """Write a copy of a data file with about so many rows, or all if it has no more."""
    with np.load(source, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    if "x_train" in arrays:  # CIFAR-10: an array for each part
        total = len(arrays["x_train"]) + len(arrays["x_test"])
        for part in ("train", "test"):
            kept = draw_rows([arrays[f"y_{part}"].ravel()], rows / total, f"{source.stem} {part}")
            arrays |= {f"{axis}_{part}": arrays[f"{axis}_{part}"][kept] for axis in "xy"}
    else:
        arrays = cut_images(arrays, rows, source.stem)
    target.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(target, **arrays)


def cut_images(arrays: Arrays, rows: int, name: str) -> dict[str, np.ndarray]:
    """The arrays of some rows of a file of JPEG images (`unalike.data.jpeg`)."""
    off = arrays["off"]
    count = len(off) - 1
    kinds = [arrays[kind] for kind in ("split", "y", "domain") if kind in arrays]
    kept = draw_rows([kind for kind in kinds if kind.ndim == 1], rows / count, name)
    cut = {}
    for key, array in arrays.items():
        per_row = array.ndim > 0 and len(array) == count
        cut[key] = array[kept] if per_row else array
    cut["jpeg"] = np.concatenate([arrays["jpeg"][off[row] : off[row + 1]] for row in kept])
    cut["off"] = np.concatenate([off[:1] * 0, np.diff(off)[kept].cumsum()]).astype(off.dtype)
    if "captions_json" in arrays:
        captions = json.loads(arrays["captions_json"].tobytes())
        if isinstance(captions, list):
            text = json.dumps([captions[row] for row in kept])
            cut["captions_json"] = np.frombuffer(text.encode(), np.uint8)
    return cut


def draw_rows(kinds: list[np.ndarray], share: float, name: str) -> np.ndarray:
    """Row numbers, rising: this share of the rows of each combination of kinds, two at least.

    >>> draw_rows([np.array([0] * 8 + [1] * 4)], 0.5, "doctest").shape
    (6,)
    """
    _, stratum = np.unique(np.stack(kinds, 1), axis=0, return_inverse=True)
    kept = []
    for number in range(stratum.max() + 1):
        members = np.flatnonzero(stratum == number)
        order = torch.randperm(len(members), generator=stream(0, "cut", name, number)).numpy()
        kept.append(members[order[: max(2, math.ceil(share * len(members)))]])
    return np.sort(np.concatenate(kept))


def cut_weights(name: str, target: Path) -> None:
    """Write the weights of efficientnet-lite0, 1 or 2 that our encoders use, in half precision."""
    state = torch.load(find_weights("imagenet", int(name[-1])), weights_only=True)
    used = {key: tensor for key, tensor in state.items() if not key.startswith("_fc.")}
    halves = {k: t.half() if t.is_floating_point() else t for k, t in used.items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.save(halves, target)


def cut_minilm(target: Path) -> None:
    """Write a folder with MiniLM's weights in half precision, its configuration and tokenizer."""
    folder = find_minilm("published")
    target.mkdir(parents=True, exist_ok=True)
    state = load_file(folder / "model.safetensors")
    halves = {k: t.half() if t.is_floating_point() else t for k, t in state.items()}
    save_file(halves, target / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, target / name)


if __name__ == "__main__":
    folder, out, *wanted = sys.argv[1:]
    for text in wanted:
        name, _, rows = text.partition("=")
        target = Path(out) / f"{name}.{'npz' if rows else 'pth'}"
        if name == MINILM:
            target = target.with_suffix("") / "model.safetensors"
            cut_minilm(target.parent)
        elif rows:
            cut_file(Path(folder) / target.name, target, int(rows))
        else:
            cut_weights(name, target)
        print(f"{target}: {target.stat().st_size / 1e6:.1f} MB")
