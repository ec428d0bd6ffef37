"""AFMCC: it finds clusters, workers and resuming change nothing, formulas are the paper's."""

import json
from dataclasses import replace

import pytest
import torch

from unalike import Clustering, FederationConfig, run
from unalike.algorithms import afmcc
from unalike.algorithms.afmcc import AFMCC, descend, feature_distances
from unalike.algorithms.fmcsc import FMCSC
from unalike.base.errors import UserError
from unalike.core.runtime import ClientRuntime
from unalike.losses.clustering import class_correlation_loss, fusion_contrast, reconstruction
from unalike.models.autoencoder import Autoencoder, with_masks
from unalike.report import read
from unalike.report.history import logged_metrics

SHAPE = {"left": (3,), "right": (3,)}


def clients(toys, owned=("left right", "left right", "left", "right"), **about):
    """Blobs whose first three features are one modality and whose last three are another."""
    members = []
    for id, names in zip("abcd", owned, strict=False):
        x, y = toys.blobs(24, ord(id))
        x = {
            name: part
            for name, part in (("left", x[:, :3]), ("right", x[:, 3:]))
            if name in names.split()
        }
        members.append(
            toys.client(
                id,
                model=lambda: Autoencoder(SHAPE, (8,), 4),
                task=Clustering(4),
                train=(x, y),
                test=(x, y),
                public=None,
                **about,
            )
        )
    return members


def small(**changed):
    return AFMCC(**({"starts": 5, "pretraining": 20, "steps": 2} | changed))


def test_finds_clusters(toys, tmp_path):
    results = toys.execute(tmp_path / "run", small(), clients(toys), rounds=12, lr=0.01)
    assert results["metrics"]["acc"] > 60 and results["metrics"]["joint"]["acc"] > 60
    assert (
        set(results["clients"]["c"]["metrics"]) == {"acc", "nmi", "ari"} and not results["failures"]
    )


@pytest.mark.parametrize("weights", ["uniform", "far", "near"])
def test_processes_and_memory_make_no_difference(toys, tmp_path, weights):
    ends = []
    for i, how in enumerate(({}, {"workers": 2}, {"alive": 1})):
        toys.execute(tmp_path / str(i), small(weights=weights), clients(toys), rounds=2, **how)
        ends.append(toys.states(tmp_path / str(i)))
    assert toys.apart(ends[0], ends[1]) <= 1e-9 and toys.apart(ends[0], ends[2]) <= 1e-9


def test_sending_all_models_gives_the_same(toys, tmp_path):
    """If all arrive at the same instants: else two messages meet other models than one."""
    for how in ("encoders", "paper"):
        toys.execute(
            tmp_path / how, small(exchange=how), clients(toys, ["left right"] * 3), rounds=2
        )
    assert toys.apart(toys.states(tmp_path / "encoders"), toys.states(tmp_path / "paper")) <= 1e-9


def test_a_stopped_run_ends_the_same(toys, tmp_path):
    class Stopped(BaseException):
        pass

    def stop(event, **facts):
        if event == "round" and facts["round"] == 2:
            raise Stopped

    whole = toys.execute(tmp_path / "whole", small(), clients(toys), rounds=3)
    with pytest.raises(Stopped):
        toys.execute(tmp_path / "cut", small(), clients(toys), rounds=3, watch=stop)
    assert toys.hashes(
        toys.execute(tmp_path / "cut", small(), clients(toys), rounds=3)
    ) == toys.hashes(whole)


def test_slow_clients_are_not_waited_for(toys, tmp_path):
    quick, slow = (
        toys.execute(
            tmp_path / str(i),
            small(),
            [*clients(toys)[:2], *clients(toys, speed=speed)[2:]],
            rounds=2,
        )["clock"]
        for i, speed in enumerate((1000.0, 10.0))
    )
    visits = [
        row
        for row in (tmp_path / "1" / "events.jsonl").read_text().splitlines()
        if '"arrival"' in row
    ]
    first = [row.split('"client": "')[1][0] for row in visits]
    assert slow > 5 * quick
    assert {"c", "d"}.isdisjoint(first[:6]) and {"a", "b"}.isdisjoint(
        first[-4:]
    )  # two visits of two messages each


