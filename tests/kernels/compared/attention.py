"""Attention, in bf16 and in fp32, with its gradients."""

import math

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from kernels.compared.oracle import Row, drawn, in_fp64, rms
from nano_loop.kernels.attention import attention as module
from nano_loop.kernels.attention import blocked_attention, flash_attention
from nano_loop.kernels.override import Call
from nano_loop.patching.operators import gives_kernels
from nano_loop.patching.ownership import NO_RULES
from nano_loop.policy.product_precision import ATTENTION

ATEN = torch.ops.aten
FLASH = ATEN._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = ATEN._scaled_dot_product_flash_attention_for_cpu_backward

# --- bf16 ---

OVERRIDE = module.OVERRIDES[0]._replace(rules=lambda call: NO_RULES)


def attention(*args, **kwargs):
    """Compute a call within a set-up model."""
    return OVERRIDE.make(None)(None, *args, **kwargs)


def inputs(batch=(2, 3), length=17, source=None, width=16, value_width=None, key_heads=None, seed=0, transposed=False):
    generator = torch.Generator().manual_seed(seed)
    source, value_width = source or length, value_width or width
    heads = (*batch[:-1], key_heads) if key_heads else batch
    shapes = ((*batch, length, width), (*heads, source, width), (*heads, source, value_width))
    tensors = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    if transposed:  # as in a model that splits one projection into heads
        tensors = [each.transpose(-2, -3).contiguous().transpose(-2, -3) for each in tensors]
    return [each.requires_grad_() for each in tensors]


def call_of(kwargs=None, **sizes):
    sizes["transposed"] = sizes.get("transposed", False) and len(sizes.get("batch", (2, 3))) > 1
    return inputs(**sizes), kwargs or {}


def results(function, tensors, dtype=None, **kwargs):
    """Return the output and the three gradients, in fp64."""
    tensors = [each.detach().to(dtype or each.dtype).requires_grad_() for each in tensors]
    out = function(*tensors, **kwargs)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [each.detach().double() for each in (out, *torch.autograd.grad(out, tensors, weight))]


def by(function):
    """Return a function that computes a call under autocast."""

    def compute(call):
        tensors, kwargs = call
        with torch.autocast("cpu", torch.bfloat16, enabled=tensors[0].dtype is not torch.float64):
            return results(function, tensors, **kwargs)

    return compute


def bound(theirs, truth, call, place):
    # torch's plain kernel computes in fp32: for other than four dimensions, 3-d masks, values of another width, and
    # grouped heads in torch 2.8.
    (query, _, value), kwargs = call
    mask, grouped = kwargs.get("attn_mask"), kwargs.get("enable_gqa", False)
    by_torch_in_fp32 = (
        query.dim() != 4
        or (mask is not None and mask.dim() == 3)
        or query.size(-1) != value.size(-1)
        or (grouped and not gives_kernels())
    )
    # If torch happens to be exact on a few small values, an error of one rounding is allowed.
    return max((2 if by_torch_in_fp32 else 1.2) * theirs, 2**-9 * rms(truth))


def is_computed(call):
    (query, key, value), kwargs = call
    with torch.autocast("cpu", torch.bfloat16):
        return module._supports(None, query, key, value, **kwargs) is not None


