"""Clipping, noise and the accountant of local differential privacy, and the client's door that uses them."""

import builtins
import math

import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm, normaltest

from unalike import FedAvg, FederationConfig, FedMuscle, Privacy, sends
from unalike.base.errors import Refusal, UserError
from unalike.base.randomness import stream
from unalike.core.privacy import epsilon, noise_for, secret_normal
from unalike.core.runtime import ClientRuntime
from unalike.core.signatures import describe_leaves
from unalike.engines.local import LocalEngine
from unalike.report import write


def seeded(*names):
    return Privacy(noise=1).draws(0, *names)


def far(one, other):
    return math.sqrt(
        sum(
            float((one[name] - other[name]).double().square().sum())
            for name in one
            if one[name].is_floating_point()
        )
    )


def states():
    draw = stream(0, "states")
    base = {
        "a": torch.randn(4, 3, generator=draw),
        "b": torch.randn(5, generator=draw),
        "seen": torch.tensor(3),
    }
    return base, {"a": base["a"] + 3, "b": base["b"] - 1, "seen": torch.tensor(9)}


def test_update_is_clipped_as_one_vector_towards_what_was_received():
    base, new = states()
    sent = Privacy(noise=0, bound=0.5).parameters(new, base, seeded())
    assert far(sent, base) == pytest.approx(0.5, rel=1e-5)
    scale = 0.5 / far(new, base)
    assert torch.allclose(sent["a"], base["a"] + 3 * scale) and torch.allclose(
        sent["b"], base["b"] - scale
    )
    assert sent["seen"] == 3, "whole numbers are not told"


def test_without_noise_and_within_the_bound_nothing_changes():
    base, new = states()
    sent = Privacy(noise=0, bound=1e9).parameters(new, base, seeded())
    assert all(torch.equal(sent[name], new[name]) for name in ("a", "b"))
    assert torch.equal(Privacy(noise=0, bound=1e9).rows(new["a"], seeded()), new["a"])


@pytest.mark.parametrize("entropy", ["seed", "secret"])
def test_noise_is_normal_with_deviation_noise_times_bound(entropy):
    how = Privacy(noise=2, bound=0.25, entropy=entropy)
    zero = {"w": torch.zeros(200, 100, dtype=torch.float64)}
    noise = how.parameters(zero, zero, how.draws(0, "x"))["w"].flatten()
    assert float(noise.std()) == pytest.approx(0.5, rel=0.03) and abs(float(noise.mean())) < 0.02
    assert normaltest(noise.numpy()).pvalue > 1e-6


def test_tensors_of_one_reply_get_different_noise_and_the_model_stays_as_it_was():
    zero = {"a": torch.zeros(50), "b": torch.zeros(50)}
    sent = Privacy(noise=1).parameters(zero, zero, seeded("x"))
    assert not torch.equal(sent["a"], sent["b"]) and not zero["a"].any()


def test_seeded_noise_repeats_by_its_name_and_secret_noise_never():
    size = torch.Size([1000])
    assert torch.equal(seeded("a", 1)(size), seeded("a", 1)(size)) and not torch.equal(
        seeded("a", 1)(size), seeded("a", 2)(size)
    )
    assert (
        not torch.equal(secret_normal(size), secret_normal(size))
        and secret_normal(size).isfinite().all()
    )
    assert secret_normal(torch.Size([])).shape == () and secret_normal(
        torch.Size([0, 3])
    ).shape == (0, 3)


def test_each_row_is_clipped_and_no_longer_than_the_bound_after_the_noise():
    z = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    assert torch.allclose(
        Privacy(noise=0).rows(z, seeded()), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]])
    )
    assert (Privacy(noise=5).rows(z, seeded()).norm(dim=1) <= 1 + 1e-6).all()


def test_a_variance_never_becomes_negative():
    zero = {"norm.running_var": torch.zeros(100), "norm.running_mean": torch.zeros(100)}
    sent = Privacy(noise=1).parameters(zero, zero, seeded())
    assert (sent["norm.running_var"] >= 0).all() and (sent["norm.running_mean"] < 0).any()


