"""Losses, meters and checks of every task, against the formulas written out in NumPy."""

import math

import numpy as np
import pytest
import torch
from sklearn.datasets import load_wine
from torch.func import grad, vmap

from unalike.tasks import TASKS, Classification, MultiLabel, Segmentation

# those that `batch` has labels for; retrieval: test_retrieval.py
NAMED = ["classification", "multilabel", "segmentation", "clustering", "regression"]
LEARNT = [name for name in NAMED if TASKS[name].labelled]
CLASSIFYING = [name for name in LEARNT if TASKS[name].classifies]


def batch(name, rows=12, classes=4, seed=0):
    """A task, an output in float64 and labels, some unknown."""
    draws = torch.Generator().manual_seed(seed)
    task = TASKS[name](classes)
    shape = (rows, classes, 3, 3) if task.dense else (rows, classes)
    output = torch.randn(shape, generator=draws, dtype=torch.float64)
    if name == "regression":
        return task, output, torch.randn(shape, generator=draws, dtype=torch.float64)
    if name in ("classification", "clustering"):
        return task, output, torch.randint(classes, (rows,), generator=draws)
    if name == "multilabel":
        y = torch.randint(2, (rows, classes), generator=draws).double()
        y[0, 1], y[1, 2] = -1, math.nan
        return task, output, y
    y = torch.randint(classes, (rows, 6, 6), generator=draws)
    y[0, 0], y[1, :, 2] = 255, 255
    return task, output, y


def softmax(a, axis):
    e = np.exp(a - a.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def measure(task, output, y, step=5):
    meter = task.meter()
    for start in range(0, len(y), step):
        meter.add(output[start : start + step], y[start : start + step])
    return meter.result()


def test_classification_loss_and_meter_follow_the_formula():
    task, output, y = batch("classification", rows=40)
    p, truth = softmax(output.numpy(), 1), y.numpy()
    nll = -np.log(p[np.arange(40), truth]).mean()
    guess = p.argmax(1)
    f1 = []
    for k in set(truth) | set(guess):
        hit = ((truth == k) & (guess == k)).sum()
        f1.append(2 * hit / ((truth == k).sum() + (guess == k).sum()))
    result = measure(task, output, y)
    assert task.loss(output, y).item() == pytest.approx(nll)
    assert result["log_loss"] == pytest.approx(nll)
    assert result["accuracy"] == pytest.approx(100 * (guess == truth).mean())
    assert result["macro_f1"] == pytest.approx(100 * np.mean(f1))
    assert set(result) == {"accuracy", "macro_f1", "log_loss"}


def test_multilabel_loss_and_meter_follow_the_formula_on_known_entries():
    task, output, y = batch("multilabel", rows=40)
    y[2] = -1  # nothing known of this sample
    y[:, 3] = torch.where(y[:, 3] == 1, 0.0, y[:, 3])  # never present
    s, truth = output.numpy(), y.numpy()
    known = np.isin(truth, (0, 1))
    p = 1 / (1 + np.exp(-s))
    entries = np.where(truth == 1, -np.log(p), -np.log(1 - p))
    guess = p > 0.5
    f1, precision, hits, guessed, present = [], [], 0, 0, 0
    parted, each_precision, each_recall = [], [], []
    for k in range(4):
        t, g, score = truth[known[:, k], k], guess[known[:, k], k], s[known[:, k], k]
        hit = ((t == 1) & g).sum()
        hits, guessed, present = hits + hit, guessed + g.sum(), present + t.sum()
        f1.append(2 * hit / (t.sum() + g.sum()))
        order = np.argsort(-score)
        ranked = t[order]
        if t.sum():
            precision.append((np.cumsum(ranked) / np.arange(1, len(t) + 1))[ranked == 1].mean())
            parted.append(np.mean([a > b for a in score[t == 1] for b in score[t == 0]]))
            each_precision.append(hit / max(g.sum(), 1))
            each_recall.append(hit / t.sum())
    cp, cr, flat, marks = np.mean(each_precision), np.mean(each_recall), s[known], truth[known]
    rows = [i for i in range(40) if known[i].any()]
    exact = [all(guess[i, k] == truth[i, k] for k in range(4) if known[i, k]) for i in rows]
    result = measure(task, output, y)
    assert task.loss(output, y).item() == pytest.approx(entries[known].mean())
    assert result == pytest.approx(
        {
            "micro_f1": 100 * 2 * hits / (guessed + present),
            "OF1": 100 * 2 * hits / (guessed + present),
            "macro_f1": 100 * np.mean(f1),
            "CF1": 100 * 2 * cp * cr / (cp + cr),
            "macro_auc": 100 * np.mean(parted),
            "micro_auc": 100 * np.mean([a > b for a in flat[marks == 1] for b in flat[marks == 0]]),
            "exact": 100 * np.mean(exact),
            "best_macro_f1": result["best_macro_f1"],  # by hand below
            "mAP": 100 * np.mean(precision),
            "undefined_classes": 1,
            "log_loss": entries[known].sum() / 39,
        }
    )


def test_metrics_of_each_label_leave_out_what_is_undefined():
    """Label 0: one hit, one miss, one false alarm. Label 1: never present, guessed once."""
    meter = MultiLabel(("a", "b")).meter()
    output = torch.tensor([[2.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [-2.0, -1.0]])
    y = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, -1.0], [0.0, 0.0]])
    meter.add(output, y)
    first, second = meter.by_label()
    assert first == pytest.approx(
        {
            "f1": 50.0,
            "auc": 75.0,  # of four pairs one is in the wrong order
            "average_precision": 100 * (1 + 2 / 3) / 2,
            "precision": 50.0,
            "recall": 50.0,
            "positives": 2,
        }
    )
    undefined = {name for name, value in second.items() if np.isnan(value)}
    assert undefined == {"auc", "average_precision", "precision", "recall"}
    assert second["f1"] == second["positives"] == 0


