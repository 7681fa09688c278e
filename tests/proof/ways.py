"""The ways in which a case is trained, and the requirements for each."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from nano_loop import accelerated
from nano_loop.steps.channels_last import takes_images
from proof.program import train

#: If fp64 draws other random numbers, so that plain torch is off from it by more than this share, or if fp64 has no
#: kernel, half of the digits of plain torch's own results are compared.
_ELSE, _HALF = 0.01, 2.0**-12
#: The number of times a program is retrained with other values if a result falls short, and the probability that an
#: implementation as close as plain torch falls short more often than plain torch by this much.
_DRAWS, _CHANCE = 16, 0.001
_RUNS = 48  # of plain torch, to find results that differ between its runs


class Way(NamedTuple):
    """Options of a run, the comparison of its results, and the programs to which it applies."""

    options: dict
    differences: Callable
    applies: Callable = lambda program: True


def _has_images(program):
    """Whether a program passes images to layers for them: for other models, channels_last=True is an error."""
    inputs = [each for each in tree_leaves(program.inputs) if torch.is_tensor(each)]
    return takes_images(program.model) and any(each.dim() in (4, 5) for each in inputs)


def by_hand():
    """Return the context that a program without nano_loop uses around its calls."""
    return torch.autocast("cpu", torch.bfloat16)


class Compared:
    """A program, and the cached results of plain torch. ``alive`` is called before each accelerated run."""

    def __init__(self, program, alive=lambda: None):
        self.program, self.alive, self._known = program, alive, {}

    def plain(self, in_fp64=False, around=contextlib.nullcontext, again=0):
        """Return the results of plain torch; those of another run for each number in `again`."""
        key = in_fp64, around, again
        if key not in self._known:
            self._known[key] = train(self.program.copy(in_fp64), around=around)
        return self._known[key]

    def accelerated(self, way):
        """Return the results of a way."""
        self.alive()
        options = {"verbose": False, "num_threads": torch.get_num_threads(), **WAYS[way].options}
        return train(self.program.copy(), lambda *parts: accelerated(*parts, **options))

    def differences(self, way):
        """Return the disallowed differences of a way, as kinds and descriptions."""
        by_rounding = WAYS[way].differences is rounded
        plain, got = self.plain(around=by_hand if by_rounding else contextlib.nullcontext), self.accelerated(way)
        if plain.error or got.error:
            same = got.error == plain.error or (by_rounding and plain.error)
            return [] if same else [("raises", f"{plain.found.get('error')} became {got.found.get('error')}")]
        lines = itertools.zip_longest(plain.left, got.left)
        left = [("left", f"{old} became {line}"[:400]) for old, line in lines if line != old]
        return [*WAYS[way].differences(self, got, way), *left[:1]]


def _pairs(got, plain):
    """Yield kind and index, and both values, of all results that are not equal bit for bit."""
    for kind, theirs in plain.found.items():
        for place, (one, other) in enumerate(itertools.zip_longest(got.found[kind], theirs, fillvalue="missing")):
            if not _is_same(one, other):
                yield (kind, place), one, other


def _is_same(one, other):
    if not torch.is_tensor(one) or not torch.is_tensor(other):
        return not torch.is_tensor(one) and not torch.is_tensor(other) and (one == other or one != one)
    alike = one.dtype == other.dtype and one.shape == other.shape
    if not alike or torch.equal(one, other):
        return alike
    numbers = (each.masked_fill(each != each, 1) for each in (one, other))
    return torch.equal(one != one, other != other) and torch.equal(*numbers)


def equal(compared, got, way):
    """Return the results that are not equal bit for bit, except for those that differ between plain runs."""
    found = [*_pairs(got, compared.plain())]
    shaky = _shaky(compared) if found else ()
    return [(key[0], _told(key, one, other)) for key, one, other in found if key not in shaky]


def _shaky(compared):
    """Return the results that differ between runs of plain torch, as by memory's addresses, or if it is not written."""
    runs = (compared.plain(again=again) for again in range(1, _RUNS + 1))
    return {key for run in runs for key, *_ in _pairs(run, compared.plain())}


def near(compared, got, way):
    """Return results whose error relative to fp64 exceeds four times plain torch's plus two units in the last place."""
    return _judged(compared, got, way, _largest_error, 4)


def rounded(compared, got, way):
    """Return results whose error exceeds 1.5 times that of autocast by hand plus two units of bf16."""
    return _judged(compared, got, way, _mean_error, 1.5)


