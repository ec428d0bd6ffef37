"""Trains vision-language models: projections that align features of images, places and texts.

`unalike train-vlm` is `train_small`; `train_tiny` trains the model of digit scenes.
"""

import math
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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
from unalike.models.efficientnet import EfficientNetLite, load_weights
from unalike.models.minilm import MiniLM
from unalike.models.tiny_vlm import DIGITS, TinyVLM
from unalike.models.vlm import READABLE_NAMES, DualEncoder, VisionLanguageModel
from unalike.tasks import MultiLabel
from unalike.training.batching import batches

RECALL_AT = (1, 5, 10)
SCENE_CAPTIONS = ("{}", "a scene with {}", "digits in a scene {}", "the digits {}", "a scene of {}")
TEMPLATE = "a photo of a {}."
IMAGENET_CLASSES = Path(__file__).parent / "weights" / "imagenet-classes.txt"
PLACE_SCALE = 20.0  # of cosines between places and texts


def train_small(
    folder: str | None = None,
    out: Path | None = None,
    device: str = "cpu",
    size: int = 224,
    seed: int = 0,
) -> dict[str, Any]:
    """Train the three projections of vlm-small on Flickr8k's training part.

    Args:
        folder: where Flickr8k and VOC 2012 are.
        out: file for the projections.
        size: side to which images are resized.
    Returns: recalls on Flickr8k's validation and test parts, zero-shot mAP on VOC 2012 by whole
        images and by places, settings and seconds.
    """
    data = load_flickr8k(folder)
    began = time.monotonic()
    shape = data.images.shape[1:]
    eye, reader = EfficientNetLite(shape, size=size), MiniLM()
    images, grids = encode_grids(eye.to(device), data.images, device)
    if len({len(texts) for texts in data.captions}) != 1:
        raise UserError("flickr8k_96_jpeg.npz needs as many captions for each image")
    reader.to(device)
    flat = [text for texts in data.captions for text in texts]
    captions = encode_texts(reader, flat, device).unflatten(0, (len(data.captions), -1))
    train = data.rows(0)
    started = time.monotonic()
    image_projection, text_projection, scale = align(images[train], captions[train], seed=seed)
    words, named = caption_words([data.captions[row] for row in train.tolist()])
    classifier, classes = imagenet_classifier()
    texts = PlaceTexts(
        captions=captions[train],
        words=encode_texts(reader, [TEMPLATE.format(word) for word in words], device),
        named=named.to(device),
        classes=encode_texts(reader, [TEMPLATE.format(name) for name in classes], device),
    ).project(text_projection)
    place_projection = align_places(
        grids[train], texts, image_projection, classifier.to(device), seed=seed
    )
    aligned = time.monotonic() - started
    model = DualEncoder(
        eye,
        reader,
        image_projection=image_projection.to(device),
        text_projection=text_projection.to(device),
        shape=shape,
        scale=scale,
        place_projection=place_projection,
    )
    voc = load_dataset("voc2012", folder)
    result: dict[str, Any] = {}
    for name, part in (("validation", 1), ("test", 2)):
        rows = data.rows(part)
        result[name] = recall_at_k(image_projection(images[rows]), text_projection(captions[rows]))
    result["voc2012"] = zero_shot(model, voc, voc.test, device)
    if out is not None:
        save_projections(out, image_projection, text_projection, scale, place_projection)
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


@dataclass(frozen=True)
class PlaceTexts:
    """What places are compared with when their projection learns.

    Attributes:
        captions: of each image, (n, k, width).
        words: texts of words, (w, width).
        named: which images have captions with which words, (n, w).
        classes: texts of the image encoder's own classes, (c, width).
    """

    captions: Tensor
    words: Tensor
    named: Tensor
    classes: Tensor

    def project(self, projection: nn.Module) -> "PlaceTexts":
        """The same as unit vectors of the joint space."""
        with torch.no_grad():
            captions, words, classes = (
                F.normalize(projection(part), dim=-1)
                for part in (self.captions, self.words, self.classes)
            )
        return PlaceTexts(captions, words, self.named, classes)


