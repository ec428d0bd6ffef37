"""The model that clients end with."""

from unalike.algorithms import FedMusclePlus


def test_final_model_local_is_before_the_last_alignment_and_aligned_after_it(
    outcome, toys, monkeypatch
):
    after = {}
    train = FedMusclePlus.Program.train

    def spy(self):
        loss = train(self)
        after[self.client.id] = {
            name: tensor.clone() for name, tensor in self.model.state_dict().items()
        }
        return loss

    spy.operation = "changes"
    monkeypatch.setattr(FedMusclePlus.Program, "train", spy)
    local = outcome(final_model="local")
    assert toys.apart(local, after) == 0
    aligned = outcome(final_model="aligned")
    assert toys.apart({"a": aligned["a"]}, {"a": after["a"]}) > 1e-4
