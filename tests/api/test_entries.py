"""The entry points of nano_loop compute, undo, report and raise the same."""

import functools
import json
import os
import traceback

import pytest
import torch
from entries import ENTRIES, EXPLICIT, InContext, Installed, Trains, decorated
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from watched import Net, fit, in_bf16, is_fused, loader, make, seeded  # noqa: F401 - a fixture

from nano_loop import NanoConfigError, NanoError, SetupReport, TorchNano, nano
from nano_loop.config.declarations import DEFAULTS

# Warnings about CPUs without bf16 instructions are covered by other tests.
pytestmark = pytest.mark.filterwarnings("ignore:precision=:nano_loop.NanoWarning")

#: The beginnings of lines that list several steps.
IDLE = ("  nothing to do: ", "  too small to gain: ", "  for bf16: ", "  for bf16 and fp32: ")


def state(model, optimizer, *_):
    return in_bf16(model)[0], is_fused(optimizer)


def trained(*parts):
    fit(*parts)
    return state(*parts)


@pytest.fixture
def job():
    """Return a model, an optimizer and a loader, which are unchanged after the test."""
    model, optimizer, loader = make()
    yield model, optimizer, loader
    assert state(model, optimizer) == (False, False)


class OwnError(Exception):
    """An error that cannot be recreated from its arguments."""

    def __init__(self, first, second):
        super().__init__("mine")


ERRORS = [OwnError(1, 2), StopIteration(3), KeyboardInterrupt(), SystemExit(0)]


@ENTRIES
@pytest.mark.parametrize("error", [*ERRORS, GeneratorExit()], ids=repr)
def test_error_of_the_loop_is_the_very_same_and_all_is_undone_and_the_next_run_trains(entry, job, error):
    errors, last = [error], object()

    def loop(*parts):
        assert trained(*parts) == (True, True)
        assert entry in (decorated, Installed) or "precision" in train.report.applied
        for error in errors:
            raise error
        return last

    train = entry(loop, precision="bf16", channels_last="auto", verbose=False)
    with pytest.raises(type(error)) as caught:
        train(*job)
    assert caught.value is error
    assert error.__cause__ is None
    assert error.__context__ is None
    frame = traceback.extract_tb(error.__traceback__)[-1]
    assert (frame.filename, frame.line) == (__file__, "raise error")
    assert state(*job) == (False, False)
    assert "precision" in train.report.applied
    if entry is Trains:
        with pytest.raises(NanoError, match="outside train"):
            train.setup(*job)
    errors.clear()
    assert train(*job) is last


@EXPLICIT
@pytest.mark.parametrize("precision", [32, "bf16"])
def test_loop_computes_the_same_by_each_way(entry, precision):
    def trained_by(way):
        with torch.random.fork_rng():
            model, optimizer, _ = make()
            data = DataLoader(TensorDataset(torch.randn(12, 3), torch.randn(12, 2)), batch_size=4, shuffle=True)
            way(functools.partial(fit, loss=nn.functional.mse_loss), precision=precision, verbose=False)(
                model, optimizer, data
            )
        return [*model.parameters()]

    assert all(map(torch.equal, trained_by(entry), trained_by(decorated)))


@EXPLICIT
@pytest.mark.parametrize("precision", [32, "bf16", "64"])
def test_report_has_a_reason_of_each_step_that_is_auto(entry, precision):
    train = entry(fit, precision=precision, verbose=False)
    train(*make())
    steps = {name for name, default in DEFAULTS.items() if default == "auto"}
    assert {name for name in steps if train.report[name].detail} == steps
    assert {train.report[name].status for name in steps} == {"applied", "skipped"}


@EXPLICIT
def test_several_models_optimizers_and_loaders_are_set_up(entry):
    def loop(models, optimizers, loaders):
        for model, (first, _), data in zip(models, optimizers, loaders, strict=True):
            fit(model, first, data)
        return in_bf16(*models), [is_fused(each) for of_model in optimizers for each in of_model]

    models = [Net(), Net()]
    optimizers = [[torch.optim.SGD([each], lr=0.1) for each in model.parameters()] for model in models]
    train = entry(loop, precision="bf16", verbose=False)
    assert train(models, optimizers, [loader(), loader()]) == ([True] * 2, [True] * 4)
    assert train.report["fast_fetch"].detail.endswith("1 of 1 loaders" if entry is Trains else "2 of 2 loaders")
    assert in_bf16(*models) == [False] * 2
    assert not any(is_fused(each) for of_model in optimizers for each in of_model)


