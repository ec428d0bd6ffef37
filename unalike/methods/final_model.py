"""The model that a client ends with: the one after the last local epochs, before the alignment that
follows them, whose head no longer fits the representation it gets."""

from unalike.core.federation import Federation
from unalike.core.operations import operation
from unalike.core.program import ClientProgram
from unalike.core.safeguard import NOT_CROSS_VALIDATED
from unalike.methods.parts import Part

SNAPSHOT = "settled"  # in a program's memory


class SnapshotProgram(ClientProgram):
    """Keeps a copy of its model and can return to it."""

    @operation
    def settle(self) -> None:
        """Keep a copy of the model."""
        model = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.memory[SNAPSHOT] = {
            "model": model,
            NOT_CROSS_VALIDATED: self.memory.get(NOT_CROSS_VALIDATED, False),
        }

    @operation
    def leave(self) -> None:
        """Return to the copy, if there is one."""
        snapshot = self.memory.pop(SNAPSHOT, None)
        if snapshot is not None:
            self.model.load_state_dict(snapshot["model"])
            self.memory[NOT_CROSS_VALIDATED] = snapshot[NOT_CROSS_VALIDATED]


class LocalFinalModel(Part):
    """Clients end with the model after their last local epochs."""

    def after_local(self, fed: Federation) -> None:
        # With partial participation any round may be a client's last.
        if fed.round == fed.training.rounds or fed.config.partial:
            fed.call("settle")

    def finish(self, fed: Federation) -> None:
        fed.call("leave", clients=fed.clients, quorum=0)
