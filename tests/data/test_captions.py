"""Photographs with captions or masks: what is in a file comes out, and a public set of both is read by each client in its own way."""

import io
import json

import numpy as np
import pytest
import torch

from unalike.base.errors import Problems
from unalike.data import load_dataset
from unalike.data.text_codes import codes_to_texts, texts_to_codes
from unalike.runs import prepare
from unalike.scenarios import build_clients, parse_scenario


def jpegs(count, program):
    from PIL import Image

    made = []
    for i in range(count):
        out = io.BytesIO()
        Image.new("RGB", (program, program), (20 * i, 0, 0)).save(out, "JPEG")
        made.append(np.frombuffer(out.getvalue(), np.uint8))
    return {
        "jpeg": np.concatenate(made),
        "off": np.cumsum([0, *map(len, made)]),
        "names": np.array([f"{i}.jpg" for i in range(count)]),
    }


@pytest.fixture
def folder(tmp_path):
    captions = [[f"photo {i}", "the same"] for i in range(8)]
    np.savez(
        tmp_path / "flickr8k_96_jpeg.npz",
        **jpegs(8, 32),
        split=np.array([0] * 6 + [1, 2], np.uint8),
        captions_json=np.frombuffer(json.dumps(captions).encode(), np.uint8),
    )
    mask = np.zeros((4, 32, 32), np.uint8)
    mask[:, 3] = 20
    mask[:, 4] = 255
    np.savez(
        tmp_path / "voc2012_seg_128.npz",
        **jpegs(4, 32),
        mask=mask,
        split=np.array([0, 0, 0, 1], np.uint8),
    )
    for part, rows in (("train", 6), ("test", 3)):
        (tmp_path / f"agnews_{part}.csv").write_text(
            "".join(f"{1 + i % 2},Title {i},Text\n" for i in range(rows))
        )
    return str(tmp_path)


def test_captions_belong_to_their_photograph(folder):
    table = load_dataset("flickr8k", folder)
    assert table.x["image"].shape == (8, 3, 32, 32) and codes_to_texts(table.x["caption"]) == [
        f"photo {i}" for i in range(8)
    ]
    assert table.train.tolist() == [*range(6)] and table.test.tolist() == [7]
    assert (
        codes_to_texts(load_dataset("flickr8k", folder, caption="all").x["caption"])[3]
        == "photo 3 the same"
    )


def test_each_caption_may_be_asked_for(folder):
    """One to train with; of the photograph to test both, and they are of one thing."""
    table = load_dataset("flickr8k", folder, caption="each")
    assert (
        table.train.tolist() == [*range(6)]
        and table.test.tolist() == [7, 8]
        and table.targets["pair"][table.test].tolist() == [7, 7]
    )
    assert codes_to_texts(table.x["caption"][table.test]) == [
        "photo 7",
        "the same",
    ] and torch.equal(*table.x["image"][table.test])


def test_a_photograph_without_caption_is_told_or_left_out(folder, tmp_path):
    with np.load(tmp_path / "flickr8k_96_jpeg.npz") as held:
        told = dict(held)
    captions = json.loads(told["captions_json"].tobytes())
    captions[2] = [" "]
    np.savez(
        tmp_path / "flickr8k_96_jpeg.npz",
        **{**told, "captions_json": np.frombuffer(json.dumps(captions).encode(), np.uint8)},
    )
    with pytest.raises(ValueError, match=r"1 of 8 images cannot be used: 2.jpg has no caption"):
        load_dataset("flickr8k", folder)
    assert len(load_dataset("flickr8k", folder, broken="skip")) == 7
    with pytest.raises(
        Problems,
        match=r"public.data   1 of 8 images cannot be used: 2.jpg has no caption. Mend them, or leave them out",
    ):
        build_clients(parse_scenario(SCENARIO, "both")[0], folder)
    public = SCENARIO["public"] | {"options": {"broken": "skip"}}
    assert "photo 2" not in codes_to_texts(
        build_clients(parse_scenario(SCENARIO | {"public": public}, "both")[0], folder)[
            1
        ].public.rows(torch.arange(4))[0]
    )


