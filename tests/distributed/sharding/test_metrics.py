"""Metrics of torchmetrics count each sample once, whether or not the ranks have divided the samples."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from distributed.sharding.test_implicit_loaders import in_run

torchmetrics = pytest.importorskip("torchmetrics")


def counted(loader):
    """Return a sum, a concatenation of all values, and a confusion matrix."""
    metrics = [
        torchmetrics.SumMetric(),
        torchmetrics.CatMetric(),
        torchmetrics.classification.MulticlassConfusionMatrix(3),
    ]
    for (x,) in loader:
        for metric in metrics[:2]:
            metric.update(x.float())
        metrics[2].update(x % 3, x // 5)
    return metrics


def computed(metrics):
    total, values, matrix = (metric.compute() for metric in metrics)
    return total.item(), sorted(values.tolist()), matrix.tolist()


def loader_of(count=12):
    return DataLoader(TensorDataset(torch.arange(count)), 3)


def test_whole_evaluations_and_divided_training_both_count_each_sample_once(team):
    def loop(ranks, step, model):
        of_training = counted(loader_of())
        divided = computed(of_training)
        for metric in of_training:
            metric.reset()
        again = counted(loader_of())
        with torch.no_grad():
            of_evaluation = computed(counted(loader_of()))
            late = computed(again)  # divided batches after whole ones
        model.eval()
        by_mode = computed(counted(loader_of()))
        return divided, of_evaluation, late, by_mode

    expected = computed(counted(loader_of()))
    assert in_run(team, loop) == [(expected,) * 4] * 2
