"""FedMPT and other prompt methods: heads by hand, switches, what is sent, caching, bad input."""

import json
import math
from dataclasses import replace

import ot
import pytest
import torch
import yaml

from unalike.algorithms import ALGORITHMS
from unalike.algorithms.fedmpt import FedMPT
from unalike.base.errors import Problems, UserError
from unalike.methods import prompt_tuning as prompting
from unalike.runs.explain import explain
from unalike.scenarios import build_clients, load
from unalike.tasks import MultiLabel

TWO = ("pose", "a background")


@pytest.fixture
def build_program(toys):
    def build(method=None, **about):
        method = method or FedMPT(conditions=TWO, rank=3)
        client = toys.toys_for(FedMPT)["client"]("a", **about)
        return method.Program(client, method, toys.training(), 0)

    return build


def stir(model):
    """Other parameters than the first, which say little."""
    draw = torch.Generator().manual_seed(5)
    for p in model.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=draw, dtype=p.dtype)


def unit(v):
    return v / v.norm()


@pytest.mark.parametrize("whole", [False, True])
def test_the_head_is_equations_6_to_11(build_program, whole):
    program = build_program(
        FedMPT(conditions=TWO, rank=3, entropy=0.2, whole=whole)
    )  # the paper's, which ten steps of any plan are enough for
    program.model.eval()
    stir(program.model)
    head, model = program.model.head, program.model.encoder
    x = program.client.to_device(program.client.train.rows(torch.arange(2))[0])
    patches, image_features = model.patches(x)
    places = (
        torch.cat([patches, image_features[:, None]], 1) if whole else patches
    )  # the gate goes by patches alone
    word = lambda text: model.embed(model.tokens([text])[0])[0]
    for image in range(2):
        gate = (
            torch.stack([unit(f) for f in patches[image]]).mean(0)
            @ head.route[0].weight.T
            @ head.route[1].weight.T
            + head.route[1].bias
        ).softmax(0)
        mixed = torch.zeros(4, dtype=torch.float64)
        for n, condition in enumerate(TWO):
            texts = []
            for label in "0123":
                prompt = torch.cat(
                    [head.condition_tokens[n], word(condition), head.class_tokens, word(label)]
                )
                texts.append(
                    unit(model.read(prompt[None], torch.ones(1, len(prompt), dtype=torch.bool))[0])
                )
            adapted = [
                unit(unit(f) + head.up[n].T @ (head.down[n].T @ unit(f))) for f in places[image]
            ]
            s = 20 * torch.stack([torch.stack([f @ t for t in texts]) for f in adapted]).detach()
            cost = 1 - (s / 4).softmax(0)
            entropy = torch.stack([-(p * p.log()).sum() for p in s.softmax(1)])
            plan = ot.sinkhorn(
                (entropy / 4).softmax(0).numpy(), [0.25] * 4, cost.numpy(), 0.2, stopThr=1e-13
            )
            mixed += gate[n].detach() * 4 * (torch.from_numpy(plan) * s).sum(0)
        expected = head.verdict((mixed)[None])[0]
        torch.testing.assert_close(program.model(x)[image], expected, rtol=1e-6, atol=1e-6)


def test_adapter_dropout_is_active_in_training_only(build_program):
    program = build_program(FedMPT(conditions=TWO, rank=3, dropout=0.5))
    stir(program.model)
    x = program.client.to_device(program.client.train.rows(torch.arange(2))[0])
    assert not torch.equal(program.model.train()(x), program.model(x))
    assert torch.equal(program.model.eval()(x), program.model(x))


@pytest.mark.parametrize(
    ("off", "gone"),
    [("prompts", "condition_tokens"), ("adapters", "down"), ("gate", "route"), ("transport", None)],
)
def test_each_part_can_be_switched_off(build_program, off, gone):
    plain = {"conditions": TWO, "rank": 3, "whole": False, "dropout": 0.0}
    whole, less = build_program(FedMPT(**plain)), build_program(FedMPT(**plain | {off: False}))
    names = {name.split(".")[1] for name in whole.model.state_dict()} - {
        name.split(".")[1] for name in less.model.state_dict()
    }
    assert (gone in names) if gone else not names
    stir(whole.model)
    stir(less.model)
    x = whole.client.to_device(whole.client.train.rows(torch.arange(2))[0])
    assert (whole.model(x) - less.model(x)).abs().max() > 1e-6
    reasons = less.model.explain(x)
    torch.testing.assert_close(reasons["plan"].sum((1, 2)), torch.ones(2, 4, dtype=torch.float64))
    assert off != "gate" or (reasons["fired"] == 0.5).all()