def test_objective_is_equation_7(toys):
    method = small(alpha=0.7, beta=0.3, error="sample", contrast="all")
    program = method.Program(clients(toys)[0], method, toys.training(), 0)
    x = program.client.to_device(program.client.train.rows(torch.arange(10))[0])
    auto = program.model.encoder
    z = {name: auto.encoders[name](x[name]) for name in x}
    h = z["left"]  # fused from one modality, both are rebuilt
    by_hand = sum(
        reconstruction(x[v], auto.decoders[v](h), "sample") + 0.7 * fusion_contrast(h, z[v], 0.5)
        for v in x
    )
    by_hand = by_hand + 0.3 * class_correlation_loss(
        (h @ program.model.head.weight.mT).softmax(-1), 0.3
    )
    assert torch.allclose(
        program.objective(("left",))(program.model, with_masks(x)), by_hand, rtol=1e-12
    )


def test_a_modality_may_be_no_contrast_to_itself(toys):
    """What the objective loses is the contrast of h = z with z, and nothing where two are fused."""
    plain, others = small(alpha=0.7, contrast="all"), small(alpha=0.7, contrast="others")
    programs = [m.Program(clients(toys)[0], m, toys.training(), 0) for m in (plain, others)]
    x = programs[0].all_inputs()
    z = programs[0].autoencoder.codes(x)
    lost = {}
    for subset in (("left",), ("right",), ("left", "right")):
        one, other = (p.objective(subset)(p.model, x).item() for p in programs)
        lost[subset] = one - other
    assert lost.pop(("left", "right")) == 0
    for (name,), difference in lost.items():
        itself = 0.7 * fusion_contrast(z[name], z[name], 0.5).item()
        assert difference == pytest.approx(itself, rel=1e-9)


def test_missing_modalities_count_nowhere_in_the_loss(toys):
    """Each term is over samples that take part in it; values of a missing modality, even NaN, do
    not matter."""
    has_left, has_right = torch.arange(10) % 3 > 0, torch.arange(10) % 3 < 2
    losses = {}
    for nothing in (7.0, float("nan")):
        one = clients(toys)[0]
        x, y = one.train.rows(torch.arange(10))
        x["left"][~has_left], x["right"][~has_right] = nothing, nothing
        method = small(alpha=0.7, beta=0.3, contrast="all")
        program = method.Program(
            replace(one, train=({**x, "left?": has_left, "right?": has_right}, y)),
            method,
            toys.training(),
            0,
        )
        assert (
            program.client.info().modalities == ("left", "right")
            and torch.isfinite(program.embed()["features"]).all()
        )
        losses[nothing] = {
            subset: program.objective(subset)(program.model, program.all_inputs())
            for subset in program.subsets()
        }
    auto, has, x = (
        program.model.encoder,
        {"left": has_left, "right": has_right},
        program.client.to_device(x),
    )
    z = {name: auto.encoders[name](torch.where(has[name][:, None], x[name], 0)) for name in has}
    for (subset, loss), same in zip(losses[7.0].items(), losses[nothing].values(), strict=True):
        has_subset = torch.stack([has[name] for name in subset]).any(0)
        h = torch.stack(
            [
                torch.stack([z[name][i] for name in subset if has[name][i]]).mean(0)
                if has_subset[i]
                else z["left"][i] * 0
                for i in range(10)
            ]
        )
        by_hand = 0.3 * class_correlation_loss(
            (h[has_subset] @ program.model.head.weight.mT).softmax(-1), 0.3
        )
        for name, own in has.items():
            both = has_subset & own
            by_hand = (
                by_hand
                + reconstruction(x[name][both], auto.decoders[name](h[both]))
                + 0.7 * fusion_contrast(h[both], z[name][both])
            )
        assert torch.allclose(loss, by_hand, rtol=1e-12) and torch.equal(loss, same)


