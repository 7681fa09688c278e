"""The kernels that optimizers of libraries call."""

import nano_loop.optimizers.library_steps as module


def noted_kernels(monkeypatch):
    """Return a list of the names of the kernels that are called from now on."""
    calls = []

    def noting(name):
        kernel = getattr(module, name)

        def call(*args, **kwargs):
            calls.append(name)
            return kernel(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    noting("fused_adam")
    noting("fused_sgd")
    return calls