def test_a_wide_head_is_two_layers_with_a_norm_between():
    kinds = [type(layer).__name__ for layer in MultiLabel(3, wide_head=True).head(4)]
    assert kinds == ["Linear", "LayerNorm", "GELU", "Linear"]
    assert MultiLabel(3, wide_head=True).head(4)(torch.zeros(2, 4)).shape == (2, 3)


def test_best_macro_f1_is_that_of_the_best_of_nine_thresholds():
    """Probabilities 0.25 and 0.35 where present, 0.15 where absent: 0.2 separates them."""
    p = torch.tensor([[0.25], [0.35], [0.15], [0.15]])
    y = torch.tensor([[1.0], [1.0], [0.0], [-1.0]])
    result = measure(MultiLabel(1), p.logit(), y)
    assert result["best_macro_f1"] == 100 and result["macro_f1"] == 0
    swapped = measure(MultiLabel(1), p.logit(), torch.tensor([[1.0], [0.0], [0.0], [-1.0]]))
    assert swapped["best_macro_f1"] == pytest.approx(100 * 2 / 3)  # two guessed, one right


def test_labels_with_undefined_metrics_are_left_out_and_counted():
    """Label 0 is as it should be, 1 always present, 2 never present nor given, 3 never known."""
    y = torch.tensor([[1.0, 1, 0, -1], [0, 1, 0, -1]])
    result = measure(MultiLabel(4), torch.where(y == 1, 3.0, -3.0), y)
    assert result["undefined_classes"] == 3
    assert {result[name] for name in ("macro_f1", "macro_auc", "mAP", "CF1", "micro_auc")} == {100}
    nothing = measure(MultiLabel(2), torch.full((3, 2), -1.0), torch.zeros(3, 2))
    assert (
        math.isnan(nothing["mAP"]) and math.isnan(nothing["macro_auc"]) and nothing["micro_f1"] == 0
    )


@pytest.mark.parametrize("criterion", ["bce", "focal", "asymmetric"])
def test_the_criterion_is_what_a_multilabel_task_minimises(criterion):
    from unalike import losses

    _, output, y = batch("multilabel")
    task, literal = (
        MultiLabel(4, criterion),
        getattr(losses, "binary_cross_entropy" if criterion == "bce" else criterion)(output, y),
    )
    assert task.loss(output, y) == literal.sum() / (y >= 0).sum()
    assert measure(task, output, y) == measure(MultiLabel(4), output, y)


def test_segmentation_loss_and_meter_follow_the_formula_on_known_pixels():
    task, output, y = batch("segmentation", classes=5)
    y[y == 3] = 0
    output[:, 3] = -50.0  # class 3 is in neither truth nor guess: it must not pull the mean down
    large = torch.nn.functional.interpolate(output, size=(6, 6), mode="bilinear").numpy()
    p, truth = softmax(large, 1), y.numpy()
    known, guess = truth != 255, large.argmax(1)
    nll = np.mean([-np.log(p[i, truth[i, r, c], r, c]) for i, r, c in zip(*known.nonzero())])
    t, g = truth[known], guess[known]
    iou = [((t == k) & (g == k)).sum() / ((t == k) | (g == k)).sum() for k in (0, 1, 2, 4)]
    result = measure(task, output, y)
    assert task.loss(output, y).item() == pytest.approx(nll)
    assert result == pytest.approx(
        {"miou": 100 * np.mean(iou), "pixel_accuracy": 100 * (t == g).mean(), "log_loss": nll}
    )


