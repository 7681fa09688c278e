"""Run a script, and write the memory of its parameters, gradients and optimizers to a file, in bytes.

python -m benchmarks.watched memory.json examples/digits.py --epochs 1
"""

from __future__ import annotations

import json
import resource
import runpy
import sys
from pathlib import Path

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

#: After this step, an optimizer's state is complete.
_STEP = 2


class Memory:
    """The memory of the optimizer that runs the second step of the process, after that step."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self._steps = 0

    def note(self, optimizer: Optimizer, *_: object) -> None:
        """Count a step. This is an optimizer hook."""
        self._steps += 1
        if self._steps == _STEP:
            held = [each for group in optimizer.param_groups for each in group["params"]]
            state = [each for values in optimizer.state.values() for each in values.values()]
            self.found["parameters"] = sum(each.nbytes for each in held)
            self.found["gradients"] = sum(each.grad.nbytes for each in held if each.grad is not None)
            self.found["state"] = sum(each.nbytes for each in state if isinstance(each, Tensor))


def main(file: str, script: str, *given: str) -> None:
    memory = Memory()
    handle = register_optimizer_step_post_hook(memory.note)
    sys.argv = [script, *given]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        handle.remove()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    Path(file).write_text(json.dumps({**memory.found, "resident": resident}))


if __name__ == "__main__":
    main(*sys.argv[1:])