@pytest.mark.parametrize("noise", [0, 3, 1000])
@pytest.mark.parametrize("entropy", ["seed", "secret"])
def test_what_is_not_finite_never_passes_the_mechanism(noise, entropy):
    how = Privacy(noise=noise, entropy=entropy)
    base = {"w": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([0.5])}
    sent = how.parameters(
        {"w": torch.tensor([1.0, math.nan, math.inf]), "b": torch.tensor([-math.inf])},
        base,
        how.draws(0, "x"),
    )
    assert all(tensor.isfinite().all() for tensor in sent.values())
    rows = how.rows(torch.tensor([[1.0, math.nan], [math.inf, 0.0], [0.3, 0.4]]), how.draws(0, "x"))
    assert rows.isfinite().all()
    if not noise:
        assert all(torch.equal(sent[name], base[name]) for name in base), (
            "an entry that is not finite is no update"
        )
        assert torch.allclose(rows, torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.3, 0.4]])), (
            "nor is a row"
        )


def test_entries_that_are_not_finite_leave_the_others_their_room():
    base = {"w": torch.zeros(3)}
    sent = Privacy(noise=0).parameters({"w": torch.tensor([math.nan, 3.0, 4.0])}, base, seeded())[
        "w"
    ]
    assert torch.allclose(sent, torch.tensor([0.0, 0.6, 0.8]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_noise_beyond_a_dtype_is_its_largest_number(dtype):
    zero = {"w": torch.zeros(100, dtype=dtype)}
    sent = Privacy(noise=1e300).parameters(zero, zero, seeded())["w"]
    assert sent.dtype == dtype and sent.isfinite().all() and sent.any()


@pytest.mark.parametrize("values", [100, 10_000, 1_000_000])
@pytest.mark.parametrize("base", [0.0, 1e-3, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_clipped_update_is_no_longer_than_the_bound_whatever_it_starts_from(values, base, dtype):
    """In float32 around a base of one's choice it was up to 1.95 bounds long."""
    draw = stream(0, "base")
    given = {
        "w": (base * (1 + 0.5 * torch.rand(values, generator=draw, dtype=torch.float64))).to(dtype)
    }
    for step in (1e-2, 1.0, 1e4):
        new = {"w": given["w"] + step * torch.randn(values, generator=draw, dtype=dtype)}
        sent = Privacy(noise=0).parameters(new, given, seeded())
        assert float((sent["w"].double() - given["w"].double()).norm()) <= 1 + 1e-6


def test_a_base_that_makes_every_step_round_up_does_not_stretch_it():
    """A spacing of 2^-3 at 1.5e6 in float32: steps of just over half of it would all be rounded up to a whole one."""
    given = {"w": torch.full((200,), 1.5e6)}
    sent = Privacy(noise=0).parameters({"w": given["w"] + 1.0}, given, seeded())["w"]
    assert float((sent.double() - given["w"].double()).norm()) <= 1 + 1e-6


def test_noise_is_added_to_the_clipped_update_before_anything_is_rounded():
    """What is sent is the nearest float32 to base + clipped update + noise in float64."""
    given, how = {"w": torch.full((1000,), 4096.0)}, Privacy(noise=0.5)
    sent = how.parameters({"w": given["w"] + 1.0}, given, seeded("x"))["w"]
    exact = 4096.0 + 1 / 1000**0.5 + 0.5 * seeded("x")(torch.Size([1000]))
    assert torch.equal(sent, exact.float())


def test_a_base_of_another_shape_is_none():
    with pytest.raises(ValueError, match=r"w has the shape \(3,\), and came with \(1,\)"):
        Privacy(noise=1).parameters({"w": torch.ones(3)}, {"w": torch.ones(1)}, seeded())


def test_a_blank_reply_is_what_the_mechanism_makes_of_no_update():
    base, kinds = (
        {"w": torch.tensor([5.0, 7.0])},
        {"parameters": "parameters", "views": "rows", "samples": "open"},
    )
    form = {
        "parameters": {"w": torch.tensor([math.nan, 9.0])},
        "views": torch.full((2, 2), 9.0),
        "samples": 3,
        "loss": 0.4,
    }
    sent = Privacy(noise=0).protect(form, kinds, lambda sent: base, seeded(), blank=True)
    assert torch.equal(sent["parameters"]["w"], base["w"]) and not sent["views"].any()
    assert sent["samples"] == 3 and sent["loss"] is None
    noisy = Privacy(noise=2).protect(form, kinds, lambda sent: base, seeded("x"), blank=True)
    assert torch.allclose(
        noisy["parameters"]["w"], (base["w"] + 2 * seeded("x")(torch.Size([2]))).float()
    )


def test_what_is_not_declared_does_not_leave():
    reply = {"parameters": {"w": torch.ones(2)}, "samples": 7, "loss": 0.3, "more": torch.ones(3)}
    kinds = {"parameters": "parameters", "samples": "open"}
    sent = Privacy(noise=0, bound=9).protect(
        reply, kinds, lambda sent: {"w": torch.zeros(2)}, seeded()
    )
    assert (
        sent["samples"] == 7
        and torch.equal(sent["parameters"]["w"], torch.ones(2))
        and sent["loss"] is sent["more"] is None
    )
    assert (
        Privacy(noise=0).protect(0.3, {}, dict, seeded()) is None
        and Privacy(noise=0).protect(torch.ones(3), {}, dict, seeded()) is None
    )


# the accountant


def gaussian(multiplier, delta):
    """Balle & Wang 2018, theorem 8, solved for epsilon."""

    def excess(e):
        a = 1 / (2 * multiplier)
        return norm.cdf(a - e * multiplier) - math.exp(e + norm.logcdf(-a - e * multiplier)) - delta

    return brentq(excess, 0, 1e4)


@pytest.mark.parametrize(
    ("noise", "releases", "delta"),
    [(1.0, 1, 1e-5), (4.0, 1, 1e-6), (8.0, 20, 1e-5), (2.0, 7, 1e-3)],
)
def test_epsilon_is_the_closed_form(noise, releases, delta):
    """Sensitivity is 2 bounds, so that a release has the multiplier noise / 2, and T of them noise / 2 / sqrt(T)."""
    assert epsilon(noise, releases, delta) == pytest.approx(
        gaussian(noise / 2 / math.sqrt(releases), delta), rel=1e-6
    )


def test_epsilon_is_what_composing_one_by_one_gives():
    import dp_accounting
    from dp_accounting import pld

    one_by_one = pld.PLDAccountant()
    one_by_one.compose(dp_accounting.GaussianDpEvent(3.0), 20)
    assert epsilon(6.0, 20, 1e-5) == pytest.approx(one_by_one.get_epsilon(1e-5), rel=1e-3)


def test_noise_for_undoes_epsilon():
    for wanted in (5, 40):
        assert epsilon(noise_for(wanted, 21, 1e-5), 21, 1e-5) == pytest.approx(wanted, rel=1e-6)


def test_without_the_library_one_sentence(monkeypatch, toys, tmp_path):
    real = builtins.__import__

    def missing(name, *rest):
        if name == "dp_accounting":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UserError, match=r"unalike\[privacy\]"):
        toys.execute(tmp_path / "run", FedAvg(), toys.clients(), privacy=Privacy(noise=1))


# the door


def runtime(toys, **privacy):
    """Of a client of FedAvg, with this privacy."""
    program = FedAvg.Program(toys.client("a"), FedAvg(), toys.training(), 0)
    return ClientRuntime(program, Privacy(**privacy) if privacy else None)


def test_what_is_sent_lies_around_what_was_received(toys):
    client = runtime(toys, noise=0, bound=0.01)
    given = {name: tensor + 1 for name, tensor in client.program.model.state_dict().items()}
    reply = client.perform("update", 1, 0, {"parameters": given})
    assert (
        far(reply["parameters"], given) == pytest.approx(0.01)
        and far(client.program.model.state_dict(), given) > 0.02
    )
    assert reply["loss"] is None and reply["samples"] == 20
    assert client.perform("train", 1, 0, {}) is None


@pytest.mark.parametrize("entropy", ["seed", "secret"])
@pytest.mark.parametrize("number", [math.nan, math.inf, 2e6, -1e30])
def test_numbers_that_are_not_finite_or_too_large_never_meet_the_data(toys, entropy, number):
    client = runtime(toys, noise=1, entropy=entropy)
    given = {name: tensor.clone() for name, tensor in client.program.model.state_dict().items()}
    given["head.weight" if "head.weight" in given else next(iter(given))].view(-1)[3] = number
    before = {name: tensor.clone() for name, tensor in client.program.model.state_dict().items()}
    for operation in ("update", "receive"):
        with pytest.raises(
            Refusal,
            match=rf"it refuses what it was sent: {operation}\.parameters\..* holds (NaN|a number beyond 1e\+06)",
        ):
            client.perform(operation, 1, 0, {"parameters": given})
    assert far(client.program.model.state_dict(), before) == 0 and not client.changed


def test_without_privacy_large_numbers_are_the_servers_to_send(toys):
    client = runtime(toys)
    client.perform(
        "receive",
        1,
        0,
        {
            "parameters": {
                name: torch.full_like(t, 1e30)
                for name, t in client.program.model.state_dict().items()
            }
        },
    )


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyError, MemoryError, Refusal])
def test_an_operation_that_fails_sends_an_update_of_nothing(toys, monkeypatch, error):
    client, given = runtime(toys, noise=0.5), runtime(toys, noise=0).program.model.state_dict()
    fine = client.perform("update", 1, 0, {"parameters": given})
    assert client.hidden_failure is None

    def fails(*args, **named):
        raise error("of its data")

    monkeypatch.setattr(client.program, "learn", fails)
    reply = client.perform("update", 1, 0, {"parameters": given})
    assert (
        describe_leaves(reply) == describe_leaves(fine)
        and reply["samples"] == fine["samples"]
        and isinstance(client.hidden_failure, error)
    )
    noise = client.privacy.draws(0, "a", "update", 1, 0)
    assert all(
        torch.equal(reply["parameters"][name], given[name] + 0.5 * noise(tensor.shape))
        for name, tensor in given.items()
    )
    assert client.perform("train", 1, 0, {}) is None


def test_a_loss_that_is_no_number_sends_an_update_of_nothing(toys):
    client, given = runtime(toys, noise=0), runtime(toys, noise=0).program.model.state_dict()
    client.program.loss = lambda x, y: client.program.task_loss(x, y) * math.inf
    reply = client.perform("update", 1, 0, {"parameters": given})
    assert far(reply["parameters"], given) == 0 and "the training loss became" in str(
        client.hidden_failure
    )


def test_what_comes_without_parameters_is_clipped_around_the_first_weights(toys):
    class Early(FedAvg.Program):
        @sends("parameters")
        def update(self):
            self.learn()
            return self.shared()

        update.operation = "changes"

    program = Early(toys.client("a"), FedAvg(), toys.training(), 0)
    client = ClientRuntime(program, Privacy(noise=0, bound=0.01))
    first = {name: tensor.clone() for name, tensor in client.program.model.state_dict().items()}
    for turn in range(2):
        assert far(client.perform("update", 1, turn, {}), first) == pytest.approx(0.01)


def test_first_weights_are_not_told_once_there_is_something_learnt(toys):
    client = runtime(toys, noise=1)
    first = client.perform("begin", 0, 0, {})
    client.perform("update", 1, 0, {"parameters": first})
    with pytest.raises(ValueError, match="before anything was learnt"):
        client.perform("begin", 1, 0, {})
    client.perform("receive", 2, 0, {"parameters": first})
    again = runtime(toys, noise=1)
    again.restore(client.state())
    with pytest.raises(ValueError, match="before anything was learnt"):
        again.perform("begin", 1, 0, {})


def test_every_turn_has_its_own_noise(toys):
    given = {
        name: tensor.clone()
        for name, tensor in runtime(toys, noise=1).program.model.state_dict().items()
    }
    sent = [
        runtime(toys, noise=1).perform("update", 1, turn, {"parameters": given})["parameters"]
        for turn in (0, 0, 1)
    ]
    assert far(sent[0], sent[1]) == 0 and far(sent[0], sent[2]) > 1


def test_secret_noise_gives_another_end_every_time(toys, tmp_path):
    for i in range(2):
        toys.execute(
            tmp_path / str(i),
            FedAvg(),
            toys.clients(),
            rounds=1,
            privacy=Privacy(noise=0.1, entropy="secret"),
        )
    assert toys.apart(*(toys.states(tmp_path / str(i)) for i in range(2))) > 1e-3


@pytest.mark.parametrize("operation", ["evaluate", "embed", "appraise"])
def test_a_client_with_secret_noise_does_not_answer_what_noise_does_not_cover(operation, toys):
    body = {
        "appraise": {
            "parameters": runtime(toys, noise=1).program.model.state_dict(),
            "common": False,
        }
    }.get(operation, {})
    answered = (
        runtime(toys, noise=1).perform(operation, 1, 0, body)
        if operation != "embed"
        else {"of": "clients that cluster"}
    )
    assert answered, "noise from the seed is a simulation's: the server could take it off again"
    with pytest.raises(ValueError, match=f"{operation} tells of a client's data as they are"):
        runtime(toys, noise=1, entropy="secret").perform(operation, 1, 0, body)


def test_a_client_with_secret_noise_tells_the_size_of_its_model_but_no_hash(toys):
    assert runtime(toys, noise=1).perform("describe", 1, 0, {})["hash"]
    told = runtime(toys, noise=1, entropy="secret").perform("describe", 1, 0, {})
    assert told["hash"] is None and told["parameters"] > 0


@pytest.mark.parametrize(
    "least, given, fits",
    [
        ({"noise": 1}, None, False),
        ({"noise": 1}, {"noise": 0.9}, False),
        ({"noise": 1}, {"noise": 1}, True),
        ({"noise": 1, "entropy": "secret"}, {"noise": 2}, False),
        ({"noise": 1, "entropy": "secret"}, {"noise": 2, "entropy": "secret"}, True),
    ],
)
def test_a_client_takes_part_with_no_less_than_it_asks_for(least, given, fits, toys, tmp_path):
    some = [toys.client("a"), toys.client("b", privacy=Privacy(**least)), toys.client("c")]
    run = lambda: toys.execute(
        tmp_path / "run", FedAvg(), some, rounds=1, privacy=given and Privacy(**given), alone=True
    )
    if fits:
        assert run()["clients"]["b"]["alone"] is None
    else:
        with pytest.raises(
            UserError, match=r"clients.b   it takes part only with privacy: \{noise: 1"
        ):
            run()


def test_a_row_is_a_release(toys, tmp_path):
    results = toys.execute(
        tmp_path / "run",
        FedMuscle(peers=2, width=8, batch=8),
        toys.clients(),
        rounds=2,
        privacy=Privacy(noise=3),
    )
    assert results["privacy"]["releases"] == 2 * 24 and results["privacy"]["epsilon"] == epsilon(
        3, 48, 1e-5
    )


def test_replies_that_come_too_late_were_sent_all_the_same(toys, tmp_path):
    there = [toys.client("a"), toys.client("b", speed=1e-3), toys.client("c")]
    results = toys.execute(
        tmp_path / "run",
        FedAvg(),
        there,
        rounds=3,
        privacy=Privacy(noise=1),
        federation=FederationConfig(deadline=60.0),
    )
    late = [f for f in results["failures"] if f["client"] == "b" and f["operation"] == "update"]
    assert results["clients"]["b"]["privacy"]["releases"] == len(late) == 3
    assert results["clients"]["a"]["privacy"]["releases"] == 3


def test_a_kind_that_does_not_exist_is_told_to_its_author():
    with pytest.raises(ValueError, match="parameters, rows, first, open"):
        sends(parameters="parametres")


@pytest.mark.parametrize(
    "how",
    [{"exchange": "peers"}, {"exchange": "paper"}, {"sync": "epoch"}, {"safeguard": True}],
    ids=str,
)
def test_every_exchange_of_representations_does_without_the_losses_of_clients(how, toys, tmp_path):
    how, safeguard = (
        {key: value for key, value in how.items() if key != "safeguard"},
        "safeguard" in how,
    )
    results = toys.execute(
        tmp_path / "run",
        FedMuscle(peers=2, width=8, batch=8, **how),
        toys.clients(),
        rounds=2,
        privacy=Privacy(noise=0.1),
        safeguard=safeguard,
    )
    assert not results["failures"] and results["privacy"]["releases"] == 2 * 24
    notes = [
        line
        for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
        if '"note"' in line
    ]
    assert notes and all('"values": {}' in line for line in notes), (
        "a loss that a client tells is made from its data"
    )
    write(tmp_path / "run")


@pytest.mark.parametrize("entropy, releases", [("seed", 3), ("secret", 4)])
def test_what_is_said_again_with_fresh_noise_is_counted_again(toys, tmp_path, entropy, releases):
    """A round that was cut short and done again; noise from the seed comes again, and says nothing new."""

    class Stopped(BaseException):
        pass

    def stop(event, **facts):
        if event == "round" and facts["round"] == 3:  # not saved yet
            raise Stopped

    run = lambda watch: toys.execute(
        tmp_path / "run",
        FedAvg(),
        toys.clients(),
        privacy=Privacy(noise=0.1, entropy=entropy),
        watch=watch,
    )
    with pytest.raises(Stopped):
        run(stop)
    assert run(lambda event, **facts: None)["privacy"]["releases"] == releases


def test_what_a_client_does_again_in_another_process_is_counted_again(toys, tmp_path, monkeypatch):
    receive = LocalEngine.receive

    def dies(engine, *given):
        arrivals = receive(engine, *given)
        if (
            any(
                arrival.client == "b" and engine.host.programs["b"].round == 2
                for arrival in arrivals
            )
            and not engine.repeated
        ):
            engine.repeated = [("b", "update"), ("b", "describe")]
        return arrivals

    monkeypatch.setattr(LocalEngine, "receive", dies)
    made = toys.execute(
        tmp_path / "run",
        FedAvg(),
        toys.clients(),
        rounds=2,
        privacy=Privacy(noise=0.1, entropy="secret"),
    )
    assert (
        made["clients"]["a"]["privacy"]["releases"]
        == 2
        < made["clients"]["b"]["privacy"]["releases"]
    )
