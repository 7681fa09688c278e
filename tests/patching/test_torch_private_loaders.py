"""Private names of torch's loaders are still there, and do what is expected of them."""

from collections.abc import Sequence
from unittest.mock import Mock

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import collate

from nano_loop.patching import torch_private_loaders as private


def test_loader_keeps_its_iterator_and_ends_its_workers():
    loader = DataLoader([1, 2], num_workers=1, persistent_workers=True)
    assert private.kept_iterator(loader) is None
    assert [int(each) for each in loader] == [1, 2]
    iterator = private.kept_iterator(loader)
    assert iterator is not None
    assert private.with_iterator(vars(loader), iterator) == vars(loader)
    assert private.with_iterator(vars(loader)) == {**vars(loader), "_iterator": None}
    (process,) = torch.multiprocessing.active_children()
    private.stop_kept_workers(loader)
    assert private.kept_iterator(loader) is None
    process.join(10)
    assert process.exitcode is not None


def test_functions_of_collate_are_torchs_until_the_program_registers_others(monkeypatch):
    assert private.registered_collates() == []
    assert private.collates_as_torch()
    assert private.is_default_collate(DataLoader([1]).collate_fn)
    monkeypatch.setitem(collate.default_collate_fn_map, Mock, list)
    assert (private.registered_collates(), private.collates_as_torch()) == ([Mock], True)
    monkeypatch.setitem(collate.default_collate_fn_map, Sequence, list)
    assert not private.collates_as_torch()
    monkeypatch.setattr(collate, "default_collate", lambda samples: samples)
    assert not private.is_default_collate(DataLoader([1]).collate_fn)


def test_shared_storage_is_of_processes():
    storage = private.shared_storage(64)
    assert storage.is_shared()
    assert storage.nbytes() == 64
