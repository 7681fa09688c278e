"""Compiles functions as Inductor does up to its own code, which takes a C++ compiler and seconds."""

import torch
from functorch.compile import make_boxed_func

from nano_loop.compile.graphs import keeping


def compiled(function, names, seen=None, **arguments):
    """Compile a function with these operators kept whole; `seen` gets the operators of each graph."""
    replace = keeping(names)

    def backend(module, inputs):
        replace(module.graph)
        module.recompile()
        return torch._dynamo.backends.common.aot_autograd(fw_compiler=note, bw_compiler=note)(module, inputs)

    def note(module, inputs):
        if seen is not None:
            seen.extend(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return make_boxed_func(module.forward)

    return torch.compile(function, backend=backend, **arguments)