@pytest.mark.parametrize("name", NAMED)
def test_the_meter_does_not_care_how_samples_are_batched(name):
    task, output, y = batch(name)
    assert measure(task, output, y, step=1) == pytest.approx(measure(task, output, y, step=12))


@pytest.mark.parametrize("name", NAMED)
def test_a_right_output_measures_the_best_value(name):
    task, output, y = batch(name)
    if name == "regression":
        assert measure(task, y, y) == {"mae": 0, "rmse": 0, "r2": 1}
        return
    if name == "multilabel":
        output = torch.where(y == 1, 20.0, -20.0)
    else:
        output = 40 * torch.nn.functional.one_hot(y.clamp(max=3), 4).movedim(-1, 1).double()
    result = measure(task, output, y)
    assert result[task.metric] == 100
    assert result.get("log_loss", 0) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("name", LEARNT)
def test_losses_of_a_stack_equal_losses_one_by_one(name):
    task, _, _ = batch(name)
    outputs, ys = (
        torch.stack(parts) for parts in zip(*(batch(name, seed=seed)[1:] for seed in range(3)))
    )
    teachers = outputs.flip(0)
    for loss, other in ((task.loss, ys), (task.imitate, teachers)):
        together = vmap(grad(loss))(outputs, other)
        alone = torch.stack([grad(loss)(a, b) for a, b in zip(outputs, other)])
        torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            vmap(loss)(outputs, other), torch.stack([loss(a, b) for a, b in zip(outputs, other)])
        )


@pytest.mark.parametrize("name", CLASSIFYING)
def test_unknown_labels_give_no_loss_and_no_gradient(name):
    task, output, y = batch(name)
    unknown = torch.full_like(y, 255 if name == "segmentation" else -1)
    slope, cost = torch.func.grad_and_value(task.loss)(output, unknown)
    assert cost == 0 and (slope == 0).all()
    with pytest.raises(ValueError, match="nothing to measure"):
        measure(task, output, unknown)


@pytest.mark.parametrize("name", ["classification", "segmentation"])
def test_padding_rows_change_nothing(name):
    task, output, y = batch(name)
    more = torch.cat([y, torch.full_like(y[:2], 255 if name == "segmentation" else -1)])
    filled = torch.cat([output, output[:2]])
    assert task.loss(filled, more).item() == pytest.approx(task.loss(output, y).item())
    assert measure(task, filled, more) == pytest.approx(measure(task, output, y))


@pytest.mark.parametrize("name", LEARNT)
def test_imitation_is_lowest_at_the_teacher(name):
    task, teacher, _ = batch(name)
    assert grad(task.imitate)(teacher, teacher).abs().max() < 1e-12
    assert task.imitate(teacher + 0.1 * torch.randn_like(teacher), teacher) > task.imitate(
        teacher, teacher
    )


def test_a_certain_teacher_equals_a_label():
    task, output, y = batch("classification")
    teacher = 1e4 * torch.nn.functional.one_hot(y, 4).double()
    torch.testing.assert_close(task.imitate(output, teacher), task.loss(output, y))


@pytest.mark.parametrize("name", NAMED)
def test_heads_have_one_output_per_label(name):
    task = TASKS[name](3)
    if not task.dense:
        assert task.head(8)(torch.zeros(2, 8)).shape == (2, 3)
        return
    features = torch.zeros(2, 8, 4, 4)
    assert task.head(8)(features).shape == (2, 3, 4, 4)
    assert task.head(8, size=(9, 7))(features).shape == (2, 3, 9, 7)


def test_labels_may_be_a_number_or_names():
    assert Classification(3).labels == ("0", "1", "2")
    assert MultiLabel(["a", "b"]) == MultiLabel(("a", "b"))
    assert hash(Segmentation(2)) == hash(Segmentation(("0", "1")))
    names = load_wine().target_names
    for given in (names, list(names)):
        assert repr(Classification(given).labels) == "('class_0', 'class_1', 'class_2')"


