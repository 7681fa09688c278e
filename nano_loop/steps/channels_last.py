"""Converts images to NHWC (and volumes to NDHWC), the native memory format of oneDNN's convolutions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from nano_loop.kernels.bernoulli import same_draws
from nano_loop.kernels.convolution import pixel_means
from nano_loop.kernels.drawing_order import drawn_as_nchw, in_call, is_converted, mark
from nano_loop.kernels.memory import NHWC
from nano_loop.patching.attributes import replaced
from nano_loop.patching.calls.calls import Call
from nano_loop.patching.lifetime import undone_with
from nano_loop.patching.members import buffers_of, has_shape, parameters_of, shaped
from nano_loop.patching.nested_tensors import Substitution
from nano_loop.patching.operators import gives_kernels
from nano_loop.patching.ownership import call_state
from nano_loop.patching.patch_table import process_wide
from nano_loop.patching.torch_private import in_functorch
from nano_loop.runtime.objects.called_functions import names_called
from nano_loop.runtime.objects.report import StepResult
from nano_loop.runtime.objects.training_objects import TrainingObjects, class_names
from nano_loop.steps.layout_trial import LayoutTrial
from nano_loop.steps.step import ABSENT, SkipReason, Step

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d, nn.ConvTranspose3d)

#: The ids of the convolutions of set-up models.
_converting: set[int] = process_wide("convolutions in NHWC, by id", set())


class ChannelsLast(Step):
    """Converts the inputs of the model, and of each of its convolutions, to NHWC.

    The weights keep their layout. oneDNN reorders them for each convolution in any case, and the result is bitwise
    identical, in the same layout.

    The outputs of the model have the strides of the plain loop. Inside the model, `Tensor.view` is replaced: the
    common `x.view(batch, -1)` after a convolution needs the strides of NCHW, so on NHWC strides it falls back to
    `reshape`. Group norms in which only the weights require gradients get their input in NCHW.

    With ``"auto"``, a model starts in NHWC in reduced precision, and otherwise in NCHW. Before the first step of an
    optimizer, rank 0 times both layouts, and all ranks continue with the faster one.
    """

    name = "channels_last"
    required = False  # the option applies to all models of a run, and one of them may have no convolution
    harmless = frozenset(("no_images",))

    @override
    def begin(self) -> None:
        self._trials: list[LayoutTrial] = []
        self._chosen: list[tuple[int, bool]] = []  # the indices of trials, and whether NHWC was faster
        self._draws: list[None] = []  # contexts that are entered for models in NHWC

    @override
    def skip_reason(self, parts: TrainingObjects) -> SkipReason | None:
        models = _unscripted(parts)
        if parts.models and not models:
            return SkipReason("scripted", "the model is scripted, so its convolutions and views cannot be changed")
        if not any(map(takes_images, models)):
            return SkipReason("no_images", "the model has no layers for images", ABSENT)
        parameters = itertools.chain.from_iterable(map(parameters_of, models))
        has_weights = any(not has_shape(parameter) or parameter.dim() in NHWC for parameter in parameters)
        if has_weights or self.options.channels_last is True:  # pooling layers take images and have no weights
            return None
        return SkipReason("no_images", "the model has no 4-D or 5-D parameters", ABSENT)

    @override
    def apply(self, parts: TrainingObjects) -> str:
        self.undoing.enter_context(replaced(Tensor, "view", _view_or_reshape))
        self.undoing.enter_context(replaced(torch, "group_norm", _in_nchw_without_gradient))
        for convolution in _CONVOLUTIONS:
            self.undoing.enter_context(replaced(convolution, "forward", _converting_its_input))
        for means in pixel_means.OVERRIDES * gives_kernels():
            self.undoing.enter_context(means.in_force())
        models = _unscripted(parts)
        if self.options.channels_last == "auto":
            for model in models:
                self._open_trial(model)
            return "the faster layout, timed after the first batch"
        count = sum(self._set_layout(model, to_nhwc=True) for model in models)
        parameters = itertools.chain.from_iterable(map(parameters_of, parts.models))
        inputs = " and ".join(f"{dimension}-D" for dimension in sorted(_converted(parameters)))
        return f"{count or 'no'} convolution{'s' * (count != 1)}, {inputs} inputs"

    def _set_layout(self, model: nn.Module, to_nhwc: bool) -> int:
        """Make a model compute in NHWC or NCHW from now on, and return its number of convolutions."""
        convolutions = [module for module in model.modules() if isinstance(module, _CONVOLUTIONS)]
        channels = frozenset(convolution.in_channels for convolution in convolutions)
        wrapper = _converting_inputs(_converted(parameters_of(model)), channels) if to_nhwc else _as_they_are
        self.interceptors.add(model, self.name, wrapper)
        # Before torch 2.9, tensors are not marked as NHWC in the plain loop. We assume it if weights are NHWC.
        by_the_user = not gives_kernels() and any(map(_is_nhwc, shaped(parameters_of(model))))
        if to_nhwc and not self._draws and not by_the_user:
            self._draws = [self.undoing.enter_context(context()) for context in (drawn_as_nchw, same_draws)]
        for convolution in convolutions:
            if to_nhwc and id(convolution) not in _converting:
                undone_with(convolution, self.undoing).callback(_converting.discard, id(convolution))
                _converting.add(id(convolution))
            elif not to_nhwc:
                _converting.discard(id(convolution))
        return len(convolutions)

    def _open_trial(self, model: nn.Module) -> None:
        if any(trial.model() is model for trial in self._trials):
            return
        trial = LayoutTrial(model, self.options, self.accelerated)
        if self.ranks.rank == 0 and trial.recorded is not None:
            undone_with(model, self.undoing).callback(trial.recorded.end)
            self.interceptors.add(model, f"{self.name} trial", trial.recorded.layer)  # outside the conversion
        self._set_layout(model, trial.guess)
        if not self._trials:
            self.undoing.callback(self.clock.before(self._time))
        if not self._trials and self.ranks.size > 1:
            self.ranks.context.after_averaging.append(self._share)
            self.undoing.callback(self.ranks.context.after_averaging.remove, self._share)
        self._trials.append(trial)

    def _time(self, *_: object) -> None:
        """Time both layouts of the models whose outputs received gradients."""
        models = [model for trial in self._trials if (model := trial.model()) is not None]
        for place, trial in enumerate(self._trials):
            in_nhwc = trial.run(itertools.chain(*([*parameters_of(model), *buffers_of(model)] for model in models)))
            if in_nhwc is not None:
                self._chosen.append((place, in_nhwc))
        if self.ranks.size == 1:
            self._adopt(self._chosen)
            self._chosen = []

    def _share(self, averagings: int) -> None:
        """Adopt rank 0's choices after gradient averagings 1, 2, 4, 8, … Collective."""
        if averagings.bit_count() == 1:
            self._adopt(self.ranks.broadcast(self._chosen))
            self._chosen = []

    def _adopt(self, chosen: Iterable[tuple[int, bool]]) -> None:
        for place, in_nhwc in chosen:
            model = self._trials[place].model()
            if model is not None:
                self._set_layout(model, in_nhwc)

    @override
    def final_result(self) -> StepResult | None:
        """Return the step time in each layout, or why it was not measured."""
        words = dict.fromkeys(str(trial) for trial in self._trials)
        return StepResult(self.name, "measured", "; ".join(words)) if words else None


