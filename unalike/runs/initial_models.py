"""Initial models, built once: the dry run, the local baseline and the federated run share them.

All three need the same encoder with the same first weights. Building one may read a file of
pretrained weights, so the first that was built is kept and copied for the next stage.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import FunctionType

import torch
from torch import nn

from unalike.core.client import Client, factory_name
from unalike.runs.plan import RunPlan

MAX_BYTES = 2**31  # kept models together; further ones are built again when they are needed

BuildModel = Callable[[], nn.Module]


class InitialModels:
    """Copies of the initial encoders of a run's clients, for the next stage that needs them.

    They are kept in this process: clients in worker processes build theirs once per stage.
    """

    def __init__(self, max_bytes: int = MAX_BYTES):
        self.max_bytes = max_bytes
        self.bytes = 0
        self.models: dict[tuple[str, int], nn.Module] = {}
        self.keeps = True

    def share_among(self, plan: RunPlan) -> RunPlan:
        """Return the plan with clients that build their initial model at most once.

        Lazy clients stay as they are: they are in one stage only.
        """
        server = self.share(plan.server, plan.seed) if plan.server is not None else None
        if plan.lazy:
            return replace(plan, server=server)
        clients = [self.share(client, plan.seed) for client in plan.clients]
        return replace(plan, clients=clients, server=server)

    def share(self, client: Client, seed: int) -> Client:
        """Return the client with a model factory that builds at most once per seed.

        A client whose `model` is a module is returned as it is: that module is only copied.
        """
        if isinstance(client.model, nn.Module | SharedFactory):
            return client
        shared = replace(client, model=SharedFactory(client.id, client.model, self))
        # A lambda has no name to show; its model has.
        name = factory_name(client.model) or type(shared.encoder(seed)).__name__
        return replace(shared, model_name=client.model_name or name)

    def build(self, client: str, factory: BuildModel) -> nn.Module:
        """Return a fresh encoder of a client: the kept one or a copy of it, or a new one."""
        # `Client.encoder` seeds torch before it calls the factory: the seed tells weights apart.
        key = (client, torch.initial_seed())
        if key in self.models:
            return copy.deepcopy(self.models[key]) if self.keeps else self.models.pop(key)
        model = factory()
        size = sum(tensor.nbytes for tensor in model.state_dict().values())
        if self.keeps and self.bytes + size <= self.max_bytes and is_self_contained(model):
            # Some modules cannot be copied; these are built again.
            with suppress(Exception):
                self.models[key] = copy.deepcopy(model)
                self.bytes += size
        return model

    def begin_last_stage(self) -> None:
        """Give out the kept models themselves from now on, and keep no further ones."""
        self.keeps = False

    def release(self) -> None:
        """Forget all kept models: every client has begun."""
        self.keeps = False
        self.models.clear()


def is_self_contained(model: nn.Module) -> bool:
    """Whether a deep copy of a model shares nothing with it.

    Functions are copied by reference: one that is stored in a module or registered as a hook, and
    refers to the module in its closure, would make the copy use the original's parameters.
    """
    for module in model.modules():
        values = list(vars(module).values())
        for hooks in vars(module).values():
            if isinstance(hooks, dict):
                values += hooks.values()
        if any(isinstance(value, FunctionType) and value.__closure__ for value in values):
            return False
    return True


class SharedFactory:
    """A client's model factory that asks `InitialModels` first."""

    def __init__(self, client: str, factory: BuildModel, models: InitialModels):
        self.client = client
        self.factory = factory
        self.models = models

    def __call__(self) -> nn.Module:
        return self.models.build(self.client, self.factory)

    def __reduce__(self) -> tuple[Callable[[BuildModel], BuildModel], tuple[BuildModel]]:
        """Another process gets the plain factory: kept models stay here."""
        return _plain_factory, (self.factory,)


def _plain_factory(factory: BuildModel) -> BuildModel:
    return factory