def test_narrow_integers_are_labels_too():
    task, output, y = batch("segmentation")
    task.check(y.to(torch.uint8))
    torch.testing.assert_close(task.loss(output, y.to(torch.uint8)), task.loss(output, y))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Classification(0), "at least one label"),
        (lambda: Classification("cat"), "list of names or their number, got 'cat'"),
        (lambda: Classification(2.5), "list of names or their number, got 2.5"),
        (lambda: Classification(("a", "b", "a")), "more than once: a"),
        (lambda: Segmentation(("a", "b"), ignore=1), "class 'b'"),
        (lambda: MultiLabel(2, "hinge"), "one of bce, focal, asymmetric, got 'hinge'"),
    ],
)
def test_wrong_tasks_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("task", "y", "message"),
    [
        (
            Classification(10),
            torch.tensor([3, 12]),
            "label 12 does not fit 10 classes: labels run from 0 to 9",
        ),
        (Classification(10), torch.tensor([-1]), "label -1"),
        (Classification(10), torch.zeros(3), "whole numbers .*got torch.float32"),
        (Classification(10), torch.zeros(3, 1, dtype=torch.int64), r"got shape \(3, 1\)"),
        (MultiLabel(3), torch.zeros(5, 2), r"\(n, 3\), got \(5, 2\)"),
        (MultiLabel(3), torch.zeros(5, 3, dtype=torch.int64), "floats .*got torch.int64"),
        (MultiLabel(1), torch.tensor([[0.5]]), "got 0.5"),
        (Segmentation(2), torch.full((1, 2, 2), 2), "pixel label 2 does not fit 2 classes"),
        (Segmentation(2), torch.zeros(2, 2, dtype=torch.int64), "3 axes"),
        (Segmentation(2), torch.zeros(1, 2, 2), "whole numbers"),
    ],
)
def test_labels_that_do_not_fit_are_refused(task, y, message):
    with pytest.raises(ValueError, match=message):
        task.check(y)


@pytest.mark.parametrize("name", NAMED)
def test_labels_that_fit_pass(name):
    task, _, y = batch(name)
    task.check(y)
    task.check(y[:0])
    if not task.labelled:
        assert task.meter().result() == {}
        return
    with pytest.raises(ValueError, match="nothing to measure"):
        task.meter().result()


@pytest.mark.parametrize(
    "task, y, message",
    [
        (MultiLabel(2), torch.tensor([[0.0, -1], [0, 0]]), "no label is present in any of them"),
        (MultiLabel(2), torch.tensor([[0.0, 1]]), None),
        (Segmentation(2), torch.full((1, 2, 2), 255), "no pixel of them is labelled"),
        (Segmentation(2), torch.zeros(1, 2, 2).long(), None),
        (Classification(2), torch.zeros(1).long(), None),
    ],
)
def test_undefined_metrics_are_explained(task, y, message):
    assert task.unmeasured(y) == message


def test_every_task_that_classifies_says_which_classes_occur_in_a_sample():
    single, several, pixels = Classification(3), MultiLabel(2), Segmentation(2)
    assert single.label_matrix(torch.tensor([2, 0])).tolist() == [
        [False, False, True],
        [True, False, False],
    ]
    assert several.label_matrix(torch.tensor([[1.0, -1.0]])).tolist() == [[True, False]]
    assert pixels.label_matrix(torch.tensor([[[0, 0], [255, 0]]])).tolist() == [[True, False]]


def test_traits_tell_tasks_apart():
    assert Classification.traits() == ("labelled", "classifies", "single_label")
    assert MultiLabel.traits() == ("labelled", "classifies", "multilabel")
    assert Segmentation.traits() == ("labelled", "classifies", "dense")
    assert TASKS["retrieval"].traits() == ("labelled", "paired")
    assert TASKS["clustering"].traits() == ()


def test_probabilities_add_up_to_one_over_classes_unless_a_sample_may_have_several():
    output = torch.tensor([[0.0, 0.0, torch.log(torch.tensor(2.0))]])
    assert Classification(3).probabilities(output).tolist() == [[0.25, 0.25, 0.5]]
    assert MultiLabel(3).probabilities(output)[0, :2].tolist() == [0.5, 0.5]
    assert Segmentation(3).probabilities(output[..., None, None]).sum(1).item() == 1


def test_unknown_pixels_have_the_number_that_the_task_ignores():
    assert Segmentation(2, ignore=7).unknown_label == 7
    assert Classification(2).unknown_label == -1
