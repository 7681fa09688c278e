"""Fused steps of optimizers, and checks that they compute what torch does.

To add an optimizer with a kernel of its own, such as a fused Lion: a module like `split_steps`, which implements
`torch_fused_steps.OwnSteps`, and a row of `steps.fused_optimizer`. torch's fused kernels are rows of
`torch_fused_steps` and `direct_steps`.

Clipping is torch's own. With several ranks the means are clipped: see `distributed/data_parallel/gradients`.
"""
