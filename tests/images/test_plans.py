"""The plan of a pipeline is kept until anything of its transforms changes, and what is kept is what is read anew."""

import copy
import pickle

import pytest
import torch

transforms = pytest.importorskip("torchvision.transforms")

from torchvision.transforms import v2  # noqa: E402

from nano_loop.images.pipelines import Plans, plan_of  # noqa: E402


class Doubled(transforms.Normalize):
    """Is not understood, as any subclass."""


def pipeline():
    steps = [transforms.Resize([8, 8]), transforms.RandomCrop(6), transforms.ToTensor()]
    return transforms.Compose([*steps, transforms.Normalize([0.1, 0.2, 0.3], [1.0, 1.0, 1.0])])


CHANGES = {
    "size": lambda pipe: setattr(pipe.transforms[0], "size", [10, 10]),
    "size in place": lambda pipe: pipe.transforms[0].size.__setitem__(0, 10),
    "mean in place": lambda pipe: pipe.transforms[3].mean.__setitem__(0, 0.5),
    "hook": lambda pipe: pipe.transforms[0].register_forward_hook(lambda *_: None),
    "forward": lambda pipe: setattr(pipe.transforms[0], "forward", lambda image: image),
    "call": lambda pipe: setattr(pipe.transforms[2], "__call__", lambda image: image),
    "class": lambda pipe: setattr(pipe.transforms[3], "__class__", Doubled),
    "another attribute": lambda pipe: setattr(pipe.transforms[0], "more", 1),
    "another transform": lambda pipe: pipe.transforms.__setitem__(0, transforms.Resize([9, 9])),
    # Another object may be asked for its state.
    "an equal transform": lambda pipe: pipe.transforms.__setitem__(1, transforms.RandomCrop(6)),
    "one less": lambda pipe: pipe.transforms.pop(),
    "one more": lambda pipe: pipe.transforms.insert(0, transforms.RandomRotation(3)),
    "all": lambda pipe: setattr(pipe, "transforms", [transforms.CenterCrop(4), transforms.ToTensor()]),
}


def as_text(plan):
    """Return all of a plan; transforms that are not in it as one of the deterministic ones count by their place."""
    return [*map(id, plan.transforms)], plan[1:]


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_of_a_pipeline_is_noticed(change):
    plans, pipe = Plans(), pipeline()
    before = plans.of(pipe)
    assert plans.of(pipe) is before
    change(pipe)
    after = plans.of(pipe)
    assert as_text(after) == as_text(plan_of(pipe))
    assert as_text(after) != as_text(before)


def test_pipelines_of_the_second_version_are_kept_too():
    plans = Plans()
    pipe = v2.Compose([v2.Resize(8), v2.RandomCrop(6), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    before = plans.of(pipe)
    assert plans.of(pipe) is before
    pipe.transforms[0].antialias = False
    assert as_text(plans.of(pipe)) == as_text(plan_of(pipe)) != as_text(before)


def test_what_could_change_deeper_inside_is_read_each_time():
    plans, pipe = Plans(), pipeline()
    pipe.transforms[0].size = [[8], [8]]
    before = plans.of(pipe)
    pipe.transforms[0].size[0][0] = 9
    assert as_text(plans.of(pipe)) == as_text(plan_of(pipe)) != as_text(before)


def test_attribute_that_cannot_be_compared_is_read_each_time():
    plans, pipe = Plans(), pipeline()
    pipe.transforms[1].weights = torch.ones(3)
    before = plans.of(pipe)
    assert plans.of(pipe) is before
    pipe.transforms[1].weights = torch.ones(3)
    assert as_text(plans.of(pipe)) == as_text(before)


def test_transform_without_attributes_is_read_each_time():
    plans, pipe = Plans(), pipeline()
    pipe.transforms.insert(0, object())  # such as a function of compiled code
    assert as_text(plans.of(pipe)) == as_text(plan_of(pipe))


def test_plans_go_to_another_process_and_hold_no_more_than_some():
    plans = Plans()
    pipes = [pipeline() for _ in range(40)]
    for pipe in pipes:
        plans.of(pipe)
    assert len(plans._read) <= 16
    assert as_text(plans.of(pipes[-1])) == as_text(plan_of(pipes[-1]))
    assert len(pickle.loads(pickle.dumps(plans))._read) == len(copy.copy(plans)._read)


def test_what_is_no_pipeline_has_no_plan():
    assert Plans().of(torch.nn.Identity()) is None
