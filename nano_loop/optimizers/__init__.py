"""Optimizers' fused steps, and their guards. A fused Lion would be a module here, and a row of `steps/fused_optimizer`.

Clipping is torch's own. With several ranks the means are clipped: see `distributed/data_parallel/gradients`.
"""