def test_conditions_may_count_by_how_far_their_scores_lie_apart(build_program):
    program = build_program(FedMPT(conditions=TWO, rank=3, gate="spread", standardize="each"))
    program.model.eval()
    stir(program.model)
    head, x = program.model.head, program.client.train.rows(torch.arange(2))[0]
    patches, whole = program.model.encoder.patches(program.client.to_device(x))
    S = head.similarity(program.model.encoder, patches, whole)
    psi = (head.plan(S) * S).sum(2)  # (images, conditions, labels)
    expected = []
    for first, second in psi:
        weight = (first.std(correction=0) - second.std(correction=0)).sigmoid()
        first, second = ((v - v.mean()) / v.std(correction=0) for v in (first, second))
        expected.append(head.verdict((weight * first + (1 - weight) * second)[None])[0])
    logits = program.model({"patches": patches, "whole": whole})
    torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-5, atol=1e-5)
    fired = program.model.explain({"patches": patches, "whole": whole})["fired"]
    torch.testing.assert_close(fired.sum(1), torch.ones(2, dtype=fired.dtype))


def test_the_plan_may_carry_no_gradient(build_program):
    gradients = {}
    for flows in (True, False):
        program = build_program(FedMPT(conditions=TWO, rank=3, plan_gradient=flows))
        head = program.model.head
        S = torch.rand(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
        plan = head.plan(S)
        (plan * S).sum().backward()
        gradients[flows] = S.grad
        assert torch.equal(S.grad, plan) != flows
    assert not torch.allclose(gradients[True], gradients[False])


def test_patches_that_are_sure_of_their_label_may_weigh_more(build_program):
    S = torch.tensor([[3.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])[None, None].double()
    weights = {}
    for certain in (False, True):
        method = FedMPT(conditions=TWO, rank=3, entropy=1.0, temperature=1.0, certain=certain)
        head = build_program(method).model.head
        weights[certain] = head.plan(S).sum(-1)[0, 0]  # of both patches, over the labels
    assert weights[False][1] > weights[False][0] and weights[True][0] > weights[True][1]


def test_only_learnt_parameters_are_sent_and_saved(toys, tmp_path):
    clients = toys.toys_for(FedMPT)["clients"](dtype=torch.float32)
    results = toys.execute(tmp_path / "run", FedMPT(), clients, rounds=2)
    result = results["clients"]["a"]
    assert result["trainable"] < result["parameters"] and result["parameters"] - result[
        "trainable"
    ] == sum(p.numel() for p in toys.Telling().parameters())
    rows = [
        line.split(",") for line in (tmp_path / "run" / "ledger.csv").read_text().splitlines()[1:]
    ]
    sizes = {int(size) for _, _, _, operation, _, size in rows if operation == "update"}
    assert all(0 < size - 4 * result["trainable"] < 2048 for size in sizes)
    assert not any(
        "joint" in name or "base" in name
        for state in toys.states(tmp_path / "run").values()
        for name in state
    )


def test_fedmpt_averages_uniformly_and_promptfl_by_samples():
    replies = {"a": {"samples": 10}, "b": {"samples": 30}}
    assert FedMPT().client_weights(replies) == {"a": 1.0, "b": 1.0} and ALGORITHMS[
        "promptfl"
    ]().client_weights(replies) == {"a": 10.0, "b": 30.0}


def test_images_are_encoded_once_and_the_cache_changes_nothing(toys, tmp_path, monkeypatch):
    rows, see = [], toys.Telling.see
    monkeypatch.setattr(
        toys.Telling, "see", lambda self, images: (rows.append(len(images)), see(self, images))[1]
    )
    clients = lambda: toys.toys_for(FedMPT)["clients"](1)
    toys.execute(tmp_path / "once", FedMPT(conditions=TWO), clients(), rounds=3)
    assert rows == [
        2,
        20,
        40,
        1,
    ]  # two to see that it fits, to train, to test, one to count operations
    monkeypatch.setattr(prompting, "MAX_CACHE_BYTES", 0)
    toys.execute(tmp_path / "again", FedMPT(conditions=TWO), clients(), rounds=3)
    assert (
        sum(rows) > 200
        and toys.apart(toys.states(tmp_path / "once"), toys.states(tmp_path / "again")) < 1e-9
    )


def test_rows_without_labels_give_finite_losses(build_program):
    program = build_program(FedMPT(conditions=("pose",)))  # and a list of one condition
    x = program.client.to_device(program.client.train.rows(torch.arange(4))[0])
    for y in (torch.zeros(4, 4), torch.full((4, 4), -1.0), torch.full((4, 4), math.nan)):
        loss = program.loss(x, y)
        loss.backward()
        assert loss.isfinite() and all(
            p.grad is None or p.grad.isfinite().all() for p in program.model.parameters()
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"conditions": ()}, "must name one condition or more"),
        ({"conditions": ("pose", "pose")}, "must differ, got more than once: pose"),
        ({"conditions": "nowhere.yaml"}, "there is no file nowhere.yaml; a single condition"),
    ],
)
def test_conditions_that_cannot_be_used_are_refused(fields, message):
    assert any(message in sentence for _, sentence in FedMPT(**fields).check(3, 0))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("temperature=0", "must be above 0, got 0"),
        ("condition_tokens=-1", "must be at least 0, got -1"),
        ("dropout=1", "must be below 1, got 1"),
        ("mean=median", "must be 'samples' or 'uniform'"),
    ],
)
def test_fields_out_of_range_are_refused(setting, message):
    with pytest.raises(Problems, match=f"algorithm.{setting.split('=')[0]} .*{message}"):
        load("fedmpt-digits", settings=[f"algorithm.{setting}"])


