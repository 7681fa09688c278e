"""One model with each optimizer."""

import torch
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop

from .pairs import BF16, CONVOLUTIONS, EXACT, FP64, pair
from .tasks import ConvNet, Lion, fit, images, job
from .wrappers import WRAPPERS


class SignedSGD(SGD):
    """A user-defined optimizer that derives from one of torch's."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.sign_()
        return super().step(closure)


def made(cls, **options):
    return lambda parameters: cls(parameters, **options)


def grouped(parameters):
    first, second, *rest = parameters
    groups = [
        {"params": [first], "lr": 0.05},
        {"params": [second], "weight_decay": 0.1, "fused": False},
        {"params": rest, "betas": (0.8, 0.99), "foreach": True},
    ]
    return AdamW(groups, lr=0.01)


OPTIMIZERS = {
    "sgd": made(SGD, lr=0.1),
    "momentum": made(SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": made(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "maximize": made(SGD, lr=0.001, momentum=0.9, maximize=True),
    "adam": made(Adam, lr=0.01),
    "amsgrad": made(Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adamw": made(AdamW, lr=0.01),
    "tensor_lr": lambda parameters: Adam(parameters, lr=torch.tensor(0.01)),
    "foreach": made(AdamW, lr=0.01, foreach=True),
    "for_loop": made(AdamW, lr=0.01, foreach=False),
    "adagrad": made(Adagrad, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "rmsprop": made(RMSprop, lr=0.01, momentum=0.9, centered=True),
    "adadelta": made(Adadelta),
    "adamax": made(Adamax, lr=0.01),
    "nadam": made(NAdam, lr=0.01),
    "radam": made(RAdam, lr=0.01),
    "asgd": made(ASGD, lr=0.1),
    "param_groups": grouped,
    "own": made(Lion),
    "own_subclass": made(SignedSGD, lr=0.01),
    **WRAPPERS,
}


#: One optimizer for each way in which states are converted to fp64 and back.
IN_FP64 = ("momentum", "amsgrad", "adagrad", "param_groups", "own", "lookahead", "rescaled")
test_one_model_and_one_optimizer = pair(
    *(job(name, optimizer=OPTIMIZERS[name]) for name in IN_FP64), kernels_in_bf16=True
)(fit)
test_one_model_and_another_optimizer = pair(
    *(job(name, optimizer=OPTIMIZERS[name]) for name in OPTIMIZERS if name not in IN_FP64), repeats=[BF16, FP64]
)(fit)


def convolutional(name):
    return job(name, model=ConvNet, optimizer=OPTIMIZERS[name], loader=images)


# Adagrad has its state before any step, so the state exists when the layout changes.
FIRST = map(convolutional, ("momentum", "adam", "adagrad"))
test_a_convolutional_model = pair(*FIRST, configs=CONVOLUTIONS)(fit)
FUSED_BY_THE_USER = job("user_asked_for_fused", optimizer=made(Adam, lr=0.01, fused=True))
test_a_user_who_asked_for_fused_keeps_it = pair(FUSED_BY_THE_USER, configs=[EXACT])(fit)