def test_options_of_a_public_set_are_looked_at(folder):
    for told, sentence in (
        ({"brokn": "skip"}, 'has no field "brokn". Did you mean "broken"'),
        ({"broken": 3}, "public.options.broken"),
    ):
        with pytest.raises(Problems, match=sentence):
            parse_scenario(SCENARIO | {"public": SCENARIO["public"] | {"options": told}}, "both")
    shared = {"size": 2, "data": "voc2012_masks", "options": {"broken": "skip"}}
    with pytest.raises(
        Problems,
        match=r"public.options   data has voc2012_masks with other options, and it is read once",
    ):
        build_clients(parse_scenario(SCENARIO | {"public": shared}, "both")[0], folder)


def test_masks_say_what_a_pixel_is(folder):
    table = load_dataset("voc2012_masks", folder)
    assert (
        table.tasks["mask"].labels[20] == "tvmonitor"
        and table.targets["mask"][0, 3, 0] == 20
        and len(table.test) == 1
    )


def test_letters_and_bytes_are_kept_for_pretrained_readers(folder):
    assert codes_to_texts(load_dataset("agnews", folder, texts="letters").x[:1]) == ["Title 0 Text"]
    assert texts_to_codes(["ab"], 1).tolist() == [[97]]


SCENARIO = {
    "name": "both",
    "algorithm": {"name": "fedmuscle", "peers": 1, "width": 4, "batch": 2},
    "training": {"rounds": 1},
    "data": {"name": "voc2012_masks"},
    "public": {"size": 4, "data": "flickr8k"},
    "clients": [
        {"id": "eye", "model": {"name": "cnn", "channels": [4]}},
        {
            "id": "ear",
            "model": {"name": "fasttext", "words": 200},
            "data": {"name": "agnews", "options": {"texts": "letters"}},
        },
    ],
}


def test_images_go_to_those_who_see_and_captions_to_those_who_read(folder):
    eye, ear = build_clients(parse_scenario(SCENARIO, "both")[0], folder)
    rows = torch.arange(4)
    seen, heard = eye.public.rows(rows)[0], ear.public.rows(rows)[0]
    assert seen.shape == (4, 3, 32, 32) and heard.dtype == torch.int32
    assert [
        f"photo {round(float(image[0].float().mean()) / 20)}" for image in seen
    ] == codes_to_texts(heard)


def test_a_client_who_can_read_nothing_of_the_public_set_is_named(folder):
    words = {"id": "ear", "model": {"name": "fasttext"}, "data": {"name": "agnews"}}
    scenario, method = parse_scenario(
        {**SCENARIO, "clients": [SCENARIO["clients"][0], words]}, "both"
    )
    with pytest.raises(
        Problems,
        match=r"clients.ear   its model takes rows such as its own, \(64,\), and cannot take those of the public",
    ):
        prepare(scenario, method, None, str(folder), "both")


def test_who_reads_cannot_take_photographs_alone(folder):
    scenario, method = parse_scenario(
        {**SCENARIO, "public": {"size": 2, "data": "voc2012_masks"}}, "both"
    )
    with pytest.raises(
        Problems,
        match=r"clients.ear   its model takes rows such as its own, \(256,\), and cannot take those",
    ):
        prepare(scenario, method, None, str(folder), "both")


def test_a_metric_that_has_no_value_is_told_before_the_work(folder, tmp_path):
    with np.load(tmp_path / "voc2012_seg_128.npz") as held:
        told = dict(held)
    told["mask"][3] = 255
    np.savez(tmp_path / "voc2012_seg_128.npz", **told)
    with pytest.raises(
        Problems,
        match=r"clients.eye   its miou is undefined on its 1 test rows: no pixel of them is labelled",
    ):
        prepare(*parse_scenario(SCENARIO, "both"), None, str(folder), "both")


def test_generated_images_differ_and_are_the_same_again():
    x = load_dataset("generated", count=3, side=16).x
    assert x.shape == (3, 3, 16, 16) and torch.equal(
        x, load_dataset("generated", count=3, side=16).x
    )
    assert len({image.numpy().tobytes() for image in x}) == 3 and x.float().std() > 20
