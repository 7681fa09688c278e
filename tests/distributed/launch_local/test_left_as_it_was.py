"""A run of two processes leaves models, tensors and settings of the caller as they were."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import nano_loop
from distributed import small
from nano_loop import TorchNano, nano


class _Caching(nn.Linear):
    """Registers a buffer with the length of its rank's batch, and resizes another."""

    def __init__(self):
        super().__init__(3, 1)
        self.register_buffer("cached", torch.zeros(0), persistent=False)
        self.register_buffer("seen", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.register_buffer("cached", torch.ones(len(x)), persistent=False)
        self.seen.resize_(len(x))
        return super().forward(x) * self.cached[:, None]


class _Phases(TorchNano):
    def __init__(self, **options):
        super().__init__(**options)
        self.device = "cpu"

    def train(self, model):
        for _ in range(2):
            model, optimizer = self.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
            model(torch.ones(3 + self.global_rank, 3).to(self.device)).sum().backward()
            optimizer.step()
        return model.seen.shape


def test_second_setup_takes_buffers_of_the_ranks_lengths_and_storages_are_resized():
    model = _Caching()
    assert _Phases(**small.OPTIONS).train(model) == (3,)
    model.seen.resize_(100)
    model.weight.data.resize_(10, 3)


def test_model_and_optimizer_are_freed_without_a_collection():
    model, optimizer, loader = small.parts()
    gc.collect()
    gc.disable()
    try:
        nano(**small.OPTIONS)(small.fit)(model, optimizer, loader)
        left = weakref.ref(model), weakref.ref(optimizer)
        del model, optimizer
        assert [reference() for reference in left] == [None, None]
    finally:
        gc.enable()


def test_patch_of_cuda_holds_in_workers():
    def train(model, optimizer, loader):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x.cuda()), y.to("cuda")).backward()
            optimizer.step()
        return nano_loop.all_gather(torch.ones(1, device="cuda:0")).tolist()

    nano_loop.patch_cuda()
    try:
        assert nano(**small.OPTIONS)(train)(*small.parts()) == [[1.0], [1.0]]
    finally:
        nano_loop.unpatch_cuda()


class _Halves(torch.Tensor):
    def __getitem__(self, index):
        return self.as_subclass(torch.Tensor)[index] / 2


@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: torch.utils.data.TensorDataset(rows)])
def test_rows_of_a_tensor_subclass_are_its_own(wrap):
    loader = DataLoader(wrap(torch.arange(8.0).as_subclass(_Halves)), 4)

    def read(model, loader):
        return [torch.as_tensor(batch[0] if isinstance(batch, list) else batch).tolist() for batch in loader]

    assert nano(verbose=False)(read)(nn.Linear(1, 1), loader) == read(None, loader)
