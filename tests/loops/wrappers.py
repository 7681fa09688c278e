"""Wrappers of optimizers as written in public code; three of the four do not call ``Optimizer.__init__``."""

from collections import OrderedDict, defaultdict

import torch
from torch.optim import Optimizer


class AcceleratedOptimizer(Optimizer):
    """As in Accelerate: every attribute is a property over the wrapped optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def state(self):
        return self.optimizer.state

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def defaults(self):
        return self.optimizer.defaults

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none=None):
        self.optimizer.zero_grad()

    def step(self, closure=None):
        self.optimizer.step(closure)


class Lookahead(Optimizer):
    """As in the many copies of lonePatient's: the slow weights are separate from the inner optimizer's state."""

    def __init__(self, optimizer, k=2, alpha=0.5):
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults
        self.state = optimizer.state
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def zero_grad(self, set_to_none=True):  # Optimizer's method needs attributes set in Optimizer.__init__
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return self.optimizer.state_dict()

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for group, slows in zip(self.param_groups, self.slow, strict=True):
                for p, slow in zip(group["params"], slows, strict=True):
                    slow.add_(p.detach() - slow, alpha=self.alpha)
                    p.data.copy_(slow)
        return loss


class TimmLookahead(Optimizer):
    """As in timm: the dicts of hooks exist, but torch never calls them."""

    def __init__(self, base_optimizer, alpha=0.5, k=2):
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._optimizer_state_dict_pre_hooks = OrderedDict()
        self._optimizer_state_dict_post_hooks = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        self._optimizer_load_state_dict_post_hooks = OrderedDict()
        self._base_optimizer = base_optimizer
        self.param_groups = base_optimizer.param_groups
        self.defaults = {**base_optimizer.defaults, "lookahead_k": k, "lookahead_alpha": alpha}
        self.state = defaultdict(dict)
        for group in self.param_groups:
            group.update(lookahead_step=0, lookahead_k=k, lookahead_alpha=alpha)

    @torch.no_grad()
    def step(self, closure=None):
        loss = self._base_optimizer.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % group["lookahead_k"] == 0:
                self.update_slow(group)
        return loss

    def update_slow(self, group):
        for p in group["params"]:
            if p.grad is not None:
                slow = self._base_optimizer.state[p].setdefault("lookahead_slow_buff", p.clone())
                slow.add_(p - slow, alpha=group["lookahead_alpha"])
                p.copy_(slow)

    def zero_grad(self, set_to_none=True):
        self._base_optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return self._base_optimizer.state_dict()


class Rescaled(Optimizer):
    """As in SAM: ``Optimizer.__init__`` is called, and the base optimizer shares the groups."""

    def __init__(self, params, base_optimizer, **options):
        super().__init__(params, options)
        self.base_optimizer = base_optimizer(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.dim() > 1:
                    p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
        return self.base_optimizer.step(closure)


WRAPPERS = {
    "accelerated": lambda p: AcceleratedOptimizer(torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "lookahead": lambda p: Lookahead(torch.optim.AdamW(p, lr=0.01)),
    "timm_lookahead": lambda p: TimmLookahead(torch.optim.AdamW(p, lr=0.01)),
    "rescaled": lambda p: Rescaled(p, torch.optim.SGD, lr=0.1, momentum=0.9),
    "wrapped_twice": lambda p: AcceleratedOptimizer(Lookahead(torch.optim.SGD(p, lr=0.1))),
}
