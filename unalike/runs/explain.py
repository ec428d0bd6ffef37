"""Explains a trained model's prediction for one image: labels, conditions and where they are."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from unalike.base.errors import UserError
from unalike.core.client import Client
from unalike.data.jpeg import read_image
from unalike.report.folder import check_inside
from unalike.runs.export import trained_program

DIGITS = 4  # of probabilities and weights


def explain(
    run: str | Path,
    image: str,
    client: str | None = None,
    top: int = 3,
    to: Path | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Predict the labels of an image and, where the model can tell, say why.

    Args:
        run: the run's folder.
        image: a file, or the number of a test image.
        client: whose model; by default the first client's.
        top: how many labels.
        to: where to write the picture; by default `explained/NAME.png` in the run's folder.
        trust: import what the folder names as `module:name` (`unalike.trained`).
    Returns: `labels` with probabilities; `there`, the true labels of a test image; `conditions`
        with weights, and `picture`, a file that shows where each label was seen, if the model
        explains itself.
    Raises: UserError where the client does not classify images.
    """
    program = trained_program(run, client, trust)
    owner, task = program.client, program.client.task
    if not task.classifies or task.dense:
        raise UserError(f"explain tells labels of images; {owner.id} does {task.name}")
    x, true_labels = load_image(image, owner)
    model = cast(Any, program.model)
    with torch.no_grad():
        output = model.eval()(x)
        reasons = model.explain(x) if hasattr(model, "explain") else {}
    (probabilities,) = task.probabilities(output)
    best = probabilities.argsort(descending=True)[:top].tolist()
    explanation: dict[str, Any] = {
        "image": image,
        "client": owner.id,
        "labels": {task.labels[i]: round(float(probabilities[i]), DIGITS) for i in best},
    }
    if true_labels is not None:
        explanation["there"] = [task.labels[i] for i in true_labels]
    if "fired" in reasons:
        names = cast(Any, program.algorithm).condition_names
        weights = zip(names, reasons["fired"][0], strict=True)
        explanation["conditions"] = {name: round(float(w), DIGITS) for name, w in weights}
    if "plan" in reasons:
        from unalike.report.mpl import save_explanation

        if to is None:
            to = Path(run) / "explained" / f"{Path(image).stem}.png"
            check_inside(to, Path(run))
        to.parent.mkdir(parents=True, exist_ok=True)
        maps = {}
        for i in best:
            title = f"{task.labels[i]} {100 * float(probabilities[i]):.0f} %"
            maps[title] = reasons["plan"][0, ..., i].cpu().numpy()
        pixels = x[0].movedim(0, -1).cpu().numpy()
        save_explanation(pixels, maps, explanation.get("conditions", {}), to)
        explanation["picture"] = str(to)
    return explanation


def load_image(image: str, client: Client) -> tuple[Tensor, list[int] | None]:
    """Load an image as the client's model takes it.

    Returns: the image (1, channels, height, width), and the indices of its labels where they are
        known.
    """
    shape = client.train.shape
    if isinstance(shape, dict) or len(shape) != 3:
        raise UserError(f"explain takes images, the rows of {client.id} have shape {shape}")
    if image.isdigit() and not Path(image).exists():
        return _load_test_image(int(image), client)
    if not Path(image).is_file():
        raise UserError(f"there is no image {image}: name a file, or the number of a test image")
    channels, height, width = shape
    try:
        picture = Image.fromarray(read_image(Path(image)))
    except ValueError as error:
        raise UserError(f"{image} {error}") from None
    picture = picture.convert("L" if channels == 1 else "RGB").resize((width, height))
    pixels = torch.from_numpy(np.array(picture)).reshape(height, width, -1)
    return client.to_device(pixels.movedim(-1, 0)[None]), None


def _load_test_image(number: int, client: Client) -> tuple[Tensor, list[int]]:
    samples = client.common if client.common is not None else client.test
    count = len(samples) if samples is not None else 0
    if samples is None or number >= count:
        raise UserError(
            f"test images of {client.id} are numbered 0 to {count - 1}, got {number}; or name a "
            "file"
        )
    x, y = samples.labelled_batch(torch.tensor([number]))
    assert isinstance(x, Tensor)
    (present,) = client.task.label_matrix(y)
    return client.to_device(x), present.nonzero().flatten().tolist()
