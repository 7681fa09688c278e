"""Traverses values nested in lists, tuples, dicts, dataclasses and packed sequences."""

import copy
import dataclasses

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
    """
    Yield a line for each place where two nested values differ.

    `tolerance` is relative to the largest magnitude in each expected tensor; 0 requires bit-for-bit equality (NaN
    equals NaN). Types, keys, shapes, dtypes and layouts must be equal at any tolerance.
    """
    if type(actual) is not type(expected):
        yield f"{path}: {type(actual)} for {type(expected)}"
    elif isinstance(expected, torch.Tensor):
        yield from tensor_differences(actual, expected, tolerance, path)
    elif isinstance(expected, dict):
        if list(actual) != list(expected):
            yield f"{path}: keys {list(actual)} for {list(expected)}"
        else:
            for key in expected:
                yield from differences(actual[key], expected[key], tolerance, f"{path}[{key!r}]")
    elif isinstance(expected, list | tuple):
        if len(actual) != len(expected):
            yield f"{path}: {actual!r} for {expected!r}"
        else:
            for index, items in enumerate(zip(actual, expected, strict=True)):
                yield from differences(*items, tolerance, f"{path}[{index}]")
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            items = getattr(actual, field.name), getattr(expected, field.name)
            yield from differences(*items, tolerance, f"{path}.{field.name}")
    elif isinstance(expected, float):
        both = torch.tensor([actual, expected], dtype=torch.float64)
        yield from tensor_differences(both[0], both[1], tolerance, path)
    elif actual is not expected and actual != expected:
        yield f"{path}: {actual!r} for {expected!r}"


def tensor_differences(actual, expected, tolerance, path):
    for name in ("dtype", "shape", "layout", "requires_grad"):
        if getattr(actual, name) != getattr(expected, name):
            yield f"{path}: {name} {getattr(actual, name)} for {getattr(expected, name)}"
            return
    actual, expected = (t.detach().to_dense() if t.is_sparse else t.detach() for t in (actual, expected))
    if expected.numel() == 0 or torch.equal(actual, expected):
        return
    if not expected.is_floating_point() and not expected.is_complex():
        yield f"{path}: {actual} for {expected}"
        return
    bound = tolerance * expected.abs().nan_to_num(0.0).max()
    same = torch.isclose(actual, expected, rtol=0.0, atol=float(bound), equal_nan=True)
    if not same.all():
        error = (actual - expected).abs().max() / expected.abs().max()
        yield f"{path}: off by {error:.2e} of the largest value, {tolerance:.0e} is allowed"


def leaves(value, path="result"):
    """Yield each value that is not a container, with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    else:
        yield path, value