def test_missing_modalities_train_the_same_in_a_batch_of_clients(toys, tmp_path):
    def odd():
        members = clients(toys, ["left right"] * 4)
        for i in (0, 2):
            samples = members[i].train
            members[i] = replace(
                members[i],
                train=({**samples.x, "left?": torch.arange(24) % (i + 2) > 0}, samples.y),
            )
        return members

    for how in ({}, {"alive": 1}):
        results = toys.execute(
            tmp_path / str(how),
            small(),
            odd(),
            rounds=2,
            federation=FederationConfig(tick=10.0),
            **how,
        )
        assert not results["failures"]
    assert (
        toys.apart(toys.states(tmp_path / "{}"), toys.states(tmp_path / str({"alive": 1}))) <= 1e-9
    )


def test_weights_follow_the_distance(toys):
    """A model whose codes are farther from the client's fused features has more weight with `far`,
    less with `near`."""
    shares = {}
    for weights in ("far", "near"):
        method = small(weights=weights, sharpness=2.0)
        program = method.Program(clients(toys)[0], method, toys.training(), 0)
        own = {name: t.clone() for name, t in program.model.state_dict().items()}
        both = {name: torch.stack([t, t + 1.0]) for name, t in own.items() if "encoders" in name}
        shares[weights] = ClientRuntime(program).perform("weigh", 1, 0, {"models": both, "own": 0})[
            "shares"
        ]
        assert sum(shares[weights]) == pytest.approx(1) and all(
            torch.equal(t, own[n]) for n, t in program.model.state_dict().items()
        )
    assert shares["far"][1] > 0.5 > shares["near"][1]


def test_weights_are_a_softmax_of_distances_relative_to_their_mean(toys):
    """Eq. 6 as docs/afmcc.md reads it: for each model the mean over modalities of ||Z^v - H||,
    H from the client's own model."""
    client = clients(toys, dtype=torch.float64)[0]
    has_right = torch.arange(24) > 4
    client = replace(client, train=({**client.train.x, "right?": has_right}, client.train.y))
    program = AFMCC.Program(client, small(sharpness=2.0), toys.training(), 0)
    models = [
        AFMCC.Program(client, small(), toys.training(), seed).model.encoder for seed in range(3)
    ]
    x = {name: client.train.x[name].double() for name in SHAPE}
    z = [{name: model.encoders[name](x[name]) for name in SHAPE} for model in models]
    h = torch.where(has_right[:, None], (z[1]["left"] + z[1]["right"]) / 2, z[1]["left"])
    far = torch.stack(
        [((codes["left"] - h).norm() + (codes["right"] - h)[has_right].norm()) / 2 for codes in z]
    )
    stacked = {
        f"encoder.{name}": torch.stack([model.state_dict()[name] for model in models])
        for name in models[0].state_dict()
        if "encoders" in name
    }
    shares = ClientRuntime(program).perform("weigh", 1, 0, {"models": stacked, "own": 1})["shares"]
    assert shares == pytest.approx((2.0 * far / far.mean()).softmax(0).tolist(), rel=1e-9)


def test_other_models_and_tasks_are_refused(toys, tmp_path):
    with pytest.raises(ValueError, match="autoencoder"):
        toys.execute(tmp_path / "1", small(), [toys.client("a", task=Clustering(4))])
    with pytest.raises(ValueError, match="clustering"):
        toys.execute(tmp_path / "2", small(), [toys.client("a")])


def test_other_shapes_and_cluster_counts_are_refused_before_the_run(toys, tmp_path):
    for method in (small(), FMCSC()):
        members = clients(toys)
        members[2].train.x["left"], members[3].train.x["right"] = (
            torch.rand(24, 5),
            members[3].train.x["right"].long(),
        )
        with pytest.raises(UserError) as error:
            toys.execute(
                tmp_path / "run",
                method,
                [*members, replace(members[0], task=Clustering(5), id="e")],
            )
        for sentence in (
            'clients.c   its modality "left" has 5 features, and its autoencoder was made for 3.',
            'clients.d   its modality "right" holds torch.int64, and an autoencoder takes real '
            "numbers",
            "clients.e   it looks for 5 clusters and others for 4: clients that cluster together "
            "must look for the same number.",
        ):
            assert sentence in str(error.value)


@pytest.mark.parametrize("method", [small(), FMCSC()])
def test_models_of_other_shapes_are_refused_before_the_run(toys, tmp_path, method):
    members = clients(toys)
    members[2].model = lambda: Autoencoder(
        {"left": (3,)}, (8,), 4
    )  # made for what it owns, not for what all own
    with pytest.raises(
        UserError,
        match=r"^1 problem in unalike.*\n"
        r"  clients\.c   its model has other parameters than that of a, and ",
    ):
        run(method, members, out=tmp_path / "run")