def _unscripted(parts: TrainingObjects) -> list[nn.Module]:
    return [model for model in parts.models if not isinstance(model, torch.jit.ScriptModule)]


def takes_images(model: nn.Module) -> bool:
    """Whether the name of a layer, or of a function that the model calls, refers to images or volumes."""
    names = class_names(model.modules()) | names_called(model)
    return any(word in name.lower() for name in names for word in ("2d", "3d", "convolution", "interpolate", "pixel_"))


def _converted(parameters: Iterable[nn.Parameter]) -> frozenset[int]:
    """Return the dimensionalities of converted inputs: those of the parameters, or of all images."""
    formats = frozenset(NHWC)
    return frozenset(parameter.dim() for parameter in shaped(parameters)) & formats or formats


def in_channels_last(tensor: Tensor) -> Tensor:
    """Return a 4-D or 5-D tensor with NHWC or NDHWC strides: the tensor itself, a view if possible, or a copy."""
    if in_functorch() or type(tensor) not in (Tensor, nn.Parameter):  # batched tensors have no strides
        return tensor
    if tensor.size(1) == 1 and tensor.is_contiguous():
        # A tensor with one channel has both layouts. A convolution returns NHWC only if the strides are NHWC strides.
        return tensor.reshape(tensor.size(0), *tensor.shape[2:], 1).movedim(-1, 1)
    return tensor.contiguous(memory_format=NHWC[tensor.dim()])


def _in_plain_layout(tensor: Tensor) -> Tensor:
    """Convert an output that is NHWC only because of the conversion to the layout of the plain loop."""
    is_ours = tensor.dim() in NHWC and _is_nhwc(tensor) and (torch.compiler.is_compiling() or is_converted(tensor))
    return tensor.contiguous() if is_ours else tensor