@ENTRIES
@pytest.mark.parametrize("variables", [{}, {"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "x"}, {"OMP_NUM_THREADS": "1"}])
def test_environment_is_as_before_but_for_what_the_loop_sets(entry, job, monkeypatch, variables):
    for name, value in {**variables, "MINE": "0"}.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    train = entry(lambda *parts: (fit(*parts), os.environ.update(MINE="1")), precision="bf16", verbose=False)
    assert dict(os.environ) == before
    train(*job)
    assert dict(os.environ) == {**before, "MINE": "1"}


@EXPLICIT
def test_step_asked_for_that_does_not_apply_is_told_and_undone(entry, job):
    train = entry(lambda *_: pytest.fail("the loop must not start"), precision="bf16", fused_optimizer=True)
    with pytest.raises(NanoConfigError, match=r"fused_optimizer=True: ASGD has no fused CPU kernel\. Remove fused"):
        train(job[0], torch.optim.ASGD(job[0].parameters()))


@pytest.mark.parametrize(
    ("entry", "inner"),
    [*((each, each) for each in (decorated, Trains, InContext)), (decorated, InContext), (InContext, decorated)],
)
@pytest.mark.parametrize(
    ("precisions", "error"), [(("bf16", 32), None), ((32, "bf16"), None), (("bf16", "bf16"), LookupError)]
)
def test_run_within_a_run_leaves_the_outer_one_at_work(entry, inner, job, precisions, error):
    def within(*parts):
        seen.append(state(*parts))
        if error:
            raise error

    def loop(*parts):
        try:
            inner(within, precision=precisions[1], verbose=False)(*parts)
        except LookupError:
            assert error
        return trained(*parts)

    seen = []
    assert entry(loop, precision=precisions[0], verbose=False)(*job) == (precisions[0] == "bf16", True)
    assert seen == [(True, True)]


@EXPLICIT
@pytest.mark.parametrize("options", [{}, {"fused_optimizer": True, "fast_fetch": True}], ids=["auto", "asked for"])
def test_run_that_calls_itself(entry, job, options):
    def loop(*parts):
        before = state(*parts)
        if len(seen) < 2:
            seen.append(before)
            train(*parts)
        seen.append(trained(*parts))
        return before

    seen, train = [], entry(loop, precision="bf16", verbose=False, **options)
    assert train(*job) == (True, True)
    assert seen == [(True, True)] * 5


OPTIONS_OF_REPORTS = [
    {"precision": "bf16", "channels_last": True, "timeout": 3, "bf16_ops": []},
    {"compile": {"backend": "eager", "dynamic": False}},
    {"compile": {"backend": lambda graph, inputs: graph.forward}},
]


@EXPLICIT
@pytest.mark.parametrize("options", OPTIONS_OF_REPORTS, ids=["plain", "compile", "own backend"])
def test_report_s_dict_is_json(entry, job, options):
    train = entry(lambda *_: None, num_processes=1, verbose=False, **options)
    train(*job)
    found = train.report.as_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["options"]["num_processes"] == 1
    assert {each["status"] for each in found["results"]} <= {"applied", "skipped"}


@EXPLICIT
def test_report_is_none_before_the_first_call_and_the_last_calls_after(entry, job):
    train, other = entry(fit, precision="bf16", verbose=False), entry(fit, verbose=False)
    assert train.report is None
    train(*job)
    assert other.report is None
    other(*job)
    assert "precision" not in other.report.applied
    first = train.report
    assert isinstance(first, SetupReport)
    assert {"precision", "fused_optimizer", "fast_fetch"} <= {*first.applied}
    train(*make()[:2])
    assert train.report is not first
    assert first["fast_fetch"].status == "applied"
    assert "fast_fetch" not in (*train.report.applied, *train.report.skipped)  # no loader was passed


@EXPLICIT
def test_report_is_printed_once_to_standard_error_and_again_for_other_objects(entry, job, capfd):
    train = entry(fit, precision="bf16", fast_dropout=False)
    model, optimizer, loader = make(optimizer=torch.optim.SGD)
    train(*job)
    for parts in ((model, optimizer, loader), job):
        capfd.readouterr()
        train(*parts)
        out, err = capfd.readouterr()
        assert (out, err) == ("", f"{train.report}\n")
        title, *lines = err.splitlines()
        assert title.startswith("nano_loop ")
        assert " process × " in title
        assert all(line.startswith(("  applied  ", "  skipped  ", "  measured  memory  ", *IDLE)) for line in lines)
        assert len({line.split()[1] for line in lines}) == len(lines) > 3
        train(*parts)
        assert capfd.readouterr() == ("", "")
    assert train.report["fused_optimizer"].detail == "AdamW", "the object is there after each call"
    entry(fit, precision="bf16", verbose=False)(model, optimizer, loader)
    assert capfd.readouterr() == ("", "")


def generate():
    yield


async def wait():
    """Do nothing, asynchronously."""


async def generate_later():
    yield


class Generates:
    def __call__(self):
        yield


#: What has not trained when its call returns, or cannot be called at all, and how the error names it.
NO_LOOPS = [
    ("a class", Net),
    *(("a generator function", each) for each in (generate, functools.partial(generate), Generates())),
    ("a generator function", classmethod(generate)),
    *(("an async function", each) for each in (wait, functools.partial(wait))),
    ("an async generator function", generate_later),
    ("a str", "train"),
    ("a NoneType", None),
    ("a int", 3),
    ("a model", nn.Linear(1, 1)),
]
DEFINE = {
    "bare": nano,
    "empty": nano(),
    "options": nano(precision="bf16"),
    "class": lambda train: type("Mine", (TorchNano,), {"train": train}),
}


@pytest.mark.parametrize(("told", "train"), NO_LOOPS)
@pytest.mark.parametrize("way", DEFINE)
def test_what_cannot_train_is_told_when_it_is_defined(way, told, train):
    if way == "bare" and not callable(train):
        return  # it is interpreted as the number of processes
    with pytest.raises(NanoConfigError, match=rf"is {told}: .+ plain function") as caught:
        DEFINE[way](train)
    assert str(caught.value).startswith("Mine.train is ") == (way == "class")
    assert ("yield" in str(caught.value)) == (told == "a generator function")