@pytest.mark.parametrize(
    "fields",
    [
        {"alpha": -1.0},
        {"beta": -1.0},
        {"flexibility": 2.0},
        {"temperature": 0.0},
        {"steps": 0},
        {"pretraining": -1},
        {"sharpness": -1.0},
        {"starts": 0},
    ],
)
def test_fields_out_of_bounds_are_refused(toys, tmp_path, fields):
    with pytest.raises(UserError, match=rf"algorithm\.{next(iter(fields))} +must be"):
        run(AFMCC(**fields), clients(toys), out=tmp_path / "run")


@pytest.mark.parametrize(("steps", "steps_each"), [(45, 15), (6, 2), (3, 1)])
def test_pretraining_reaches_every_fusion_set(toys, monkeypatch, steps, steps_each):
    program = AFMCC.Program(clients(toys)[0], small(pretraining=steps), toys.training(), 0)
    subsets, objective = [], AFMCC.Program.objective
    monkeypatch.setattr(
        AFMCC.Program,
        "objective",
        lambda self, subset, pretraining: subsets.append(subset) or objective(self, subset),
    )
    program.pretrain()
    assert [subsets.count(subset) for subset in program.subsets()] == [steps_each] * 3
    assert subsets[: min(steps_each, 5)] == [("left",)] * min(steps_each, 5)


def test_pretraining_may_be_zero(toys, tmp_path):
    assert not toys.execute(tmp_path / "run", small(pretraining=0), clients(toys), rounds=1)[
        "failures"
    ]


def test_clients_trained_in_a_batch_end_the_same_as_one_by_one(toys, tmp_path, monkeypatch):
    """Different numbers of rows are filled up, and what fills them up counts for nothing."""
    odd = lambda: [
        toys.client(
            id, rows=rows, model=lambda: Autoencoder((6,), (8,), 4), task=Clustering(4), public=None
        )
        for id, rows in (("a", 24), ("b", 17), ("c", 9), ("d", 24))
    ]
    batches = []
    perform = ClientRuntime.perform_together

    def watched(runtimes, name, *args, **named):
        batches.append((name, len(runtimes)))
        return perform(runtimes, name, *args, **named)

    monkeypatch.setattr(ClientRuntime, "perform_together", staticmethod(watched))
    once = toys.execute(
        tmp_path / "once",
        small(),
        odd(),
        rounds=3,
        federation=FederationConfig(tick=10.0),
        alone=True,
    )
    assert {("train", 4), ("visit", 4), ("weigh", 4)} <= set(batches) and not once["failures"]
    alone = {client: result["alone"] for client, result in once["clients"].items()}
    for how in ({"alive": 1}, {"workers": 2}):
        apart = toys.execute(
            tmp_path / str(how),
            small(),
            odd(),
            rounds=3,
            federation=FederationConfig(tick=10.0),
            alone=True,
            **how,
        )
        assert toys.apart(toys.states(tmp_path / "once"), toys.states(tmp_path / str(how))) <= 1e-9
        assert {
            client: result["alone"] for client, result in apart["clients"].items()
        } == alone and None not in alone.values()


def test_nan_at_one_client_leaves_the_batch_alone(toys, tmp_path):
    members = clients(toys, ["left right"] * 4)
    members[1].train.x["left"][3] = float("nan")
    results = toys.execute(
        tmp_path / "run",
        small(),
        members,
        rounds=2,
        federation=FederationConfig(tick=10.0),
        alone=True,
    )
    assert {failure["client"] for failure in results["failures"]} == {"b"}
    assert [client for client, result in results["clients"].items() if result["alone"] is None] == [
        "b"
    ]
    assert results["failures"][0]["reason"].startswith(
        'modality "left" has NaN or infinity in 1 of 24 samples'
    )
    assert all(
        torch.isfinite(t).all() for c in "acd" for t in toys.states(tmp_path / "run")[c].values()
    )


