"""The plan of a pipeline follows from the current state of its transforms."""

import pytest

transforms = pytest.importorskip("torchvision.transforms")

from torchvision import models  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

from nano_loop.data.images.pipelines import plan_of  # noqa: E402


class Doubled(transforms.Normalize):
    """Is unknown, like any subclass."""


class Unsaid:
    """Its `repr` is incomplete."""


def pipeline():
    steps = [transforms.Resize([8, 8]), transforms.RandomCrop(6), transforms.ToTensor()]
    return transforms.Compose([*steps, transforms.Normalize([0.1, 0.2, 0.3], [1.0, 1.0, 1.0])])


def names(parts):
    return [type(part).__name__ for part in parts]


def test_first_transforms_and_the_end_are_those_that_are_known():
    plan = plan_of(pipeline())
    assert [names(plan.first), names(plan.middle)] == [["Resize"], ["RandomCrop"]]
    assert names(plan.end) == ["ToTensor", "Normalize"]


CHANGES = {
    "size": lambda pipe: setattr(pipe.transforms[0], "size", [10, 10]),
    "size in place": lambda pipe: pipe.transforms[0].size.__setitem__(0, 10),
    "hook": lambda pipe: pipe.transforms[0].register_forward_hook(lambda *_: None),
    "forward": lambda pipe: setattr(pipe.transforms[0], "forward", lambda image: image),
    "class": lambda pipe: setattr(pipe.transforms[3], "__class__", Doubled),
    "means of a kind that is not known": lambda pipe: setattr(pipe.transforms[3], "mean", [Unsaid()] * 3),
    "means of another number": lambda pipe: setattr(pipe.transforms[3], "mean", [0.1]),
    "another attribute": lambda pipe: setattr(pipe.transforms[0], "more", 1),
    "an attribute that is not known": lambda pipe: setattr(pipe.transforms[0], "more", Unsaid()),
    "another transform": lambda pipe: pipe.transforms.__setitem__(0, transforms.Resize([9, 9])),
    "another random transform": lambda pipe: pipe.transforms.__setitem__(1, transforms.RandomCrop(6)),
    "one less": lambda pipe: pipe.transforms.pop(),
    "one more": lambda pipe: pipe.transforms.insert(0, transforms.RandomRotation(3)),
    "all": lambda pipe: setattr(pipe, "transforms", [transforms.CenterCrop(4), transforms.ToTensor()]),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_of_a_pipeline_changes_its_plan(change):
    pipe = pipeline()
    before = plan_of(pipe)
    assert plan_of(pipe) == before
    change(pipe)
    assert plan_of(pipe) != before


def test_transform_of_both_versions_that_differs_in_its_pixels_has_another_key():
    keys = [plan_of(module.Compose([module.Resize(8)])).key for module in (transforms, v2)]
    assert len({*keys, plan_of(v2.Compose([v2.Resize(9)])).key}) == 3


def test_weights_have_the_transforms_of_their_preset():
    plan = plan_of(models.ResNet18_Weights.DEFAULT.transforms())
    assert names(plan.first) == ["Resize", "CenterCrop"]


def test_what_is_no_pipeline_has_no_plan():
    hooked = v2.Compose([v2.Resize(8)])
    hooked.register_forward_hook(lambda *_: None)
    generator = transforms.Compose(iter([transforms.Resize(8)]))
    assert [plan_of(each) for each in (None, transforms.Resize(8), hooked, generator)] == [None] * 4
