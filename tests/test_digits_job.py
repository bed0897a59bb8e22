"""The arguments of jobs/digits.py: class weights and soft labels, against torch's own loss."""

import pytest
import torch
import torch.nn.functional as F

from jobs.digits import Digits

WEIGHTS = [0.5, 1, 2, 1, 1, 3, 1, 0, 1, 1]
LOGITS, LABELS = torch.randn(12, 10, generator=torch.Generator().manual_seed(0)).double(), torch.arange(12) % 10
BATCH = {"image": LOGITS, "label": LABELS}


def mean_loss(**args):
    total, count = Digits(**args).loss(torch.nn.Identity(), BATCH)
    return total / count


def test_class_weights_and_soft_labels_are_torchs():
    weights = torch.tensor(WEIGHTS).double()
    assert mean_loss() == F.cross_entropy(LOGITS, LABELS)
    torch.testing.assert_close(mean_loss(class_weights=WEIGHTS), F.cross_entropy(LOGITS, LABELS, weight=weights))
    torch.testing.assert_close(mean_loss(label_softness=0.1), F.cross_entropy(LOGITS, LABELS, label_smoothing=0.1))


@pytest.mark.parametrize("args", [{"class_weights": WEIGHTS}, {"label_softness": 0.2, "class_weights": WEIGHTS}])
def test_the_loss_of_two_halves_adds_up_to_the_whole(args):
    whole, *halves = (
        Digits(**args).loss(torch.nn.Identity(), {name: value[rows] for name, value in BATCH.items()})
        for rows in (slice(0, 12), slice(0, 5), slice(5, 12))
    )
    for at in (0, 1):
        torch.testing.assert_close(halves[0][at] + halves[1][at], whole[at])


@pytest.mark.parametrize("args", [{"class_weights": [1, 2]}, {"class_weights": [-1] * 10}, {"label_softness": 1.0}])
def test_arguments_that_make_no_sense_are_refused(args):
    with pytest.raises(ValueError, match=next(iter(args))):
        Digits(**args)