def test_a_diverging_client_of_a_batch_is_named_and_left_out(toys, tmp_path):
    members = clients(toys, ["left right"] * 3)
    members[1].train.x["left"] = (
        members[1].train.x["left"].double().index_fill_(0, torch.tensor([3]), 1e200)
    )
    results = toys.execute(
        tmp_path / "run",
        small(weights="uniform"),
        members,
        rounds=2,
        federation=FederationConfig(tick=10.0),
        alone=True,
    )
    assert {failure["client"] for failure in results["failures"]} == {
        "b"
    } and "the data of b" in results["failures"][0]["reason"]
    assert [client for client, result in results["clients"].items() if result["alone"] is None] == [
        "b"
    ]


def test_without_rest_fast_clients_continue(toys, tmp_path):
    members = clients(toys, ["left right"] * 2) + clients(toys, ["left right"] * 4, speed=300.0)[2:]
    visits = toys.execute(tmp_path / "run", small(rest=False), members, rounds=4)["visits"]
    assert visits["c"] == visits["d"] == 4 and visits["a"] > 6


def test_fewer_samples_than_clusters_are_refused_before_the_run(toys, tmp_path):
    with pytest.raises(UserError, match=r"clients\.b +it has 3 samples, fewer than the 4 clusters"):
        toys.execute(
            tmp_path / "run",
            small(),
            [*clients(toys)[:1], toys.client("b", rows=3, task=Clustering(4))],
        )


def test_a_problem_of_several_clients_is_reported_once(toys, tmp_path):
    members = clients(toys)
    for one in members[:3]:
        one.train.x["left"] = torch.ones(24, 3)
    with pytest.raises(UserError, match=r"^1 problem in") as error:
        toys.execute(tmp_path / "run", small(), members)
    assert (
        'clients.a   its modality "left" is the same in all its samples and tells nothing apart: '
        "leave it out. The same is true of b" in str(error.value)
    )


def test_w_may_learn_at_a_rate_of_its_own(toys):
    """One step of SGD moves W ten times as far, and all else as before."""
    moved = {}
    for scale in (1.0, 10.0):
        method = small(head_lr_scale=scale, beta=0.1)
        training = toys.training(optimizer="sgd", momentum=0.0)
        program = method.Program(clients(toys)[0], method, training, 0)
        before = {name: t.clone() for name, t in program.model.state_dict().items()}
        after = descend([program], [before], steps=1, steps_per_subset=1)[0]
        moved[scale] = {name: after[name] - before[name] for name in before}
    for name, step in moved[1.0].items():
        factor = 10.0 if name.startswith("head.") else 1.0
        assert torch.allclose(moved[10.0][name], factor * step, rtol=1e-9, atol=1e-15)


def test_the_constraint_may_act_on_fused_sets_after_pretraining_only(toys):
    plain, fused = small(beta=0.0), small(beta=0.5, constrain="fused")
    programs = [m.Program(clients(toys)[0], m, toys.training(), 0) for m in (plain, fused)]
    x = programs[0].all_inputs()
    cost = {}
    for subset in (("left",), ("left", "right")):
        for pretraining in (True, False):
            one, other = (p.objective(subset, pretraining)(p.model, x).item() for p in programs)
            cost[subset, pretraining] = other - one
    assert cost.pop((("left", "right"), False)) > 1e-6
    assert set(cost.values()) == {0.0}


def test_h_may_be_that_of_each_model(toys):
    """With one modality a model's code is its fused feature, so no model deviates."""
    program_of = lambda method: method.Program(clients(toys)[2], method, toys.training(), 0)
    own, each = program_of(small()), program_of(small(reference="each"))
    models = {}
    for name, tensor in own.model.state_dict().items():
        models[name] = torch.stack([tensor, 1.5 * tensor])
    assert feature_distances([each], [models], [0]).abs().max() < 1e-12
    assert feature_distances([own], [models], [0])[0, 1] > 0.1


def test_what_acts_is_logged(toys, tmp_path):
    toys.execute(tmp_path / "run", small(weights="uniform"), clients(toys), rounds=2)
    notes = {}
    for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "note":
            notes[event["name"]] = event["values"]
    assert notes["entropy of weights"] == pytest.approx(dict.fromkeys("abcd", 1.0))
    assert all(1 / 4 <= p <= 1 for p in notes["largest class probability"].values())
    assert set(notes["class-correlation loss"]) == {"a", "b", "c", "d"}