SEEDED = torch.Generator().manual_seed(0)
CASES = {
    "plain": {},
    "transposed": {"transposed": True},
    "longer source": {"source": 29},
    "causal": {"kwargs": {"is_causal": True}},
    "causal, longer source": {"source": 29, "kwargs": {"is_causal": True}},
    "causal, shorter source": {"source": 5, "kwargs": {"is_causal": True}},
    "another value width": {"value_width": 24},
    "scale": {"kwargs": {"scale": 0.3}},
    "grouped heads": {"batch": (2, 6), "key_heads": 2, "kwargs": {"enable_gqa": True}},
    "three dimensions": {"batch": (4,)},
    "five dimensions": {"batch": (2, 2, 3)},
    "long": {"batch": (1, 2), "length": 300, "width": 64},
}
MASKS = {
    "bool mask": torch.rand(17, 17, generator=SEEDED) > 0.3,
    "bool mask by head": torch.rand(2, 1, 17, 17, generator=SEEDED) > 0.3,
    "float mask": torch.randn(17, 17, generator=SEEDED).bfloat16(),
    "float mask by batch": torch.randn(2, 1, 1, 17, generator=SEEDED).bfloat16(),
    "mask of rows": torch.rand(17, 1, generator=SEEDED) > 0.2,
    "mask of columns, one for each head": torch.randn(3, 1, 17, generator=SEEDED).bfloat16(),
    "mask of one number": torch.zeros(1, 1, dtype=torch.bfloat16),
    "mask with columns apart": (torch.rand(17, 17, generator=SEEDED) > 0.2).t(),
    "mask with numbers apart": torch.randn(17, 17, generator=SEEDED).bfloat16().t(),
}


def nan_in_a_masked_key():
    """torch adds the mask as -inf, so a masked NaN is still NaN."""
    mask = torch.ones(130, 130, dtype=torch.bool)
    mask[::2, 7] = False
    call = call_of({"attn_mask": mask}, length=130)
    call[0][1].data[1, 2, 7, 5] = torch.nan
    return call


def undefined_queries():
    call = call_of(batch=(1, 1), length=18)
    call[0][0].data[0, 0, 3, 2], call[0][0].data[0, 0, 5] = torch.nan, torch.inf
    return call


IN_BF16 = Row(
    make=call_of,
    ours=by(attention),
    torchs=by(F.scaled_dot_product_attention),
    bound=bound,
    cases=CASES | {name: {"kwargs": {"attn_mask": mask}} for name, mask in MASKS.items()},
    sizes=drawn(
        batch=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
        length=(1, 150),
        source=(1, 150),
        width=(16, 70),
        value_width=(16, 70),
        kwargs=[{}, {"is_causal": True}, {"scale": 0.07}],
        transposed=[False, True],
        seed=(0, 99),
    ).filter(lambda sizes: math.prod(sizes["batch"]) * sizes["length"] * sizes["source"] >= 1 << 14),
    supports=is_computed,
    others={
        "small heads": lambda call: call_of(width=8),
        "learned mask": lambda call: call_of({"attn_mask": torch.zeros(17, 17, requires_grad=True)}),
        "double precision": lambda call: in_fp64(call),
        "broadcast batch": lambda call: ([call[0][0], *inputs(batch=(1, 3))[1:]], {}),
        "no heads": lambda call: ([call[0][0], *(each[:, :0] for each in call[0][1:])], {"enable_gqa": True}),
        "two dimensions": lambda call: ([each[0, 0] for each in call[0]], {}),
    },
    undefined={"NaN in a masked key": nan_in_a_masked_key, "NaN and infinity in queries": undefined_queries},
    kernel=blocked_attention.KERNEL,
    needs_kernel=False,
    patches=[(module, "MIN_SCORES", 1)],
)

# --- fp32 ---


def heads(rows, size, by_heads, generator, batch=2, count=3):
    """Return a tensor of heads, which are stored one after another or, as in a projection, row by row."""
    if by_heads:
        return torch.randn(batch, count, rows, size, generator=generator)
    return torch.randn(batch, rows, count, size + 3, generator=generator)[..., :size].transpose(1, 2)


def mask_of(kind, rows, keys, seed=0):
    if kind is None:
        return None
    if isinstance(kind, tuple):  # the lowest value, and the step between rows
        mask = torch.zeros(2, 1, rows, keys)
        mask[:, :, :: kind[1]] = kind[0]
        return mask
    generator = torch.Generator().manual_seed(seed)
    if kind == "padding":  # the last sequence has only masked keys
        lengths = torch.tensor([max(keys - 2, 1), 0])
        return torch.zeros(2, 1, 1, keys).masked_fill(torch.arange(keys) >= lengths.view(2, 1, 1, 1), -torch.inf)
    scores = torch.randn(keys, rows, generator=generator)
    return scores.t() if kind == "by columns" else scores.t().contiguous()