def align_places(
    grids: Tensor,
    texts: PlaceTexts,
    start: nn.Linear,
    classifier: nn.Linear,
    epochs: int = 9,
    batch: int = 250,
    places: int = 24,
    rate: float = 2e-3,
    decay: float = 0.1,
    blank: float = 0.3,
    softness: float = 1.5,
    seed: int = 0,
) -> nn.Linear:
    """Train a projection of places into the space that texts have already.

    The text projection stays as it is. Three losses of the same weight, no place has a label:
    captions and words of an image are to match the places that resemble them most (`pool_places`),
    and a place is to lie among class names as the image encoder's own classifier sees it.

    Args:
        grids: features of places (n, p, a).
        texts: of as many images, unit vectors.
        start: the projection to start from.
        classifier: of features (a -> c), published with the image encoder.
        places: so many random places of an image a step.
        blank: dropout rate of features.
        softness: temperature of the classifier.
    """
    device = grids.device
    with scope(seed, "places"):
        layer = nn.Linear(start.in_features, start.out_features).to(device)
        layer.load_state_dict(start.state_dict())
        log_scales = nn.Parameter(torch.zeros(3, device=device))
        groups: list[dict[str, Any]] = [
            {"params": list(layer.parameters())},
            {"params": [log_scales], "weight_decay": 0.0, "lr": 1e-2},
        ]
        optimizer = torch.optim.AdamW(groups, rate, weight_decay=decay)
        batch = min(batch, len(grids))
        schedule = build_schedule(optimizer, warmup=10, steps=epochs * (len(grids) // batch))
        generator = stream(seed, "order of places")
        for _ in range(epochs):
            for rows in batches(len(grids), batch, generator):
                if len(rows) < batch:
                    continue
                features = draw_places(grids[rows], places, generator)
                which = torch.randint(texts.captions.shape[1], (len(rows),), generator=generator)
                with torch.autocast(device.type, torch.bfloat16):
                    z = F.normalize(layer(F.dropout(features, blank)).float(), dim=-1)
                    matched = match_places(
                        z, texts.captions[rows, which], texts.words, texts.named[rows], log_scales
                    )
                    with torch.no_grad():
                        seen = (classifier(features).float() / softness).softmax(-1)
                    among = PLACE_SCALE * log_scales[2].exp() * (z @ texts.classes.mT).float()
                    taught = -(seen * among.log_softmax(-1)).sum(-1).mean()
                loss = matched + taught
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return layer.requires_grad_(False)


def draw_places(grids: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """So many random places (n, count, a) of each image's (n, p, a)."""
    drawn = torch.rand(grids.shape[:2], generator=generator).argsort(1)[:, :count]
    return grids.gather(1, drawn[..., None].expand(-1, -1, grids.shape[2]).to(grids.device))


def match_places(
    z: Tensor, captions: Tensor, words: Tensor, named: Tensor, log_scales: Tensor
) -> Tensor:
    """Loss of images' places (n, p, width) with a caption each (n, width) and words (w, width).

    Args:
        named: which images have which words, (n, w).
        log_scales: of both similarities, two numbers or more.
    """
    own = torch.eye(len(z), device=z.device)
    by_caption = matching_loss(log_scales[0].exp() * pool_places(z, captions), own)
    images, present = named.any(1), named.any(0)
    scores = log_scales[1].exp() * pool_places(z[images], words[present])
    return by_caption + matching_loss(scores, named[images][:, present].float())


def pool_places(z: Tensor, texts: Tensor) -> Tensor:
    """Similarity (n, m) of images and texts, by the places that resemble a text most.

    Places are weighed by the softmax of their similarity.

    Args:
        z: unit vectors of places, (n, p, width).
        texts: unit vectors, (m, width).
    """
    similarity = PLACE_SCALE * (z @ texts.mT).float()
    return (similarity.softmax(1) * similarity).sum(1)


def caption_words(
    captions: Sequence[Sequence[str]], least: int = 20, most: float = 0.4
) -> tuple[list[str], Tensor]:
    """Words of captions, plurals counted with their singulars.

    Args:
        captions: of each image.
        least, most: words of fewer images, or of more than this share of them, are left out.
    Returns: the words in order, and which images have captions with them (n, w).

    >>> caption_words([["Two dogs run"], ["a dog"], ["A cat runs"]], least=2, most=0.9)[0]
    ['dog', 'run']
    """
    found = [set(re.findall("[a-z]{3,}", " ".join(texts).lower())) for texts in captions]
    known = set().union(*found)
    singular = {}
    for word in known:
        endings = [word[:-size] for size in (2, 1) if word.endswith(("", "s", "es")[size])]
        singular[word] = next((stem for stem in endings if stem in known), word)
    documents = [{singular[word] for word in words} for words in found]
    counts = Counter(word for words in documents for word in words)
    limit = most * len(captions)
    chosen = sorted(word for word, count in counts.items() if least <= count <= limit)
    rows = [[word in words for word in chosen] for words in documents]
    return chosen, torch.tensor(rows)


def imagenet_classifier() -> tuple[nn.Linear, list[str]]:
    """The classifier published with EfficientNet-lite0, and the names of its classes."""
    state = load_weights("imagenet", 0)
    names = IMAGENET_CLASSES.read_text().splitlines()
    classifier = nn.Linear(state["_fc.weight"].shape[1], len(names)).requires_grad_(False)
    classifier.load_state_dict({"weight": state["_fc.weight"], "bias": state["_fc.bias"]})
    return classifier, names


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
    """mAP of a multi-label table's rows by the similarity of images and label names alone.

    Returns: `mAP` by whole images, `places_mAP` by the places that resemble a name most.
    """
    task, y = table.tasks["objects"], table.targets["objects"][rows]
    model.to(device)
    labels = [READABLE_NAMES.get(label, label) for label in task.labels]
    whole_scores, place_scores = [], []
    with torch.no_grad():
        names = model.texts([template.format(label) for label in labels])
        for index in batches(len(rows), 64):
            pixels = table.x[rows[index]].to(device).float().div(255)
            places, whole = model.patches(pixels)
            whole_scores.append(model.similarity(whole, names))
            z, texts = F.normalize(places, dim=-1), F.normalize(names, dim=-1)
            place_scores.append(pool_places(z, texts))
            print_progress(f"{index[-1] + 1} of {len(rows)} images", int(index[0]) // 64)
    result = {}
    for name, scores in (("mAP", whole_scores), ("places_mAP", place_scores)):
        meter = task.meter()
        meter.add(torch.cat(scores).log_softmax(1), y)
        result[name] = meter.result()["mAP"]
    return result


def encode_grids(
    encoder: EfficientNetLite, images: Tensor, device: str, batch: int = 64
) -> tuple[Tensor, Tensor]:
    """Features of images stored as bytes: of the whole (n, a), of places (n, p, a) in bfloat16."""
    encoder.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    whole, places = [], []
    with torch.no_grad():
        for i in range(0, len(images), batch):
            pixels = images[i : i + batch].to(device).float().div(255)
            grid = encoder.grid(pixels.contiguous(memory_format=torch.channels_last))
            whole.append(grid.mean((-2, -1)))
            places.append(grid.flatten(2).mT.bfloat16().contiguous())
            print_progress(f"{min(i + batch, len(images))} of {len(images)} images", i // batch)
    return torch.cat(whole), torch.cat(places)


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
    path: Path,
    image_projection: nn.Linear,
    text_projection: nn.Linear,
    scale: float,
    place_projection: nn.Linear | None = None,
) -> None:
    """Write the projections and the scale, for `SmallVLM`."""
    state = {"scale": torch.tensor(scale)}
    layers = {"seen": image_projection, "told": text_projection}
    if place_projection is not None:
        layers["placed"] = place_projection
    for name, layer in layers.items():
        state |= {f"{name}.{part}": tensor for part, tensor in layer.state_dict().items()}
    save_half(path, state)


def save_half(path: Path, state: dict[str, Tensor]) -> None:
    """Write tensors in half precision."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.half().cpu().contiguous() for name, tensor in state.items()}, path)


def print_progress(line: str, step: int) -> None:
    if step % 20 == 0 and sys.stderr.isatty():
        sys.stderr.write(f"\r{line}   ")
