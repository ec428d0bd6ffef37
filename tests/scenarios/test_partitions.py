"""Rows dealt out among more clients than take part, so that those who do hold the same with fewer others."""

import pytest

from unalike.errors import UserError
from unalike.scenarios import build, read


def rows(count, clients):
    told = {"name": "some", "algorithm": {"name": "local"},
            "data": {"name": "digits", "partition": {"name": "dirichlet", "alpha": 0.1, "by": "digit"} | clients},
            "clients": [{"id": f"c{i}", "model": {"name": "mlp"}, "target": "digit"} for i in range(count)]}
    return [client.train.index.tolist() for client in build.clients(read(told, "some")[0])]


def test_fewer_clients_hold_what_they_would_among_more():
    assert rows(1, {"clients": 3}) == rows(3, {})[:1] and rows(2, {"clients": 3}) == rows(3, {"clients": 3})[:2]
    assert len(rows(1, {})[0]) == 1200


@pytest.mark.parametrize("clients, said", [(2, "partition.clients   are 2, but 3 take part: raise it or leave it out"), (0, "at least 1")])
def test_too_few_to_share(clients, said):
    with pytest.raises(UserError, match=said):
        rows(3, {"clients": clients})
