"""Records the visible state of a model, optimizer, scheduler or loader, and of the process."""

import os
import signal
import threading

import torch
from leaks import process_state
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset

OPTIMIZERS = torch.optim.Optimizer, torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad
MODULES = nn.Module, nn.Linear, nn.Conv2d, nn.Sequential
CLASSES = *OPTIMIZERS, *MODULES, nn.Parameter, torch.Tensor, DataLoader, Dataset

THREADS_OF_OTHERS = ("ThreadPoolExecutor", "tqdm_monitor")


def record(value):
    """Return everything worth comparing about `value`, as nested dicts and lists of tensors and plain values."""
    if isinstance(value, nn.Module):
        return record_model(value)
    if isinstance(value, torch.optim.Optimizer):
        return record_optimizer(value)
    if isinstance(value, LRScheduler | ReduceLROnPlateau):
        return {"class": type(value), "state": value.state_dict(), "optimizer": type(value.optimizer)}
    if isinstance(value, DataLoader):
        return record_loader(value)
    if isinstance(value, dict):
        return {key: record(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [record(item) for item in value]
    return value if isinstance(value, torch.Tensor | str | int | float) else type(value)


def record_model(model):
    modules = dict(model.named_modules())
    return {
        "classes": {name: names(type(m)) for name, m in modules.items()},
        "attributes": {name: attributes(m) for name, m in modules.items()},
        "hooks": {name: record_hooks(m) for name, m in modules.items()},
        "training": {name: m.training for name, m in modules.items()},
        "parameters": {name: record_tensor(p) for name, p in model.named_parameters()},
        "buffers": {name: record_tensor(b) for name, b in model.named_buffers()},
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "keys": [*model.state_dict()],
    }


def record_tensor(tensor):
    hooks = [len(getattr(tensor, n) or ()) for n in ("_backward_hooks", "_post_accumulate_grad_hooks")]
    return {"class": type(tensor), "attributes": attributes(tensor), "hooks": hooks, "value": tensor}


def record_hooks(owner):
    """Return the owners of the hooks on a module or an optimizer, by the name of each dict of hooks."""
    found = {key: value for key, value in vars(owner).items() if "hooks" in key and isinstance(value, dict)}
    return {key: [getattr(h, "__qualname__", type(h)) for h in found[key].values()] for key in sorted(found)}


def record_optimizer(optimizer):
    return {
        "class": type(optimizer),
        "attributes": attributes(optimizer),
        "hooks": record_hooks(optimizer),
        "defaults": optimizer.defaults,
        "state": optimizer.state_dict(),
    }


def record_loader(loader):
    return {
        "class": type(loader),
        "attributes": attributes(loader),
        "parts": [type(part) for part in (loader.dataset, loader.sampler, loader.batch_sampler)],
        "functions": [loader.collate_fn, loader.worker_init_fn],
    }


def attributes(owner):
    """Return the `__dict__`, except for entries that pickle, Dynamo and Lightning add for their own use."""
    noted = ("__slotnames__", "_compile_kwargs")
    return sorted(key for key in vars(owner) if key not in noted and not key.startswith("_dynamo"))


def names(cls):
    """Return the names of a class and its bases, since parametrizations make a new class for each module."""
    return [f"{c.__module__}.{c.__qualname__}" for c in cls.__mro__]


def record_strides(value):
    if isinstance(value, nn.Module):
        return {n: (p.stride(), telling(p.grad)) for n, p in value.named_parameters()}
    return [record_strides(item) for item in items_of(value)]


def laid_otherwise(value):
    """Return the tensors of the optimizers' state with another layout than their parameter."""
    if isinstance(value, torch.optim.Optimizer):
        states = enumerate(value.state.items())
        tensors = {(i, key): (t, p) for i, (p, state) in states for key, t in state.items() if is_like(t, p)}
        return {place for place, (t, p) in tensors.items() if telling(t) != telling(p)}
    return {(i, *place) for i, item in enumerate(items_of(value)) for place in laid_otherwise(item)}


def items_of(value):
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()


def is_like(value, parameter):
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def telling(tensor):
    """Return the strides of a tensor's dimensions, except for those of size one, which are arbitrary."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_sparse:
        return None
    return [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def surroundings():
    hooks = vars(torch.nn.modules.module)
    return process_state() | {
        "working folder": os.getcwd(),
        # torch's compiler and tqdm start their own threads, which stay.
        "threads of Python": sorted(t.name for t in threading.enumerate() if not t.name.startswith(THREADS_OF_OTHERS)),
        "signals": {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)},
        "classes": {c.__qualname__: {key: vars(c)[key] for key in attributes(c)} for c in CLASSES},
        "global hooks": {k: dict(v) for k, v in hooks.items() if "_global" in k and isinstance(v, dict)},
        "functions": [torch.autocast, torch.save, nn.functional.linear],
    }
