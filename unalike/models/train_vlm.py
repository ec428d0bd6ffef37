"""Trains vision-language models: two projections that align image and text features.

`unalike train-vlm` is `train_small`; `train_tiny` trains the model of digit scenes.
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

RECALL_AT = (1, 5, 10)
SCENE_CAPTIONS = ("{}", "a scene with {}", "digits in a scene {}", "the digits {}", "a scene of {}")
TEMPLATE = "a photo of a {}."


def train_small(
    folder: str | None = None,
    out: Path | None = None,
    device: str = "cpu",
    size: int = 224,
    seed: int = 0,
) -> dict[str, Any]:
    """Train the two projections of vlm-small on Flickr8k's training part.

    Args:
        folder: where Flickr8k and VOC 2012 are.
        out: file for the projections.
        size: side to which images are resized.
    Returns: recalls on Flickr8k's validation and test parts, zero-shot mAP on VOC 2012, settings
        and seconds.
    """
    data = load_flickr8k(folder)
    began = time.monotonic()
    shape = data.images.shape[1:]
    eye, reader = EfficientNetLite(shape, size=size), MiniLM()
    images = encode_images(eye.to(device), data.images, device)
    if len({len(texts) for texts in data.captions}) != 1:
        raise UserError("flickr8k_96_jpeg.npz needs as many captions for each image")
    flat = [text for texts in data.captions for text in texts]
    captions = encode_texts(reader.to(device), flat, device).unflatten(0, (len(data.captions), -1))
    train = data.rows(0)
    started = time.monotonic()
    image_projection, text_projection, scale = align(images[train], captions[train], seed=seed)
    aligned = time.monotonic() - started
    model = DualEncoder(
        eye,
        reader,
        image_projection=image_projection.to(device),
        text_projection=text_projection.to(device),
        shape=shape,
        scale=scale,
    )
    voc = load_dataset("voc2012", folder)
    result: dict[str, Any] = {}
    for name, part in (("validation", 1), ("test", 2)):
        rows = data.rows(part)
        result[name] = recall_at_k(image_projection(images[rows]), text_projection(captions[rows]))
    result["voc2012"] = zero_shot(model, voc, voc.test, device)
    if out is not None:
        save_projections(out, image_projection, text_projection, scale)
    return result | {
        "scale": scale,
        "width": image_projection.out_features,
        "size": size,
        "seed": seed,
        "device": device,
        "seconds": {"all": time.monotonic() - began, "aligning": aligned},
    }


def train_tiny(
    out: Path | None = None, steps: int = 400, batch: int = 128, rate: float = 3e-3, seed: int = 0
) -> dict[str, Any]:
    """Train vlm-tiny on scenes of the training digits; scenes of the test digits evaluate it."""
    began = time.monotonic()
    table = load_dataset("digits")
    generator = stream(seed, "scenes")
    assert isinstance(table.x, Tensor)
    images = table.x.mul(255).byte()
    train, test = (
        (images[rows], table.targets["digit"][rows]) for rows in (table.train, table.test)
    )
    with scope(seed, "tiny"):
        model = TinyVLM((1, 16, 16), weights="none").requires_grad_(True)
        optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
        schedule = build_schedule(optimizer, warmup=20, steps=steps)
        for _ in range(steps):
            scenes, present = compose(*train, len(DIGITS), batch, 3, generator)
            captions, named = caption_scenes(present, generator)
            # (captions, scenes): 1 if all that a caption names is in the scene
            matches = (named @ present.T == named.sum(1, keepdim=True)).float()
            scores = model.similarity(model.texts(captions), model(scenes.float() / 255))
            loss = matching_loss(scores, matches)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.requires_grad_(False)
    scenes, present = compose(*test, len(DIGITS), 1000, 3, stream(seed, "judge"))
    meter = MultiLabel(DIGITS).meter()
    names = model.texts([f"a scene with a {name}" for name in DIGITS])
    meter.add(model.similarity(model(scenes.float() / 255), names).log_softmax(1), present)
    if out is not None:
        save_half(out, model.state_dict())
    return {
        "digit scenes": {"mAP": meter.result()["mAP"]},
        "seed": seed,
        "seconds": {"all": time.monotonic() - began},
    }


def build_schedule(
    optimizer: torch.optim.Optimizer, warmup: int, steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up, then cosine decay to 0."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min(1, (i + 1) / warmup) * (1 + math.cos(math.pi * i / steps)) / 2
    )


def caption_scenes(present: Tensor, generator: torch.Generator) -> tuple[list[str], Tensor]:
    """A sentence per scene about some of its digits.

    Args:
        present: which digits are in each scene, (n, 10).
    Returns: the sentences, and which digits each names, (n, 10).
    """
    named = present * (torch.rand(present.shape, generator=generator) < 0.7)
    named = torch.where(named.any(1, keepdim=True), named, present)
    forms = torch.randint(len(SCENE_CAPTIONS), (len(present),), generator=generator).tolist()
    captions = []
    for row, form in zip(named, forms):
        order = torch.randperm(int(row.sum()), generator=generator)
        digits = row.nonzero().flatten()[order].tolist()
        names = " and ".join(f"a {DIGITS[i]}" for i in digits)
        captions.append(SCENE_CAPTIONS[form].format(names))
    return captions, named


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
    """Train linear projections of image and caption features into one space by contrast.

    One caption of each image at a time is contrasted with all images of a batch, both ways, as in
    CLIP (Radford et al. 2021, https://arxiv.org/abs/2103.00020). Features are standardised first;
    this is folded into the projections.

    Args:
        images: features (n, a).
        captions: features (n, k, b).
        width: of the joint space.
        blank: dropout rates of image and caption features.
        scale: of similarities at the start.
    Returns: the projections of images and of captions, and the learned scale.
    """
    device = images.device
    means = [images.mean(0), captions.mean((0, 1))]
    deviations = [images.std(0), captions.std((0, 1))]
    deviations = [std.clamp(min=0.1 * std.mean()) for std in deviations]
    x, c = (images - means[0]) / deviations[0], (captions - means[1]) / deviations[1]
    with scope(seed, "alignment"):
        layers = [
            nn.Linear(x.shape[-1], width).to(device),
            nn.Linear(c.shape[-1], width).to(device),
        ]
        log_scale = nn.Parameter(torch.tensor(math.log(scale), device=device))
        parameters = [*layers[0].parameters(), *layers[1].parameters(), log_scale]
        optimizer = torch.optim.AdamW(parameters, rate, weight_decay=decay)
        batch = min(batch, len(x))
        schedule = build_schedule(optimizer, warmup=10, steps=epochs * (len(x) // batch))
        generator = stream(seed, "order")
        for _ in range(epochs):
            for rows in batches(len(x), batch, generator):
                if len(rows) < batch:
                    continue
                which = torch.randint(c.shape[1], (len(rows),), generator=generator)
                loss = contrastive_loss(
                    layers[0](F.dropout(x[rows], blank[0])),
                    layers[1](F.dropout(c[rows, which], blank[1])),
                    log_scale.exp(),
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    for layer, mean, std in zip(layers, means, deviations):
        layer.requires_grad_(False)
        layer.weight.div_(std)
        layer.bias.sub_(layer.weight @ mean)
    return layers[0], layers[1], log_scale.exp().item()


def contrastive_loss(images: Tensor, texts: Tensor, scale: Tensor | float) -> Tensor:
    """Row i of images should match row i of texts, and no other, by scale x cosine."""
    scores = scale * F.normalize(images, dim=-1) @ F.normalize(texts, dim=-1).mT
    return matching_loss(scores, torch.eye(len(scores), device=scores.device))


def matching_loss(scores: Tensor, matches: Tensor) -> Tensor:
    """Cross entropy along rows and columns, averaged.

    Args:
        scores: (n, m).
        matches: (n, m), 1 for pairs that match; those of a row, or of a column, share its
            probability. Each has at least one.
    """
    by_row = F.cross_entropy(scores, matches / matches.sum(1, keepdim=True))
    by_column = F.cross_entropy(scores.mT, matches.mT / matches.mT.sum(1, keepdim=True))
    return (by_row + by_column) / 2


def recall_at_k(images: Tensor, captions: Tensor) -> dict[str, dict[str, float]]:
    """Recall at 1, 5 and 10 in percent, of retrieval both ways.

    Args:
        images: (n, d).
        captions: of each image, (n, k, d).

    >>> recall_at_k(torch.eye(3), torch.eye(3)[:, None])["text to image"]["R@1"]
    100.0
    """
    n, k, _ = captions.shape
    flat = F.normalize(captions, dim=-1).flatten(0, 1)
    scores = F.normalize(images, dim=-1) @ flat.mT  # (n, n k)
    own = torch.arange(n, device=images.device)
    right = scores.unflatten(1, (n, k))[own, own]  # (n, k)
    # how many score higher than the right image, or than the best of the right captions
    ranks = {
        "text to image": (scores > right.flatten()).sum(0),
        "image to text": (scores > right.amax(1, keepdim=True)).sum(1),
    }
    recalls = {}
    for name, rank in ranks.items():
        recalls[name] = {f"R@{at}": 100 * float((rank < at).double().mean()) for at in RECALL_AT}
    return recalls


def zero_shot(
    model: VisionLanguageModel, table: Any, rows: Tensor, device: str, template: str = TEMPLATE
) -> dict[str, float]:
    """mAP of a multi-label table's rows by the similarity of images and label names alone."""
    task, y = table.tasks["objects"], table.targets["objects"][rows]
    model.to(device)
    labels = [READABLE_NAMES.get(label, label) for label in task.labels]
    with torch.no_grad():
        names = model.texts([template.format(label) for label in labels])
        images = encode_images(model, table.x[rows], device)
        scores = model.similarity(images, names).log_softmax(1)
    meter = task.meter()
    meter.add(scores, y)
    return {"mAP": meter.result()["mAP"]}


def encode_images(encoder: nn.Module, images: Tensor, device: str, batch: int = 64) -> Tensor:
    """Features (n, width) on the device, of images (n, ...) stored as bytes."""
    encoder.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    features = []
    with torch.no_grad():
        for i in range(0, len(images), batch):
            pixels = images[i : i + batch].to(device).float().div(255)
            features.append(encoder(pixels.contiguous(memory_format=torch.channels_last)))
            print_progress(f"{min(i + batch, len(images))} of {len(images)} images", i // batch)
    return torch.cat(features)


def encode_texts(reader: Any, texts: Sequence[str], device: str, batch: int = 256) -> Tensor:
    """Features (n, width) of texts on the device; texts of similar length are batched together."""
    ids = [[*reader.begin, *reader.split(text), *reader.end][: reader.context] for text in texts]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    features = torch.empty(len(ids), reader.width, device=device)
    with torch.no_grad():
        for i in range(0, len(order), batch):
            rows = order[i : i + batch]
            longest = max(len(ids[row]) for row in rows)
            padded = [ids[row] + [0] * (longest - len(ids[row])) for row in rows]
            tokens = torch.tensor(padded, device=device)
            lengths = torch.tensor([[len(ids[row])] for row in rows], device=device)
            mask = torch.arange(longest, device=device) < lengths
            encoded = reader.eval().read(reader.embed(tokens), mask)
            features[torch.tensor(rows, device=device)] = encoded
            print_progress(f"{min(i + batch, len(order))} of {len(order)} texts", i // batch)
    return features


def save_projections(
    path: Path, image_projection: nn.Linear, text_projection: nn.Linear, scale: float
) -> None:
    """Write the two projections and the scale, for `SmallVLM`."""
    state = {"scale": torch.tensor(scale)}
    for name, layer in (("seen", image_projection), ("told", text_projection)):
        state |= {f"{name}.{part}": tensor for part, tensor in layer.state_dict().items()}
    save_half(path, state)


def save_half(path: Path, state: dict[str, Tensor]) -> None:
    """Write tensors in half precision."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.half().cpu().contiguous() for name, tensor in state.items()}, path)


def print_progress(line: str, step: int) -> None:
    if step % 20 == 0 and sys.stderr.isatty():
        sys.stderr.write(f"\r{line}   ")