def _judged(compared, got, way, error, times):
    """Check one draw, and results that fall short with others: rounding may flip a sign, or plain torch be lucky."""
    others, errors = _errors(compared, got, error)

    def short(ours, own, unit):
        return not ours <= times * own + 2 * unit

    worse = {key: 0 for key, each in errors.items() if short(*each)}
    if worse:
        shaky, repeated = _shaky(compared), compared.accelerated(way)
        worse = {key: 0 for key in worse if key not in shaky}
        others += [(key[0], _told(key, *each)) for key, *each in _pairs(repeated, got) if key in worse]
    better = dict(worse)
    for left in range(_DRAWS, -1, -1):
        worse = {key: each for key, each in worse.items() if _chance(each + left, better[key]) < _CHANCE}
        if others or not worse or not left:
            break
        again = Compared(compared.program.redrawn(left), compared.alive)
        trained = again.accelerated(way)
        if not (trained.error or again.plain().error):  # a matrix may have become singular
            drawn = _errors(again, trained, error)[1]
            for key in worse:
                ours, own, unit = drawn.get(key, (0.0, 0.0, 0.0))  # equal bit for bit
                worse[key] += short(ours, own, unit)
                better[key] += short(own, ours, unit)
    told = "{}: off by {:.3g}, plain torch by {:.3g}, unit {:.3g}".format
    return others + [(kind, told(place, *errors[kind, place])) for kind, place in worse]


def _chance(worse, better):
    """Return the probability that one of two equivalent implementations is the worse one at least this often."""
    return sum(math.comb(worse + better, each) for each in range(worse, worse + better + 1)) / 2 ** (worse + better)


def _errors(compared, got, error):
    """Return results that cannot be measured; and by kind and index, our error, plain torch's, and a unit."""
    by_rounding = error is _mean_error
    plain = compared.plain(around=by_hand if by_rounding else contextlib.nullcontext)
    others, errors, pairs = [], {}, [*_pairs(got, plain)]
    if not pairs:
        return others, errors
    exact, eps = compared.plain(in_fp64=True), torch.finfo(torch.bfloat16 if by_rounding else torch.float32).eps
    draws_others = not torch.equal(exact.found["random"][0], plain.found["random"][0])
    # Rounding to bf16 is measured relative to fp32 where fp64 has no kernel, or another shape.
    references = (exact, compared.plain()) if by_rounding else (exact,)

    @functools.cache  # a model may have thousands of tensors
    def unit_of(kind, number):
        largest = _largest((*references, plain)[number].found[kind])
        return largest, eps * 2.0 ** math.floor(math.log2(largest or 1))

    for key, one, other in pairs:
        kind = key[0]
        if by_rounding and kind == "random":
            continue
        given = [_at(key, got, each) for each in references]
        number = next((each for each, reference in enumerate(given) if reference is not None), None)
        alike = torch.is_tensor(one) and torch.is_tensor(other) and one.shape == other.shape
        if not (alike and (one.dtype == other.dtype or by_rounding)):
            # Rounding by hand may select other elements than fp32 does: then it has no error to compare with.
            if by_rounding and number is not None:
                errors[key] = error(one, given[number]), 0.0, unit_of(kind, number)[1]
            else:
                others.append((kind, _told(key, one, other)))
            continue
        own = math.inf if number is None else error(other, given[number])
        largest, unit = unit_of(kind, len(references) if number is None else number)
        if math.isinf(own) or (draws_others and own > _ELSE * largest and not by_rounding):
            largest, unit = unit_of(kind, len(references))
            errors[key] = error(one, other), 0.0, max(unit, _HALF * largest)
        else:
            errors[key] = error(one, given[number]), own, unit
    return others, errors


def _at(key, got, outcome):
    """Return the tensor at a place of an outcome, or None if it cannot be compared with the one of these results."""
    kind, place = key
    values, own = outcome.found.get(kind, ()), got.found[kind]
    if outcome.error or len(values) != len(own):
        return None
    one, other = own[place], values[place]
    return other if torch.is_tensor(one) and torch.is_tensor(other) and one.shape == other.shape else None


def _difference(one, other):
    one, other = one.double(), other.double()
    off = (one - other).abs()
    return off.masked_fill((one == other) | (one.isnan() & other.isnan()), 0.0).nan_to_num(math.inf)


def _largest_error(one, other):
    return _difference(one, other).max().item() if one.numel() else 0.0


def _mean_error(one, other):
    return _difference(one, other).square().mean().sqrt().item() if one.numel() else 0.0


def _largest(values):
    numbers = [each.abs().double() for each in values if torch.is_tensor(each)]
    return max((each[each.isfinite()].max().item() for each in numbers if each.isfinite().any()), default=0.0)


def _told(key, one, other):
    if not torch.is_tensor(one) or not torch.is_tensor(other):
        return f"{key[1]}: {str(other)[:80]} became {str(one)[:80]}"
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{key[1]}: {other.dtype} {tuple(other.shape)} became {one.dtype} {tuple(one.shape)}"
    return f"{key[1]}: off by {_largest_error(one, other):.3g} of {_largest([other]):.3g}"


WAYS = {
    "fp32": Way({"precision": 32}, near),
    "exact": Way({"exact": True}, equal),
    "auto": Way({"precision": "auto"}, rounded),
    "bf16": Way({"precision": "bf16"}, rounded),
    "channels_last": Way({"precision": 32, "channels_last": True}, near, _has_images),
}