def fp32_call(rows=40, keys=40, size=32, by_heads=True, mask=None, is_causal=False, scale=0.1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tensors = [heads(count, size, by_heads, generator) for count in (rows, keys, keys, rows)]
    return *tensors, mask_of(mask, rows, keys), is_causal, scale


def in_c(call):
    query, key, value, of_out, mask, is_causal, scale = call
    tensors, details = (query, key, value, mask), flash_attention._Details(is_causal, scale)
    out, log_sums = flash_attention._in_c(flash_attention.KERNEL, Call(ATTENTION, tensors, details=details))
    backward = Call(ATTENTION, (of_out, *tensors), details=details._replace(outs=(out, log_sums)))
    return [out, *flash_attention._in_c(flash_attention.KERNEL, backward), log_sums]


def by_flash_kernel(call):
    query, key, value, of_out, mask, is_causal, scale = call
    numbers = {"attn_mask": mask, "scale": scale}
    out, log_sums = FLASH(query, key, value, 0.0, is_causal, **numbers)
    return [out, *FLASH_BACKWARD(of_out, query, key, value, out, log_sums, 0.0, is_causal, **numbers), log_sums]


def by_softmax(call):
    """Compute attention without the log-sum-exp, which loses precision beside a large value even in fp64."""
    *tensors, of_out, mask, is_causal, scale = call
    query, key, value = (tensor.detach().double().requires_grad_() for tensor in tensors)
    scores = query @ key.mT * scale
    if mask is not None:
        scores = scores + mask.double()
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    unseen = (scores == -torch.inf).all(-1, keepdim=True)
    out = scores.masked_fill(unseen, 0).softmax(-1).masked_fill(unseen, 0) @ value
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), of_out.double())]


def has_torchs_log_sums(call, ours, torchs):
    torch.testing.assert_close(ours[-1], torchs[-1], rtol=1e-5, atol=1e-5 * max(call[-1], 1))


def sized(*sizes, **named):
    return dict(zip(("rows", "keys", "size"), sizes, strict=True), **named)


def of_each(sizes, **named):
    return [sized(*each, is_causal=is_causal, **named) for each in sizes for is_causal in (False, True)]


def undefined():
    call = fp32_call()
    call[0][1, 2, 5] = torch.nan
    return call


MASKED = [(1, 7, 8), (37, 22, 16), (130, 130, 64)]
IN_FP32 = Row(
    make=fp32_call,
    ours=in_c,
    torchs=by_flash_kernel,
    exact=by_softmax,
    bound=lambda theirs, truth, call, place: 1.2 * theirs + 2**-23 * max(rms(truth), rms(call[3])),
    also=has_torchs_log_sums,
    sizes=drawn(
        rows=(1, 150),
        keys=(1, 150),
        size=(1, 140),
        by_heads=[False, True],
        mask=[None, "rows", "by columns", "padding"],
        scale=[0.2],
        seed=(0, 99),
    ),
    # Fully masked rows: a log-sum-exp beside such a value loses its precision in fp32.
    cases={
        f"{lowest} in every {step}, {sizes}": sized(*sizes, by_heads=False, mask=(lowest, step), scale=0.2)
        for lowest in (torch.finfo(torch.float32).min, -1e9, -1e4, -torch.inf)
        for sizes in MASKED
        for step in (1, 3)
    },
    large=of_each([(50, 50, 40), (130, 130, 64), (200, 200, 130), (70, 33, 16), (33, 70, 16)], by_heads=False),
    threads=(1, 2, 3, 4),
    ends=[sized(*each, is_causal=True) for each in ((7, 30, 65), (1, 1, 1), (60, 300, 17))],
    undefined={"NaN": undefined},
    kernel=flash_attention.KERNEL,
)
