"""Modes, dtypes and threads: changes that affect the process, or the whole model."""

import functools
import warnings
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .table import row


@contextmanager
def until_undone(setter, value, before):
    setter(value)
    try:
        yield
    finally:
        setter(before)


# --- modes ---


@row()
def evaluation_mode(program):
    program.model.eval()
    program.undo.callback(program.model.train)
    evaluate = program.evaluate
    program.set(program, evaluate=lambda: (evaluate(), program.model.eval()))


@row()
def evaluation_mode_of_layers(program):
    """Frozen norms and no dropout, as in fine-tuning; calls of ``train`` have no effect."""
    model = program.model
    for module in (model.batch_norm, model.mlp[1], model.dropout, model.gru):
        module.eval()
        program.set(module, train=lambda mode=True, module=module: module)


@row(is_seen=False)
def deterministic(program):
    program.within(until_undone(torch.use_deterministic_algorithms, True, False))


@row()
def calls_without_gradients_between_steps(program):
    for mode in (torch.inference_mode, torch.no_grad, torch.no_grad):
        with mode():
            program.seen.append(program.call(*program.samples).clone())


@row(is_seen=False)
def anomaly_detection(program):
    program.within(torch.autograd.set_detect_anomaly(True, check_nan=True))


@row(is_seen=False)
def kernels_of_torch_turned_off(program):
    program.within(sdpa_kernel(SDPBackend.MATH))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warning names its flag for GPUs
        program.within(torch.backends.mkldnn.flags(enabled=False))


class Counting(TorchFunctionMode):
    """Halves ReLUs, and counts all calls."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function in (torch.relu, F.relu, F.batch_norm, F.layer_norm, F.cross_entropy):
            self.called.append(function.__name__)
            return 0.5 * out
        return out


@row()
def a_mode_of_functions(program):
    mode = program.within(Counting())
    program.seen.append(mode.called)


class Noting(TorchDispatchMode):
    """Halves means over dimensions, and leaves other functions unchanged."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        return 0.5 * out if function is torch.ops.aten.mean.dim else out


@row()
def a_mode_of_operators(program):
    program.within(Noting())


@row()
def called_with_other_weights(program):
    """Calls by `torch.func.functional_call`, as in meta-learning."""
    model = program.model

    def call(*batch):
        weights = {name: 0.9 * parameter for name, parameter in model.named_parameters()}
        return torch.func.functional_call(model, weights, batch)

    program.set(program, call=program.by_hand(call))


@row()
def gradients_of_gradients(program):
    """A penalty on the gradient of a layer's weight."""

    def loss(out, targets):
        entropy = F.cross_entropy(out, targets)
        slopes = torch.autograd.grad(
            entropy, [program.model.head.weight, program.model.mlp[0].weight], create_graph=True
        )
        return entropy + sum(slope.square().sum() for slope in slopes)

    program.set(program, loss=loss)


# --- losses ---


@row()
def another_loss(program):
    weights = torch.linspace(0.5, 1.5, 12)
    program.set(program, loss=functools.partial(F.cross_entropy, weight=weights, label_smoothing=0.1, ignore_index=3))


# --- dtypes ---


@row()
def double(program):
    """The model and its data are in fp64 for two steps."""
    call = program.call
    program.set(program, call=lambda images, words: call(images.double(), words))
    converted(program, "double")
    program.undo.callback(converted, program, "float")


def converted(program, dtype):
    """Convert the model, and the optimizers' states as torch does when it loads them."""
    getattr(program.model, dtype)()
    for optimizer in program.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())


@row()
def inputs_of_another_dtype(program):
    """torch rejects them, and the loop must get the same message."""
    call = program.call
    program.set(program, call=lambda images, words: call(images.double(), words))


@row(is_seen=False)
def default_dtype(program):
    program.within(until_undone(torch.set_default_dtype, torch.float64, torch.float32))


# --- threads ---


@row(is_seen=False)
def threads(program):
    program.within(until_undone(torch.set_num_threads, 1, torch.get_num_threads()))
