"""What a trained model says of one image, and why where it can tell: labels, conditions that fired, places. Knows run folders."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from unalike.base.errors import UserError
from unalike.core.client import Client
from unalike.data.pictures import read
from unalike.runs.export import finished


def explain(
    run: str | Path, image: str, client: str | None = None, top: int = 3, to: Path | None = None
) -> dict[str, Any]:
    """The `top` labels with their probabilities, the weights of conditions, and a picture of where each label was seen.

    `image` is a file, or the number of a test image, of which the labels that are there are told too. The model is the client's, or the
    first client's.
    """
    program = finished(run, client)
    given, model, method = program.client, cast(Any, program.model), cast(Any, program.algorithm)
    if not given.task.classifies or given.task.dense:
        raise UserError(f"explain tells labels of images; {given.id} does {given.task.name}")
    x, there = picture(image, given)
    with torch.no_grad():
        out = model.eval()(x)[0]
        why = model.explain(x) if hasattr(model, "explain") else {}
    sure = given.task.probabilities(out[None])[0]
    best = sure.argsort(descending=True)[:top].tolist()
    told: dict[str, Any] = {
        "image": image,
        "client": given.id,
        "labels": {given.task.labels[i]: round(float(sure[i]), 4) for i in best},
    }
    if there is not None:
        told["there"] = [given.task.labels[i] for i in there]
    if "fired" in why:
        told["conditions"] = {
            name: round(float(w), 4)
            for name, w in zip(method.condition_names, why["fired"][0], strict=True)
        }
    if "plan" in why:
        from unalike.report.explained import draw

        to = to or Path(run) / "explained" / f"{Path(image).stem}.png"
        to.parent.mkdir(parents=True, exist_ok=True)
        maps = {
            f"{given.task.labels[i]} {100 * float(sure[i]):.0f} %": why["plan"][0, ..., i]
            .cpu()
            .numpy()
            for i in best
        }
        draw(x[0].movedim(0, -1).cpu().numpy(), maps, told.get("conditions", {}), to)
        told["picture"] = str(to)
    return told


def picture(image: str, client: Client) -> tuple[Tensor, list[int] | None]:
    """One image as the client's model takes it (1, channels, height, width), and which labels it has where that is known."""
    shape, tested = client.train.shape, client.common if client.common is not None else client.test
    if isinstance(shape, dict) or len(shape) != 3:
        raise UserError(f"explain takes images, the rows of {client.id} have shape {shape}")
    if image.isdigit() and not Path(image).exists():
        if tested is None or int(image) >= len(tested):
            raise UserError(
                f"test images of {client.id} are numbered 0 to {len(tested or ()) - 1}, got {image}; or name a file"
            )
        x, y = tested.labelled_batch(torch.tensor([int(image)]))
        assert isinstance(x, Tensor)
        (present,) = client.task.label_matrix(y)
        return client.to_device(x), present.nonzero().flatten().tolist()
    if not Path(image).is_file():
        raise UserError(f"there is no image {image}: name a file, or the number of a test image")
    from PIL import Image

    try:
        seen = Image.fromarray(read(Path(image)))
    except ValueError as problem:
        raise UserError(f"{image} {problem}") from None
    seen = seen.convert("L" if shape[0] == 1 else "RGB").resize((shape[2], shape[1]))
    return client.to_device(
        torch.from_numpy(np.array(seen)).reshape(shape[1], shape[2], -1).movedim(-1, 0)[None]
    ), None