def test_conditions_from_a_file(tmp_path):
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"conditions": ["weather", "pose"]}))
    assert FedMPT(conditions=str(tmp_path / "c.yaml")).condition_names == (
        "weather",
        "pose",
    ) and not FedMPT(conditions=("pose",)).check(3, 0)


@pytest.mark.parametrize("name", ["fedmpt", "promptfl", "zeroshot"])
def test_unreadable_labels_and_other_models_are_refused(toys, build_program, name, tmp_path):
    method = ALGORITHMS[name]()
    blank = MultiLabel(("0", " ", "2", "3"))
    with pytest.raises(UserError, match=r"' ' has no word|has no word this model can read"):
        toys.execute(
            tmp_path / "blank", method, [replace(build_program(method).client, task=blank)]
        )
    mute = toys.toys_for(ALGORITHMS["fednca"])["client"]("a")
    with pytest.raises(UserError, match="needs a vision-language model, such as clip"):
        toys.execute(tmp_path / "mute", method, [mute])


@pytest.mark.parametrize("name", ["fedmvp", "fedtpg", "promptfl"])
def test_prompt_methods_start_at_the_frozen_model(build_program, name):
    """Their additions start at zero: logits are those of a written prompt, but for token noise."""
    x = build_program().client.to_device(build_program().client.train.rows(torch.arange(8))[0])
    logits, zero_shot = (
        build_program(ALGORITHMS[name]()).model(x),
        build_program(ALGORITHMS["zeroshot"]()).model(x),
    )
    torch.testing.assert_close(logits, zero_shot, rtol=0, atol=0.1)


def test_fedmvp_may_learn_its_texts(build_program):
    program = build_program(ALGORITHMS["fedmvp"](text_tokens=3))
    x, y = program.client.train.labelled_batch(torch.arange(4))
    stir(program.model)
    program.loss(program.client.to_device(x), program.client.to_device(y)).backward()
    assert program.model.head.text_tokens.grad.abs().sum() > 0
    assert "head.text_tokens" in program.model.state_dict()
    fixed = build_program(ALGORITHMS["fedmvp"]())
    assert "head.text_tokens" not in fixed.model.state_dict()


def test_dualcoop_logits_by_hand(build_program):
    program = build_program(ALGORITHMS["feddualcoop"](tokens=2))
    stir(program.model)
    x = program.client.to_device(program.client.train.rows(torch.arange(3))[0])
    head, model = program.model.head, program.model.encoder
    texts = model.read(*head.texts(torch.cat([head.present, head.absent]).flatten(0, 1)))
    patches, _ = model.patches(x)
    for image, label in ((0, 1), (2, 3)):
        positive, negative = (
            20 * torch.cosine_similarity(patches[image], texts[row], dim=-1)
            for row in (label, 4 + label)
        )
        expected = 5 * (positive.softmax(0) * (positive - negative)).sum()
        assert program.model(x)[image, label].item() == pytest.approx(expected.item(), rel=1e-9)


def test_ram_without_knowledge_is_plain_transport(build_program):
    method = ALGORITHMS["fedram"]
    x = build_program().client.to_device(build_program().client.train.rows(torch.arange(3))[0])
    program = build_program(method(knowledge=0.0))
    patches, _ = program.model.encoder.patches(x)
    head = program.model.head
    cosine = torch.nn.functional.normalize(patches, dim=-1) @ head.texts.mT
    plan = ot.sinkhorn([0.25] * 4, [0.25] * 4, (1 - cosine[0]).numpy(), 0.1, stopThr=1e-13)
    expected = head.verdict((20 * 4 * (torch.from_numpy(plan) * cosine[0]).sum(0))[None])[0]
    torch.testing.assert_close(program.model(x)[0], expected, rtol=1e-6, atol=1e-6)
    assert (build_program(method(knowledge=5.0)).model(x) - program.model(x)).abs().max() > 1e-3


