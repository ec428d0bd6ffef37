"""HetLoRA: products of adapters of unlike ranks are combined as the formulas say."""

from functools import partial

import pytest
import torch

import unalike
from unalike import Classification, Client, HetLoRA, Training
from unalike.algorithms.hetlora import best_factors, multiply
from unalike.models import build_encoder
from unalike.runs import RunPlan
from unalike.runs.audit import audit

pytest.importorskip("transformers")
pytest.importorskip("peft")
CONFIG = {
    "model_type": "bert",
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 256,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
RANKS = {"one": 1, "two": 2, "four": 4}
SAMPLES = {"one": 6, "two": 10, "four": 4}
BUDGET = Training(rounds=2, epochs=2, batch_size=4, lr=0.1)
QUERY = "encoder.model.encoder.layer.0.attention.self.query"


def build_clients(ranks=RANKS):
    """Clients with adapters of these ranks on the same frozen weights, in float64."""
    clients = []
    for number, (id, rank) in enumerate(ranks.items()):
        generator = torch.Generator().manual_seed(number)
        rows = SAMPLES[id]
        x = torch.randint(97, 123, (rows, 9), generator=generator).int()
        y = torch.arange(rows) % 2
        options = {"config": CONFIG, "lora": rank, "length": 9}
        model = partial(build_encoder, "reader", (9,), options)
        client = Client(id, model, Classification(2), (x, y), (x, y), dtype=torch.float64)
        clients.append(client)
    return clients


def serve(toys, folder, method, clients, rounds=1):
    """The federation after some rounds, and the uploads of the last."""
    fed = toys.federation(folder, method, clients, rounds=rounds, epochs=2, batch_size=4, lr=0.1)
    uploads = {}
    call = fed.call

    def record(operation, *args, **kwargs):
        replies = call(operation, *args, **kwargs)
        if operation == "update":
            uploads.update({c: dict(reply["parameters"]) for c, reply in replies.items()})
        return replies

    fed.call = record
    toys.serve(fed, method)
    return fed, uploads


def products(state, scale=2.0):
    """s B A of every layer, (out, in)."""
    found = {}
    for name, a in state.items():
        if ".lora_A." in name:
            b = state[name.replace(".lora_A.", ".lora_B.")]
            found[name.split(".lora_A.")[0]] = scale * b @ a
    return found


def truncate(matrix, rank):
    """The best approximation of that rank, by the decomposition of the whole matrix."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


def mean_products(uploads):
    """sum_i n_i s B_i A_i / sum_i n_i, by layer."""
    total = sum(SAMPLES[c] for c in uploads)
    sums = {}
    for client, state in uploads.items():
        for layer, product in products(state).items():
            sums[layer] = sums.get(layer, 0) + SAMPLES[client] / total * product
    return sums


def state_of(fed, client):
    return fed.engine.host.programs[client].model.state_dict()


def test_every_client_gets_the_best_approximation_of_the_mean_product(toys, tmp_path):
    fed, uploads = serve(toys, tmp_path, HetLoRA(), build_clients())
    expected = mean_products(uploads)
    assert len(expected) == 2
    for client, rank in RANKS.items():
        for layer, product in products(state_of(fed, client)).items():
            assert product.abs().max() > 1e-4
            torch.testing.assert_close(product, truncate(expected[layer], rank))


def test_other_parameters_are_averaged(toys, tmp_path):
    fed, uploads = serve(toys, tmp_path, HetLoRA(), build_clients())
    head = next(name for name in uploads["one"] if name.startswith("head."))
    mean = sum(SAMPLES[c] * state[head] for c, state in uploads.items()) / 20
    for client in RANKS:
        torch.testing.assert_close(state_of(fed, client)[head], mean)


def test_padding_averages_the_factors_one_by_one(toys, tmp_path):
    fed, uploads = serve(toys, tmp_path, HetLoRA(combine="pad"), build_clients())
    name = f"{QUERY}.lora_A.default.weight"
    mean = torch.zeros(4, 8, dtype=torch.float64)
    for client, state in uploads.items():
        mean[: RANKS[client]] += SAMPLES[client] / 20 * state[name]
    for client, rank in RANKS.items():
        torch.testing.assert_close(state_of(fed, client)[name], mean[:rank])


def test_stacking_folds_the_exact_mean_product_into_the_frozen_weights(toys, tmp_path):
    clients = build_clients()
    original = clients[0].encoder(0).model.encoder.layer[0].attention.self.query.base_layer.weight
    fed, uploads = serve(toys, tmp_path, HetLoRA(combine="stack"), clients)
    expected = original.double() + mean_products(uploads)[QUERY]
    for client in RANKS:
        program = fed.engine.host.programs[client]
        layer = program.model.get_submodule(QUERY)
        torch.testing.assert_close(layer.base_layer.weight.data, expected, atol=1e-6, rtol=1e-6)
        assert not layer.lora_B["default"].weight.any(), "adapters start anew"


def test_what_was_folded_is_there_after_a_restart(toys, tmp_path):
    method = HetLoRA(combine="stack")
    clients = build_clients()
    fed, _ = serve(toys, tmp_path, method, clients, rounds=2)
    program = fed.engine.host.programs["two"]
    again = method.Program(clients[1], method, BUDGET, 0)
    again.restore(program.state())
    x = program.client.train.rows(torch.arange(4))[0]
    assert torch.equal(program.model.eval()(x), again.model.eval()(x))


def test_scales_are_part_of_the_products():
    """0.5 x 2 + 0.5 x 4 = 3: a client with twice the scale counts twice."""
    a, b = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0], [0.0]])
    best = best_factors([(0.5, a, b), (0.5, a, 2 * b)], 1)
    torch.testing.assert_close(multiply(*best), torch.tensor([[3.0, 0.0], [0.0, 0.0]]))


@pytest.mark.parametrize("rank", [1, 3, 9])
def test_factors_of_convolutions_and_of_more_rank_than_there_is(rank):
    generator = torch.Generator().manual_seed(0)
    terms = []
    for r in (2, 3):
        a = torch.randn(r, 4, 3, 3, generator=generator, dtype=torch.float64)
        b = torch.randn(6, r, 1, 1, generator=generator, dtype=torch.float64)
        terms.append((0.5, a, b))
    a, b = best_factors(terms, rank)
    assert a.shape == (rank, 4, 3, 3) and b.shape == (6, rank, 1, 1)
    dense = sum(w * multiply(a, b) for w, a, b in terms).flatten(1)
    torch.testing.assert_close(multiply(a, b).flatten(1), truncate(dense, rank))


def test_equal_ranks_learn_from_the_first_round_on(toys, tmp_path):
    """No factor of the initial adapters is lost: both zero, they could never learn."""
    fed, _ = serve(toys, tmp_path, HetLoRA(combine="svd"), build_clients(), rounds=2)
    for client in RANKS:
        for name, tensor in state_of(fed, client).items():
            if ".lora_A." in name:
                assert tensor.flatten(1).any(1).all()


@pytest.mark.parametrize("combine", ["svd", "pad", "stack"])
def test_the_audit_knows_the_bytes_of_a_run(combine, tmp_path):
    method, clients = HetLoRA(combine=combine), build_clients()
    results = unalike.run(method, clients, training=BUDGET, out=tmp_path / "run", alone=False)
    assert not results["failures"]
    found = audit(RunPlan(method, clients, BUDGET, local_baseline=False))
    for client in RANKS:
        bytes = results["clients"][client]["bytes"]
        assert found["clients"][client]["bytes"]["up"] == bytes["up"]
        assert found["clients"][client]["bytes"]["down"] == bytes["down"]
