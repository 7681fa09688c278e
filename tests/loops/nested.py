"""Traverses values nested in lists, tuples, dicts, dataclasses and packed sequences."""

import copy
import dataclasses
import math

import torch


def mapped(value, change):
    """Return `value` with `change` applied to each tensor in it; containers keep their types."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        new = copy.copy(value)
        for key, item in value.items():
            new[key] = mapped(item, change)
        return new
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return type(value)._make(mapped(item, change) for item in value)
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, change) for item in value)
    if dataclasses.is_dataclass(value):
        fields = {f.name: mapped(getattr(value, f.name), change) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def differences(actual, expected, tolerance=0.0, path="result"):
    """Yield a line for each place where two nested values differ.

    `tolerance` is relative to the largest magnitude in each expected tensor; 0 requires bit-for-bit equality (NaN
    equals NaN). Types, keys, shapes, dtypes and layouts must be equal at any tolerance.
    """
    ours, theirs = dict(nodes(actual, path)), dict(nodes(expected, path))
    for place, error in errors(ours, theirs):
        if error is None:
            yield f"{place}: {ours[place]!r} for {theirs[place]!r}"
        elif error > tolerance * largest(theirs[place]):
            yield f"{place}: off by {error:.2e}, {tolerance:.0e} of {largest(theirs[place])} is allowed"


def nodes(value, path="result"):
    """Yield each value that is not a container, and the type and keys of each container, by path."""
    if isinstance(value, dict):
        items = {f"[{key!r}]": item for key, item in value.items()}
    elif isinstance(value, list | tuple):
        items = {f"[{index}]": item for index, item in enumerate(value)}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {f".{field.name}": getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        yield path, value
        return
    yield path, (type(value), [*items])
    for name, item in items.items():
        yield from nodes(item, path + name)


def errors(ours, theirs):
    """Yield each path where two nested values differ, with the largest error; None if types or shapes differ.

    Values at paths that only one of them has are left out, because the keys of their containers differ.
    """
    for place, other in theirs.items():
        error = error_of(ours[place], other) if place in ours else 0.0
        if error != 0.0:
            yield place, error


def error_of(one, other):
    if type(one) is not type(other):
        return None
    if isinstance(one, float):
        one, other = torch.tensor([one, other], dtype=torch.float64)
    if not isinstance(one, torch.Tensor):
        return 0.0 if one is other or one == other else None
    if any(getattr(one, name) != getattr(other, name) for name in ("dtype", "shape", "layout", "requires_grad")):
        return None
    one, other = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (one, other))
    if torch.equal(one, other) or not one.numel():
        return 0.0
    if not one.is_floating_point() and not one.is_complex():
        return None
    are_alike = (one == other) | (one.isnan() & other.isnan())
    return float((one - other).abs().masked_fill(are_alike, 0.0).nan_to_num(math.inf).max())


def largest(value):
    if isinstance(value, torch.Tensor):
        value = value.detach().to_dense() if value.is_sparse else value.detach()
        return float(value.abs().nan_to_num(0.0).max()) if value.numel() else 0.0
    return abs(value) if isinstance(value, float) else 0.0