def test_the_most_stable_visit_may_be_kept(toys, tmp_path, monkeypatch):
    """Scores are given by hand: of four visits the second is kept, whatever came later."""
    scores = iter((0.2, 0.9, 0.5, 0.4, 0.3))
    monkeypatch.setattr(afmcc, "stability_score", lambda *agreements: next(scores))
    kept = {}
    measure = AFMCC.measure_stability

    def watch(self, fed, messages):
        measure(self, fed, messages)
        kept[fed.round] = fed.state["shares"].clone(), fed.state["stable"]["score"]

    monkeypatch.setattr(AFMCC, "measure_stability", watch)
    finals = []
    mixtures = AFMCC.mixtures
    monkeypatch.setattr(
        AFMCC,
        "mixtures",
        lambda self, fed, names: (
            finals.append(fed.state["shares"].clone()) or mixtures(self, fed, names)
        ),
    )
    toys.execute(tmp_path / "run", small(keep="stable"), clients(toys), rounds=4)
    assert {round: score for round, (_, score) in kept.items()} == {1: 0.2, 2: 0.9, 3: 0.9, 4: 0.9}
    assert torch.equal(finals[-1], kept[2][0]) and not torch.equal(finals[-1], kept[4][0])


def test_groups_that_hold_score_one(toys):
    """Codes at the centres themselves: own k-means, every modality and a second look agree."""
    method = small()
    program = method.Program(clients(toys)[0], method, toys.training(), 0)
    rows = torch.eye(4).repeat(6, 1)  # 24 samples at four places
    program.model.encoder.codes = lambda x: {"left": rows, "right": rows}
    parameters = dict(program.model.state_dict())
    first = program.stability(parameters, torch.eye(4))
    assert first == {"own": 1.0, "modalities": 1.0, "before": 0.0}
    assert program.stability(parameters, torch.eye(4))["before"] == 1.0
    program.model.encoder.codes = lambda x: {"left": rows, "right": rows.roll(1, 1)}
    assert program.stability(parameters, torch.eye(4))["modalities"] < 1


def test_stability_may_be_logged_where_the_last_visit_is_kept(toys, tmp_path):
    """It is measured at every visit, and the end is that of a run that does not measure it."""
    plain = toys.execute(tmp_path / "plain", small(), clients(toys), rounds=3)
    told = toys.execute(tmp_path / "told", small(log_stability=True), clients(toys), rounds=3)
    assert toys.hashes(told) == toys.hashes(plain)
    curves = logged_metrics(read(tmp_path / "told"))
    assert set(curves["stability"]["a"]) == {1, 2, 3}
    assert "stability" not in logged_metrics(read(tmp_path / "plain"))


def test_the_number_of_clusters_is_found_without_labels(toys, tmp_path):
    """Rows lie at three places where the task looks for four: three groups hold, not more."""
    places = torch.tensor([[4.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 4.0]])
    members = []
    for i, client in enumerate(clients(toys)):
        noise = torch.randn(24, 3, generator=torch.Generator().manual_seed(i)) / 100
        rows = places.repeat(8, 1) + noise
        x = {name: rows.clone() for name in client.train.rows(torch.arange(1))[0]}
        members.append(
            toys.client(
                client.id,
                model=lambda: Autoencoder(SHAPE, (8,), 4),
                task=Clustering(4),
                train=(x, None),
                public=None,
            )
        )
    method = small(cluster_counts=(2, 3, 4, 5, 50))
    results = toys.execute(tmp_path / "run", method, members, rounds=2)
    found = results["metrics"]["stability_by_clusters"]
    assert set(found) == {"2", "3", "4", "5"}  # nobody has 50 rows
    assert all(0 <= score <= 1 for score in found.values())
    assert found["3"] > 2 * max(found["4"], found["5"])


def test_with_privacy_no_agreement_leaves_a_client():
    for more in ({"keep": "stable"}, {"log_stability": True}, {"cluster_counts": (2, 3)}):
        assert "how far groups hold" in small(weights="uniform", **more).privacy_problem()
    assert small(weights="uniform").privacy_problem() is None