def test_ram_may_count_the_whole_image_as_a_patch(build_program):
    """Without transport's knowledge an untrained head scores the same of patches given by hand."""
    program = build_program(ALGORITHMS["fedram"](whole=True))
    plain = build_program(ALGORITHMS["fedram"]())
    x = program.client.to_device(program.client.train.rows(torch.arange(3))[0])
    patches, whole = program.model.encoder.patches(x)
    more = torch.cat([patches, whole[:, None]], 1)
    expected = plain.model.head(plain.model.encoder, more, whole)
    torch.testing.assert_close(program.model(x), expected)


def test_hidden_labels_can_become_absent():
    settings = ["data.options={train: 100, test: 20}", "data.partition={name: iid}"]
    labels = []
    for more in ([], ["clients.0.masked=0.7", "clients.0.masked_as=absent"]):
        client = build_clients(load("fedmpt-digits", settings=[*settings, *more])[0])[0]
        labels.append(client.train.labelled_batch(torch.arange(25))[1])
    full, hidden = labels
    assert (hidden >= 0).all() and (hidden <= full).all()
    assert 0.1 < hidden.sum() / full.sum() < 0.5


def test_clients_may_be_clusters_of_labels():
    """Rows with the same labels are at one client, and the images are not looked at."""
    settings = [
        "data.options={train: 100, test: 20, most: 1}",
        "data.partition={name: by_cluster, of: labels}",
        "clients.0.count=4",
    ]
    clients = build_clients(load("fedmpt-digits", settings=settings)[0])
    owners = {}
    for client in clients:
        for row in client.train.y[client.train.index]:
            owners.setdefault(tuple(row.tolist()), set()).add(client.id)
    assert len(owners) > 4 and all(len(ids) == 1 for ids in owners.values())
    with pytest.raises(Problems, match="of: labels"):
        both = "data.partition={name: by_cluster, of: labels, encoder: vlm-tiny}"
        build_clients(load("fedmpt-digits", settings=[*settings, both])[0])


def test_labels_can_be_masked_at_random():
    scenario, _ = load(
        "fedmpt-digits",
        settings=[
            "clients.0.masked=0.7",
            "data.options={train: 100, test: 20}",
            "data.partition={name: iid}",
        ],
    )
    first, again = (build_clients(scenario)[0] for _ in range(2))
    y = first.train.y[first.train.index]
    assert 0.6 < (y < 0).float().mean() < 0.8 and torch.equal(y, again.train.y[again.train.index])
    assert (first.common.labelled_batch(torch.arange(20))[1] >= 0).all()
    with pytest.raises(Problems, match=r"masked .*hides some of a row's labels"):
        build_clients(load("digits", settings=["clients.0.masked=0.5"])[0])


def test_a_run_is_explained(tmp_path):
    from PIL import Image

    from unalike.runs import run_scenario

    scenario, method = load(
        "fedmpt-digits",
        settings=[
            "data.options={train: 40, test: 20}",
            "rounds=1",
            "epochs=1",
            "alone=false",
            "clients.0.count=2",
            "algorithm.conditions=[pose, background]",
        ],
    )
    _, folder = run_scenario(scenario, method, out=tmp_path / "run")
    explanation = explain(folder, "3", top=2)
    assert len(explanation["labels"]) == 2 and sum(
        explanation["conditions"].values()
    ) == pytest.approx(1, abs=1e-3)
    first = build_clients(scenario)[0]
    assert explanation["there"] == [
        name
        for name, mark in zip(first.task.labels, first.common.rows(torch.tensor([3]))[1][0])
        if mark == 1
    ]
    assert (folder / "explained" / "3.png").stat().st_size > 1000 and json.dumps(explanation)
    Image.new("RGB", (40, 30), "white").save(tmp_path / "white.jpg")
    explanation = explain(folder, str(tmp_path / "white.jpg"), client="c-1")
    assert explanation["client"] == "c-1" and "there" not in explanation
    for image, message in (
        ("20", "numbered 0 to 19, got 20"),
        ("no.png", "there is no image no.png"),
    ):
        with pytest.raises(UserError, match=message):
            explain(folder, image)
    (tmp_path / "bad.png").write_text("rubbish")
    with pytest.raises(UserError, match="is no image"):
        explain(folder, str(tmp_path / "bad.png"))
    page = (folder / "report.html").read_text()
    assert "Conditions by label" in page and "Places of the surest label" in page