def _is_nhwc(tensor: Tensor) -> bool:
    """Whether channels, the first or second dimension, are innermost in memory, followed by two or more of pixels."""
    if tensor.layout is not torch.strided or in_functorch():
        return False
    strides = tensor.stride()
    for channels in range(min(2, len(strides) - 2)):
        behind = zip(strides[channels + 1 :], tensor.shape[channels + 1 :], strict=True)
        pixels = [stride for stride, size in behind if size != 1]
        falling = all(one >= other for one, other in itertools.pairwise(pixels))
        if strides[channels] < min(pixels, default=0) and falling:
            return True
    return False


def _as_they_are(call: Call) -> Call:
    def unconverted(function: Call, /, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if torch.compiler.is_compiling() else in_call(is_converted=False):
            return call(function, *args, **kwargs)

    return unconverted


def _converting_inputs(dimensions: frozenset[int], channels: frozenset[int]) -> Any:
    """Convert the inputs that a convolution may take. Others, such as images that the model permutes, are unchanged."""

    def convert(tensor: Tensor) -> Tensor:
        images = tensor.dim() in dimensions and tensor.layout is torch.strided and tensor.is_floating_point()
        if not images or (channels and 0 not in channels and tensor.size(1) not in channels):  # 0: not known yet
            return tensor
        return _marked(in_channels_last(tensor), tensor)

    def layer(call: Call) -> Call:
        def with_converted_inputs(function: Call, /, *args: Any, **kwargs: Any) -> Any:
            substitution = Substitution(convert)

            def as_in_the_plain_loop(output: Tensor) -> Tensor:
                original = substitution.original_of(output)  # of a model that returns its input
                return _in_plain_layout(output) if original is None else original

            with nullcontext() if torch.compiler.is_compiling() else in_call(is_converted=True):
                args, kwargs = substitution(args), substitution(kwargs)
                try:
                    return Substitution(as_in_the_plain_loop)(call(function, *args, **kwargs))
                finally:
                    substitution.restore()

        return with_converted_inputs

    return layer


def _converting_its_input(forward: Call) -> Call:
    def convert_and_forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        # Code that depends on the id of a module would be compiled again for each block of a model.
        if (
            call_state.accelerated
            and (torch.compiler.is_dynamo_compiling() or id(self) in _converting)
            and input.dim() in NHWC
        ):
            converted = in_channels_last(input)
            output = forward(self, converted, *args, **kwargs)
            return _marked(output, input, convolution=self)
        return forward(self, input, *args, **kwargs)

    return convert_and_forward


def _marked(output: Tensor, input: Tensor, convolution: nn.Module | None = None) -> Tensor:
    """Mark an output that the plain loop would have in NCHW: as its input, or as the convolution's weight if NHWC."""
    if not (torch.compiler.is_compiling() or in_functorch()):
        also_plainly = convolution is not None and _has_weight_in_nhwc(convolution)
        mark(output, not (also_plainly or (_is_nhwc(input) and not is_converted(input))))
    return output


def _has_weight_in_nhwc(convolution: nn.Module) -> bool:
    """Whether a weight is NHWC. The attribute is not read, which would run parametrizations: spectral norms iterate."""
    return any(map(_is_nhwc, shaped(parameters_of(convolution))))


def _view_or_reshape(view: Call) -> Call:
    def view_or_reshape(self: Tensor, *shape: Any, **kwargs: Any) -> Tensor:
        try:
            viewed: Tensor = view(self, *shape, **kwargs)
            return viewed
        except RuntimeError:
            if (
                not call_state.accelerated
                or not _is_nhwc(self)
                or kwargs
                or not shape
                or isinstance(shape[0], torch.dtype)
            ):
                raise
            return self.reshape(*shape)

    return view_or_reshape


def _in_nchw_without_gradient(group_norm: Call) -> Call:
    """Avoid a crash, in all code: torch's backward of a group norm in NHWC whose input needs no gradient."""

    def norm(input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, *args: Any, **kwargs: Any) -> Tensor:
        trained = any(tensor is not None and tensor.requires_grad for tensor in (weight, bias))
        without_gradient = trained and not input.requires_grad and torch.is_grad_enabled()
        # A channel stride of 1 means NHWC, also for single pixels, which are contiguous in both layouts.
        if without_gradient and input.dim() in NHWC and input.stride(1) == 1 and input.size(1) > 1:
            input = input.clone(memory_format=torch.contiguous_format)
        normed: Tensor = group_norm(input, num_groups, weight, bias, *args, **kwargs)
        return normed

    return norm
