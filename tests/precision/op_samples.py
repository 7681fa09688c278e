"""Arguments for each operator in the lists of torch's autocast or Habana; floating-point tensors are fp32.

`linalg_matrix_rank` is omitted, because its result is an integer.
"""

import torch


def r(*shape):
    return torch.rand(*shape) + 0.1


def square(n=3):
    return torch.eye(n) * 3 + r(n, n)


def positive():
    return square() @ square().T


def labels(*shape):
    return torch.randint(0, 3, shape)


def ones(*shape):
    return torch.ones(*shape).sign()


def alike(make, *names):
    """Return samples of operators with the same arguments."""
    return dict.fromkeys(names, make)


_IMAGE, _VOLUME = (1, 2, 6, 6), (1, 2, 4, 4, 4)

#: By overload; each function returns the arguments.
SAMPLES = {
    # Run in bf16 by torch.
    **alike(lambda: (r(3), r(4, 5), r(5, 3)), "addmm", "_addmm_activation"),
    **alike(lambda: (r(4, 5), r(5, 3)), "matmul", "mm"),
    "addbmm": lambda: (r(4, 3), r(2, 4, 5), r(2, 5, 3)),
    "baddbmm": lambda: (r(2, 4, 3), r(2, 4, 5), r(2, 5, 3)),
    "_convolution.deprecated": lambda: (
        *(r(*_IMAGE), r(3, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        *(False, False, False),
    ),
    "bmm": lambda: (r(2, 4, 5), r(2, 5, 3)),
    "conv1d": lambda: (r(1, 2, 8), r(3, 2, 3)),
    "conv1d.padding": lambda: (r(1, 2, 8), r(3, 2, 3), None, [1], "same"),
    "conv2d": lambda: (r(*_IMAGE), r(3, 2, 3, 3)),
    "conv2d.padding": lambda: (r(*_IMAGE), r(3, 2, 3, 3), None, [1], "same"),
    "conv3d": lambda: (r(*_VOLUME), r(3, 2, 3, 3, 3)),
    "conv3d.padding": lambda: (r(*_VOLUME), r(3, 2, 3, 3, 3), None, [1], "same"),
    "conv_tbc": lambda: (r(5, 2, 3), r(3, 3, 4), r(4), 0),
    "conv_transpose1d": lambda: (r(1, 2, 8), r(2, 3, 3)),
    "conv_transpose2d.input": lambda: (r(*_IMAGE), r(2, 3, 3, 3)),
    "conv_transpose3d.input": lambda: (r(*_VOLUME), r(2, 3, 3, 3, 3)),
    "linalg_vecdot": lambda: (r(3, 4), r(3, 4)),
    "linear": lambda: (r(4, 5), r(3, 5), r(3)),
    "mkldnn_rnn_layer": lambda: (
        *(r(4, 3, 2), r(8, 2), r(8, 2), r(8), r(8), r(1, 3, 2), r(1, 3, 2), False, []),
        *(2, 2, 1, True, False, False, True),
    ),
    "_native_multi_head_attention": lambda: (
        *(r(2, 3, 4), r(2, 3, 4), r(2, 3, 4), 4, 2),
        *(r(12, 4), r(12), r(4, 4), r(4)),
    ),
    "prelu": lambda: (r(4, 5), r(1)),
    "scaled_dot_product_attention": lambda: (r(1, 2, 4, 8), r(1, 2, 4, 8), r(1, 2, 4, 8)),
    # Run in the widest dtype.
    **alike(lambda: ([r(2, 3), r(2, 3)],), "cat", "stack"),
    "index_copy": lambda: (r(3, 4), 0, torch.tensor([0, 2]), r(2, 4)),
    # Run in fp32 by torch.
    **alike(lambda: (r(4, 3), r(4, 3)), "huber_loss", "kl_div", "l1_loss", "mse_loss", "smooth_l1_loss"),
    **alike(lambda: (r(4, 3), r(4, 3)), "binary_cross_entropy_with_logits"),
    **alike(lambda: (r(4, 3), ones(4, 3)), "hinge_embedding_loss", "soft_margin_loss"),
    **alike(lambda: (r(4, 3), labels(4)), "cross_entropy_loss", "multi_margin_loss", "nll_loss"),
    **alike(lambda: (r(*_VOLUME), [2, 2, 2]), *(f"{name}3d" for name in ("adaptive_avg_pool", "adaptive_max_pool"))),
    **alike(lambda: (r(*_VOLUME), [2, 2, 2]), "avg_pool3d", "max_pool3d"),
    **alike(lambda: (r(*_IMAGE), r(1, 3, 3, 2), 0, 0, False), "grid_sampler", "grid_sampler_2d"),
    **alike(lambda: (r(*_IMAGE), r(1, 3, 3, 2), 0, 0, False), "_grid_sampler_2d_cpu_fallback"),
    **alike(lambda: (positive(),), "cholesky", "cholesky_inverse"),
    **alike(lambda: (square(),), "geqrf", "inverse", "_lu_with_info", "pinverse", "qr", "svd", "trace"),
    **alike(lambda: (r(4, 3), r(1) / 2), "nanquantile", "quantile"),
    **alike(lambda: (r(4, 3), 0.5), "nanquantile.scalar", "quantile.scalar"),
    **alike(lambda: (r(1, 2, 8), [1, 1]), "reflection_pad1d", "replication_pad1d"),
    **alike(lambda: (r(*_IMAGE), [1, 1, 1, 1]), "reflection_pad2d", "replication_pad2d"),
    "binary_cross_entropy": lambda: (r(4, 3) / 2, r(4, 3) / 2),
    "cdist": lambda: (r(4, 3), r(5, 3)),
    "cholesky_solve": lambda: (r(3, 2), positive()),
    "cosine_embedding_loss": lambda: (r(4, 3), r(4, 3), ones(4)),
    "ctc_loss.IntList": lambda: (r(5, 2, 4).log_softmax(-1), labels(2, 2) + 1, [5, 5], [2, 2]),
    "ctc_loss.Tensor": lambda: (
        *(r(5, 2, 4).log_softmax(-1), labels(2, 2) + 1),
        *(torch.tensor([5, 5]), torch.tensor([2, 2])),
    ),
    "fake_quantize_per_tensor_affine": lambda: (r(4, 3), 0.1, 0, 0, 255),
    **{f"fft_{name}": lambda: (r(8, 8),) for name in ("fft", "fft2", "fftn", "ifft", "ifft2", "ifftn", "rfft")},
    **{f"fft_{name}": lambda: (r(8, 8),) for name in ("rfft2", "rfftn", "hfft", "ihfft", "irfft", "irfft2", "irfftn")},
    "fractional_max_pool2d": lambda: (r(*_IMAGE), [2, 2], [3, 3], r(1, 2, 2) / 2),
    "fractional_max_pool3d": lambda: (r(*_VOLUME), [2, 2, 2], [2, 2, 2], r(1, 2, 3) / 2),
    "grid_sampler_3d": lambda: (r(*_VOLUME), r(1, 3, 3, 3, 3), 0, 0, False),
    **alike(
        lambda: (positive(),),
        *(f"linalg_{name}" for name in ("cholesky", "cholesky_ex", "eigh", "eigvalsh", "inv", "matrix_sqrth")),
    ),
    **{f"linalg_{name}": lambda: (square(),) for name in ("inv_ex", "cond", "eig", "eigvals", "qr", "svd", "svdvals")},
    "linalg_cond.p_str": lambda: (square(), "fro"),
    "linalg_householder_product": lambda: (r(4, 3), r(3)),
    "linalg_lstsq": lambda: (r(4, 3), r(4, 2)),
    "linalg_solve": lambda: (square(), r(3, 2)),
    "linalg_tensorinv": lambda: (square(4).view(2, 2, 2, 2),),
    "linalg_tensorsolve": lambda: (square(4).view(2, 2, 2, 2), r(2, 2)),
    "lu_solve": lambda: (r(3, 2), square(), torch.tensor([1, 2, 3], dtype=torch.int32)),
    "margin_ranking_loss": lambda: (r(4), r(4), ones(4)),
    "max_unpool2d": lambda: (r(1, 2, 2, 2), torch.arange(8).view(1, 2, 2, 2) % 4, [4, 4]),
    "max_unpool3d": lambda: (
        *(r(1, 2, 2, 2, 2), torch.arange(16).view(1, 2, 2, 2, 2) % 8),
        *([4, 4, 4], [2, 2, 2], [0, 0, 0]),
    ),
    "multilabel_margin_loss": lambda: (r(4, 3), labels(4, 3)),
    "multilabel_margin_loss_forward": lambda: (r(4, 3), labels(4, 3), 1),
    "nll_loss2d": lambda: (r(2, 3, 4, 4), labels(2, 4, 4)),
    "orgqr": lambda: (r(4, 3), r(3)),
    "ormqr": lambda: (r(4, 4), r(4), r(4, 3)),
    "poisson_nll_loss": lambda: (r(4, 3), r(4, 3), True, False, 1e-8, 1),
    "polar": lambda: (r(4), r(4)),
    "replication_pad3d": lambda: (r(*_VOLUME), [1, 1, 1, 1, 1, 1]),
    "stft": lambda: (r(32), 8, None, None, None, False, True, True),
    "stft.center": lambda: (r(32), 8, None, None, None, True, "reflect", False, True, True),
    "triangular_solve": lambda: (r(3, 2), square()),
    "triplet_margin_loss": lambda: (r(4, 3), r(4, 3), r(4, 3)),
    "view_as_complex": lambda: (r(4, 2),),
    # In Habana's lists, and in "safe".
    **alike(lambda: (r(4, 3), r(4, 3)), *(f"{name}.Tensor" for name in ("add", "div", "divide", "mul", "rsub"))),
    "cosine_similarity": lambda: (r(4, 3), r(4, 3)),
    **alike(lambda: (r(4, 3), 0), "cumprod", "cumsum", "prod.dim_int"),
    **alike(lambda: (r(4, 3), -1), "log_softmax.int", "softmax.int"),
    **alike(lambda: (r(*_IMAGE), [2, 2]), "avg_pool2d", "max_pool2d"),
    "nll_loss_nd": lambda: (r(4, 3), labels(4)),
    "addcmul": lambda: (r(4, 3), r(4, 3), r(4, 3)),
    "batch_norm": lambda: (r(4, 3), r(3), r(3), r(3), r(3), True, 0.1, 1e-5, False),
    "dot": lambda: (r(4), r(4)),
    "dropout": lambda: (r(4, 3), 0.5, True),
    "embedding": lambda: (r(5, 3), labels(4)),
    "embedding_bag": lambda: (r(5, 3), labels(4), torch.tensor([0, 2])),
    **alike(lambda: (r(4, 3),), "exp", "expm1", "log", "log2", "log10", "log1p", "reciprocal", "rsqrt", "prod"),
    "feature_dropout": lambda: (r(*_IMAGE), 0.5, True),
    **alike(lambda: (r(4, 3),), "gelu", "leaky_relu", "mean", "relu", "relu6", "softplus", "sum"),
    "group_norm": lambda: (r(2, 4, 3), 2, r(4), r(4)),
    "instance_norm": lambda: (r(2, 3, 4), r(3), r(3), None, None, True, 0.1, 1e-5, False),
    "layer_norm": lambda: (r(4, 3), [3], r(3), r(3)),
    "logsumexp": lambda: (r(4, 3), [0]),
    "mv": lambda: (r(4, 3), r(3)),
    "norm.ScalarOpt_dim": lambda: (r(4, 3), 2, [0]),
    "pow.Tensor_Scalar": lambda: (r(4, 3), 2),
    "topk": lambda: (r(4, 3), 2),
}

#: Habana's lists for mixed precision: the two defaults, and the two for ResNet-50.
HABANAS = {
    "ops_bf16.txt": """
        addmm batch_norm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d dot dropout
        dropout1d dropout2d dropout3d group_norm instance_norm layer_norm leaky_relu linear matmul mean mm mv relu t
    """,
    "ops_fp32.txt": """
        binary_cross_entropy binary_cross_entropy_with_logits cross_entropy div divide embedding embedding_bag log log2
        log_softmax nll_loss smooth_l1_loss softmax topk truediv
    """,
    "ops_bf16_Resnet.txt": "addmm avg_pool2d bmm conv2d dot max_pool2d mm mv relu t linear",
    "ops_fp32_Resnet.txt": "cross_entropy log_softmax nll_loss softmax topk",
}
