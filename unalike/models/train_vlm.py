"""Makes models that see and read out of parts: two linear layers bring features of images and texts together. Knows no clients.

`unalike train-vlm` is `train_small`; the rest are its parts, and `train_tiny` makes the model of digit scenes.
"""

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from unalike.base.errors import UserError
from unalike.base.randomness import scope, stream
from unalike.data import load_dataset
from unalike.data.composites import compose
from unalike.data.flickr8k import load_flickr8k
from unalike.models.efficientnet import EfficientNetLite
from unalike.models.minilm import MiniLM
from unalike.models.tiny_vlm import DIGITS, TinyVLM
from unalike.models.vlm import READABLE_NAMES, DualEncoder, VisionLanguageModel
from unalike.tasks import MultiLabel
from unalike.training.batching import batches

AT = (1, 5, 10)
FORMS = ("{}", "a scene with {}", "digits in a scene {}", "the digits {}", "a scene of {}")
TEMPLATE = "a photo of a {}."


def train_small(
    folder: str | None = None,
    out: Path | None = None,
    device: str = "cpu",
    size: int = 224,
    seed: int = 0,
) -> dict[str, Any]:
    """The two layers of vlm-small, from Flickr8k's training part; and how good they are: retrieval, and VOC 2012 without its labels."""
    pairs, began = load_flickr8k(folder), time.monotonic()
    eye, reader = EfficientNetLite(pairs.images.shape[1:], size=size), MiniLM()
    images = encode_images(eye.to(device), pairs.images, device)
    if len({len(its) for its in pairs.captions}) != 1:
        raise UserError("flickr8k_96_jpeg.npz needs as many captions for each image")
    flat = [text for its in pairs.captions for text in its]
    captions = encode_texts(reader.to(device), flat, device).unflatten(0, (len(pairs.captions), -1))
    train = pairs.rows(0)
    started = time.monotonic()
    seen, read, scale = align(images[train], captions[train], seed=seed)
    aligned = time.monotonic() - started
    model = DualEncoder(
        eye, reader, seen.to(device), read.to(device), pairs.images.shape[1:], scale
    )
    voc = load_dataset("voc2012", folder)
    result = {
        part: recall_at_k(seen(images[rows]), read(captions[rows]))
        for part, rows in (("validation", pairs.rows(1)), ("test", pairs.rows(2)))
    } | {"voc2012": zero_shot(model, voc, voc.test, device)}
    if out is not None:
        write(out, seen, read, scale)
    return result | {
        "scale": scale,
        "width": seen.out_features,
        "size": size,
        "seed": seed,
        "device": device,
        "seconds": {"all": time.monotonic() - began, "aligning": aligned},
    }


