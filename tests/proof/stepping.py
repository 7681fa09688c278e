"""Optimizers over several steps, with actions of programs between them."""

import copy

import torch
from torch import nn

from proof.program import Program

_STEPS = 5
#: Actions of a program other than stepping: adding a group and changing settings; loading a state of another layout;
#: missing gradients and frozen parameters; schedulers; closures; clipping, and assigned gradients; and sparse gradients
#: or complex parameters, if the optimizer supports them.
SCENARIOS = ("plain", "groups", "loaded", "missing", "scheduled", "closures", "clipped", "sparse", "complex")


class Targets(nn.Module):
    """Parameters of several shapes and layouts; the loss is their squared distance from individual targets."""

    def __init__(self, only_matrices, sparse, is_complex, in_order):
        super().__init__()
        self.words = nn.Embedding(12, 4, sparse=sparse)
        if not sparse:
            self.linear, self.matrix = nn.Linear(5, 37, bias=not only_matrices), nn.Parameter(torch.randn(300, 7))
        if not sparse and not only_matrices:
            self.image = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
            self.number, self.large = nn.Parameter(torch.randn(())), nn.Parameter(torch.randn(1111))
            self.transposed = nn.Parameter(torch.randn(6, 9).t())
        if in_order:  # LBFGS flattens all into one vector
            for value in self.parameters():
                value.data = value.data.contiguous()
        if is_complex:
            self.complex = nn.Parameter(torch.randn(4, 5, dtype=torch.complex64))

    def forward(self, step, missing):
        loss = self.words(torch.tensor([[1, 5, step % 3]])).square().sum()
        for number, (name, value) in enumerate(self.named_parameters()):
            if name != "words.weight" and number not in missing:
                target = torch.linspace(-2, 2, value.numel(), dtype=value.dtype).view(value.shape) / (step + 2)
                loss = loss + ((value - target) * (value - target).conj()).real.sum() / 2
        return loss


class Stepping(Program):
    """Several steps of one optimizer of the database, in one of `SCENARIOS`."""

    def __init__(self, info, settings, scenario):
        self.info, self.settings, self.scenario = info, settings, scenario
        sparse = info.only_supports_sparse_grads or (scenario == "sparse" and info.supports_sparse)
        is_complex = scenario == "complex" and info.supports_complex
        only_matrices, in_order = info.optim_cls.__name__ == "Muon", info.step_requires_closure
        super().__init__(Targets(only_matrices, sparse, is_complex, in_order))

    def optimizers(self):
        """Return the optimizer."""
        groups = [*self.model.parameters()]
        if self.scenario == "groups" and len(groups) > 2:
            groups = [{"params": groups[:1], "lr": 0.003}, {"params": groups[1:-1]}]
        return [self.info.optim_cls(groups, **copy.deepcopy(self.settings))]

    def run(self, optimizers, around, record):
        """Step, and record losses, gradients and parameters of each step."""
        [optimizer], parameters, scenario = optimizers, [*self.model.parameters()], self.scenario
        schedulers = [make(optimizer) for make in self.info.scheduler_inputs[-1] if scenario == "scheduled"]
        for step in range(_STEPS):
            if scenario == "groups" and step == 2 and len(parameters) > 2:
                optimizer.add_param_group({"params": parameters[-1:], "lr": 0.02})
                optimizer.param_groups[0]["lr"] = 0.001
            if scenario == "loaded" and step == 1:
                kept = copy.deepcopy(optimizer.state_dict())
            if scenario == "loaded" and step == 3:
                for state in kept["state"].values():
                    state.update({name: value.contiguous() for name, value in state.items() if torch.is_tensor(value)})
                optimizer.load_state_dict(kept)
            parameters[0].requires_grad_(scenario != "missing" or step < 3 or len(parameters) < 2)

            missing = {1: (0, 1), 3: (2,)}.get(step, ()) if scenario == "missing" else ()

            def closure(missing=missing, step=step):
                optimizer.zero_grad()
                with around():
                    loss = self.model(step, missing)
                loss.backward()
                return loss

            if self.info.step_requires_closure or scenario == "closures":
                loss = optimizer.step(closure)
            else:
                loss = closure()
                if scenario == "clipped":
                    nn.utils.clip_grad_norm_(parameters, 1.0)
                    for value in parameters:
                        if step == 2 and value.dim() == 2 and value.grad.layout is torch.strided:
                            value.grad = value.grad.t().contiguous().t()
                optimizer.step()
            for scheduler in schedulers:
                scheduler.step(*[1.0] * isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau))
            record("outputs", [loss, *parameters])
            record("gradients", [value.grad for value in parameters])