def train_tiny(
    out: Path | None = None, steps: int = 400, batch: int = 128, rate: float = 3e-3, seed: int = 0
) -> dict[str, Any]:
    """The weights of vlm-tiny, whole, from scenes of the digits that are for training; scenes of the others say how good they are."""
    began = time.monotonic()
    table, draws = load_dataset("digits"), stream(seed, "scenes")
    assert isinstance(table.x, Tensor)
    digits = [
        (table.x[rows].mul(255).byte(), table.targets["digit"][rows])
        for rows in (table.train, table.test)
    ]
    with scope(seed, "tiny"):
        model = TinyVLM((1, 16, 16), weights="none").requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
        slope = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda i: min(1, (i + 1) / 20) * (1 + math.cos(math.pi * i / steps)) / 2
        )
        for _ in range(steps):
            images, there = compose(*digits[0], len(DIGITS), batch, 3, draws)
            captions, meant = caption_scenes(there, draws)
            fits = (
                meant @ there.T == meant.sum(1, keepdim=True)
            ).float()  # caption i says nothing false of image j
            likeness = model.similarity(model.texts(captions), model(images.float() / 255))
            loss = matching_loss(likeness, fits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            slope.step()
    model.requires_grad_(False)
    images, there = compose(*digits[1], len(DIGITS), 1000, 3, stream(seed, "judge"))
    meter = MultiLabel(DIGITS).meter()
    names = model.texts([f"a scene with a {name}" for name in DIGITS])
    meter.add(model.similarity(model(images.float() / 255), names).log_softmax(1), there)
    if out is not None:
        save_half(out, model.state_dict())
    return {
        "digit scenes": {"mAP": meter.result()["mAP"]},
        "seed": seed,
        "seconds": {"all": time.monotonic() - began},
    }


def caption_scenes(there: Tensor, draws: torch.Generator) -> tuple[list[str], Tensor]:
    """For each scene a sentence about some of the digits that are there (n, 10), and which it names (n, 10)."""
    named = there * (torch.rand(there.shape, generator=draws) < 0.7)
    named = torch.where(named.any(1, keepdim=True), named, there)
    encode_texts = []
    for row, form in zip(named, torch.randint(len(FORMS), (len(there),), generator=draws).tolist()):
        names = [
            f"a {DIGITS[i]}"
            for i in row.nonzero()
            .flatten()[torch.randperm(int(row.sum()), generator=draws)]
            .tolist()
        ]
        encode_texts.append(FORMS[form].format(" and ".join(names)))
    return encode_texts, named


def align(
    images: Tensor,
    captions: Tensor,
    width: int = 512,
    epochs: int = 30,
    batch: int = 2000,
    rate: float = 2e-3,
    decay: float = 0.1,
    blank: tuple[float, float] = (0.3, 0.1),
    scale: float = 20.0,
    seed: int = 0,
) -> tuple[nn.Linear, nn.Linear, float]:
    """Layers that bring images (n, a) and their captions (n, k, b) together in `width` dimensions, and the scale of similarities.

    Contrast both ways within a batch (Radford 2021), one caption of each image at a time; `blank` is the share of features of either side
    that is dropped. Features are brought to mean 0 and deviation 1 first, which then is part of the layers.
    """
    device = images.device
    means = [images.mean(0), captions.mean((0, 1))]
    spreads = [each.clamp(min=0.1 * each.mean()) for each in (images.std(0), captions.std((0, 1)))]
    x, c = (images - means[0]) / spreads[0], (captions - means[1]) / spreads[1]
    with scope(seed, "alignment"):
        layers = [
            nn.Linear(x.shape[-1], width).to(device),
            nn.Linear(c.shape[-1], width).to(device),
        ]
        logs = nn.Parameter(torch.tensor(math.log(scale), device=device))
        optimizer = torch.optim.AdamW(
            [*layers[0].parameters(), *layers[1].parameters(), logs], rate, weight_decay=decay
        )
        batch = min(batch, len(x))
        steps = epochs * (len(x) // batch)
        slope = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda i: min(1, (i + 1) / 10) * (1 + math.cos(math.pi * i / steps)) / 2
        )
        draws = stream(seed, "order")
        for _ in range(epochs):
            for rows in batches(len(x), batch, draws):
                if len(rows) < batch:
                    continue
                which = torch.randint(c.shape[1], (len(rows),), generator=draws)
                loss = contrast(
                    layers[0](F.dropout(x[rows], blank[0])),
                    layers[1](F.dropout(c[rows, which], blank[1])),
                    logs.exp(),
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                slope.step()
    for layer, mean, spread in zip(layers, means, spreads):
        layer.requires_grad_(False)
        layer.weight.div_(spread)
        layer.bias.sub_(layer.weight @ mean)
    return layers[0], layers[1], logs.exp().item()


def contrast(images: Tensor, texts: Tensor, scale: Tensor | float) -> Tensor:
    """Row i of either should find row i of the other, by scale x cosine."""
    likeness = scale * F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).mT
    return matching_loss(likeness, torch.eye(len(likeness), device=likeness.device))


def matching_loss(likeness: Tensor, fits: Tensor) -> Tensor:
    """Cross entropy both ways, (n, m) each: all that fit a row, or a column, share its probability; each has one that fits."""
    ways = ((likeness, fits), (likeness.mT, fits.mT))
    costs = [F.cross_entropy(given, truth / truth.sum(1, keepdim=True)) for given, truth in ways]
    return (costs[0] + costs[1]) / 2


def recall_at_k(images: Tensor, captions: Tensor) -> dict[str, dict[str, float]]:
    """How often the right one is among the first 1, 5, 10, in percent: images (n, d), their captions (n, k, d).

    >>> recall_at_k(torch.eye(3), torch.eye(3)[:, None])["text to image"]["R@1"]
    100.0
    """
    n, k, _ = captions.shape
    likeness = (
        F.normalize(images, dim=-1) @ F.normalize(captions, dim=-1).flatten(0, 1).mT
    )  # (n, n k)
    own = torch.arange(n, device=images.device)
    right = likeness.unflatten(1, (n, k))[own, own]  # (n, k)
    by_text = (likeness > right.flatten()).sum(0)  # images before the right one
    by_image = (likeness > right.amax(1, keepdim=True)).sum(
        1
    )  # captions before the first right one
    return {
        name: {f"R@{at}": 100 * float((before < at).double().mean()) for at in AT}
        for name, before in (("text to image", by_text), ("image to text", by_image))
    }


def zero_shot(
    model: VisionLanguageModel, table: Any, rows: Tensor, device: str, template: str = TEMPLATE
) -> dict[str, float]:
    """What a multi-label table's names alone say of its rows: softmax over classes of the similarity of image and name."""
    task, y = table.tasks["objects"], table.targets["objects"][rows]
    model.to(device)
    with torch.no_grad():
        names = model.texts(
            [template.format(READABLE_NAMES.get(label, label)) for label in task.labels]
        )
        scores = model.similarity(encode_images(model, table.x[rows], device), names).log_softmax(1)
    meter = task.meter()
    meter.add(scores, y)
    return {"mAP": meter.result()["mAP"]}


def encode_images(eye: nn.Module, images: Tensor, device: str, batch: int = 64) -> Tensor:
    """What an encoder says of images (n, ...) kept as bytes, (n, width), on the device."""
    eye.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    found = []
    with torch.no_grad():
        for i in range(0, len(images), batch):
            found.append(
                eye(
                    images[i : i + batch]
                    .to(device)
                    .float()
                    .div(255)
                    .contiguous(memory_format=torch.channels_last)
                )
            )
            say(f"{min(i + batch, len(images))} of {len(images)} images", i // batch)
    return torch.cat(found)


def encode_texts(reader: Any, texts: Sequence[str], device: str, batch: int = 256) -> Tensor:
    """What a reader says of texts, (n, width), on the device; texts of one length go together."""
    ids = [[*reader.begin, *reader.split(text), *reader.end][: reader.context] for text in texts]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    found = torch.empty(len(ids), reader.width, device=device)
    with torch.no_grad():
        for i in range(0, len(order), batch):
            rows = order[i : i + batch]
            longest = max(len(ids[row]) for row in rows)
            tokens = torch.tensor(
                [ids[row] + [0] * (longest - len(ids[row])) for row in rows], device=device
            )
            mask = torch.arange(longest, device=device) < torch.tensor(
                [[len(ids[row])] for row in rows], device=device
            )
            found[torch.tensor(rows, device=device)] = reader.eval().read(
                reader.embed(tokens), mask
            )
            say(f"{min(i + batch, len(order))} of {len(order)} texts", i // batch)
    return found


def write(path: Path, seen: nn.Linear, read: nn.Linear, scale: float) -> None:
    """The two layers in half precision."""
    held = {
        f"{name}.{part}": tensor
        for name, layer in (("seen", seen), ("told", read))
        for part, tensor in layer.state_dict().items()
    }
    save_half(path, held | {"scale": torch.tensor(scale)})


def save_half(path: Path, held: dict[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.half().cpu().contiguous() for name, tensor in held.items()}, path)


def say(line: str, step: int) -> None:
    if step % 20 == 0 and sys.stderr.isatty():
        sys.stderr.write(f"\r{line}   ")
