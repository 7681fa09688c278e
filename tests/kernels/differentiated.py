"""The models for differentiating autograd functions and replaced operators: a row for each way to compute."""

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.nn.utils.rnn import PackedSequence

import nano_loop
from kernels.heads import small_heads
from nano_loop.distributed.comm.ranks import Ranks
from nano_loop.distributed.data_parallel import gradients
from nano_loop.distributed.data_parallel.sync_batch_norm import norms_over_all_ranks
from nano_loop.kernels.attention import blocked_attention
from nano_loop.kernels.convolution import weight_gradient
from nano_loop.kernels.linear import product

ROOMS = ("kernels", "patching", "precision", "distributed")
IMPORT_RAY = {f"nano_loop.distributed.launch_ray.{name}" for name in ("cluster", "placement")}


def modules():
    for each in pkgutil.walk_packages(nano_loop.__path__, "nano_loop."):
        if each.name.split(".")[1] in ROOMS and each.name not in IMPORT_RAY:
            yield importlib.import_module(each.name)


class Row(NamedTuple):
    """A model to differentiate."""

    build: Callable[[], nn.Module]
    #: The shape of the model's input and output.
    shape: tuple[int, ...]
    #: The autograd functions in the graph, as module and class name.
    functions: tuple[str, ...] = ()
    #: The replaced operators that are called, forward or backward.
    operators: tuple[str, ...] = ()
    #: The C function that a first backward calls.
    calls: str | None = None
    #: The options of the run.
    options: Mapping[str, Any] = MappingProxyType({})
    #: The kernel that has to be available.
    kernel: Any = None
    #: Returns a context around all calls.
    around: Callable[[], Any] = contextlib.nullcontext
    #: Whether inputs that torch rejects must be rejected with its message.
    has_torchs_errors: bool = False


class Attention(nn.Linear):
    """A class name by which a run recognizes attention in the model."""


class Layer(nn.Module):
    """Calls a function with a tensor and a layer. It returns a tensor of the same shape."""

    def __init__(self, function, layer):
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, x):
        return self.function(x, self.layer)


def alone(kind, *args, **settings):
    return lambda: Layer(lambda x, layer: layer(x), kind(*args, **settings))


def normalized(kind, *args, **settings):
    def build():
        layer = kind(*args, **settings)
        for weight in [*layer.parameters()][:1]:
            nn.init.uniform_(weight, 0.5, 1.5)
        return Layer(lambda x, layer: x + layer(x).sin(), layer)

    return build


def activated(function):
    return lambda: Layer(lambda x, layer: function(layer(x)), nn.Linear(16, 16))


def recurrent(kind, hidden=6, **settings):
    return lambda: Layer(lambda x, layer: layer(x)[0], kind(6, hidden, **settings))


def packed(kind, hidden=6, **settings):
    def function(x, layer):
        sequences = PackedSequence(x.flatten(0, 1)[:14], torch.tensor([3, 3, 3, 3, 2]))
        # The mean: saturated by a sum, second derivatives multiply errors by 50, and torch's own vary as much by seed.
        return layer(sequences)[0].data.mean(0).tanh() * x

    return lambda: Layer(function, kind(6, hidden, **settings))


def attending(dimensions=4, size=16, **settings):
    def function(x, layer):
        query = layer(x[0] if dimensions == 3 else x)
        key, value = query.roll(1, -1).cos(), query.roll(2, -1)
        return F.scaled_dot_product_attention(query, key, value, **settings).view_as(x)

    return lambda: Layer(function, Attention(size, size))


def looking_up(kind, **settings):
    indices = torch.tensor([[0, 3], [5, 3]])

    def function(x, table):
        if kind is nn.EmbeddingBag and x.dtype is torch.float64:  # torch has no second derivative for it
            return F.embedding(indices, table.weight).sum(1).flatten()[:6] * x
        return table(indices).flatten()[:6] * x

    return lambda: Layer(function, kind(512, 6, **settings))


def loss_of(dtype=None, smoothing=0.1):
    targets = [3, 0, 999, 7 if smoothing else -100]

    def function(x, layer):
        logits = layer(x)  # keep a reference, so that the tensor it was cast from is known
        logits = logits if dtype is None else logits.to(dtype)
        target = torch.tensor(targets)  # tests write to it
        return x * F.cross_entropy(logits, target, label_smoothing=smoothing) / 7

    return lambda: Layer(function, nn.Linear(6, 1000))


def loss_by_rows():
    def function(x, layer):
        classes = (x @ layer.weight.t() / 2).log_softmax(-1).gather(-1, torch.tensor([[3], [0], [999], [3]]))
        return x * (classes.squeeze(-1) * torch.tensor([0.5, 0, 1, 2])).sum() / 7

    return Layer(function, nn.Linear(6, 1000, bias=False))


def pooled(x, layer):
    images = layer(x)
    return images * images.mean((2, 3), keepdim=True)


def multiplied(x, layer):
    return torch.baddbmm(x, torch.bmm(x, layer(x).mT), x, alpha=0.01)


@contextlib.contextmanager
def group_of_one():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@contextlib.contextmanager
def norms_of_one_rank():
    with group_of_one():
        ranks = Ranks()
        ranks.channel = SimpleNamespace(exchange=lambda data, what: [bytearray(data)])
        with norms_over_all_ranks(ranks):
            yield


def norm_row(layer, shape, operator, **options):
    operators = (f"native_{operator}", f"native_{operator}_backward")
    return Row(layer, shape, operators=operators, options=options, has_torchs_errors=True)


BF16, ROUNDED = {"precision": "bf16"}, {"precision": "bf16-products"}
IN_BLOCKS = functools.partial(
    Row,
    functions=("blocked_attention._Attention",),
    operators=("scaled_dot_product_attention",),
    calls="attention_backward",
    options=BF16,
    kernel=blocked_attention.KERNEL,
)
ACTIVATED = functools.partial(Row, shape=(4, 16), options=BF16 | {"fast_activation": True})
ROUNDING = functools.partial(Row, options=ROUNDED, kernel=product.KERNEL)
RECURRENT = functools.partial(Row, functions=("recurrence._RecurrentLayer",), calls="recurrence_backward")
CONVOLVED = functools.partial(
    Row, shape=(4, 16, 6, 5), operators=("convolution", "convolution_backward"), calls="weight_gradient"
)
HEADS, LARGE_HEADS = (1, 2, 8, 16), (1, 2, 32, 32)
CHUNKED, HEAD = ("chunks._Chunked", "logits._Placed"), functools.partial(Row, around=small_heads)
RMS, LOSSES = ("rms_norm._RmsNorm",), ("cross_entropy._Losses", "cross_entropy._Place")
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
RNNS = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn_tanh": nn.RNN, "rnn_relu": functools.partial(nn.RNN, nonlinearity="relu")}
ROWS = {
    **{name: RECURRENT(recurrent(kind), (5, 4, 6), operators=(f"{name}.input",)) for name, kind in RNNS.items()},
    "gru, packed": RECURRENT(packed(nn.GRU), (5, 3, 6), operators=("gru.data",)),
    **{
        f"{name}, packed, both ways": RECURRENT(
            packed(kind, 3, bidirectional=True), (5, 3, 6), operators=(f"{name}.data",)
        )
        for name, kind in RNNS.items()
    },
    "gru in bf16": RECURRENT(recurrent(nn.GRU), (5, 4, 6), options=BF16),
    "lstm in bf16": Row(recurrent(nn.LSTM), (5, 4, 6), options=BF16),  # on some CPUs, by oneDNN
    "lstm by oneDNN": Row(recurrent(nn.LSTM), (3, 4, 6), operators=("mkldnn_rnn_layer_backward",)),
    "rms norm": Row(normalized(nn.RMSNorm, 20), (3, 4, 20), RMS, ("rms_norm",), "layer_norm_backward"),
    "rms norm without weights": Row(
        normalized(nn.RMSNorm, 20, elementwise_affine=False), (3, 20), RMS, calls="layer_norm_backward"
    ),
    "rms norm in bf16": Row(
        lambda: Layer(
            lambda x, layers: layers(x), nn.Sequential(nn.Linear(16, 64), nn.RMSNorm(64), nn.SiLU(), nn.Linear(64, 16))
        ),
        (6, 16),
        RMS,
        calls="layer_norm_backward",
        options=BF16,
    ),
    "layer norm": norm_row(normalized(nn.LayerNorm, 20), (3, 4, 20), "layer_norm"),
    "batch norm": norm_row(normalized(nn.BatchNorm1d, 16, track_running_stats=False), (6, 16), "batch_norm"),
    "group norm": norm_row(normalized(nn.GroupNorm, 4, 16), (3, 16, 8, 8), "group_norm"),
    **{
        f"{name} norm of images": norm_row(normalized(kind, *args), (4, 16, 7, 7), operator, channels_last=True)
        for name, kind, args, operator in (
            ("batch", nn.BatchNorm2d, (16,), "batch_norm"),
            # With a layer for images, because channels_last has to recognize images that need no gradient.
            ("group", lambda *args: nn.Sequential(nn.ZeroPad2d(0), nn.GroupNorm(*args)), (4, 16), "group_norm"),
            ("instance", functools.partial(nn.InstanceNorm2d, affine=True), (16,), "batch_norm"),
        )
    },
    "layer norm and activation in bf16": Row(
        lambda: Layer(
            lambda x, layers: layers(x),
            nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(approximate="tanh"), nn.Linear(64, 16)),
        ),
        (6, 16),
        calls="layer_norm",
        options=BF16,
    ),
    "cross-entropy": Row(loss_of(), (4, 6), LOSSES, ("cross_entropy_loss",), "gradient_float_to_float"),
    "cross-entropy without smoothing": Row(loss_of(smoothing=0.0), (4, 6), LOSSES, calls="gradient_float_to_float"),
    "cross-entropy in bf16": Row(loss_of(), (4, 6), LOSSES, calls="gradient_bf16_to_bf16", options=BF16),
    "cross-entropy of a copy": Row(
        loss_of(torch.float32), (4, 6), LOSSES, calls="gradient_float_to_float", options=BF16
    ),
    "head": HEAD(loss_of(), (4, 6), CHUNKED, ("linear",), "gradient_float_to_float"),
    "head in bf16": HEAD(loss_of(torch.float32), (4, 6), (*CHUNKED, "logits._Derived"), options=BF16),
    "head, by rows": HEAD(loss_by_rows, (4, 6), (*CHUNKED, "logits._Derived"), ("matmul",)),
    "head, read whole": HEAD(
        lambda: Layer(lambda x, layer: x * layer(x).sin().mean(), nn.Linear(6, 1000)),
        (4, 6),
        ("logits._Placed", "logits._Materialized"),
    ),
    "attention in blocks": IN_BLOCKS(attending(), HEADS),
    "attention in blocks, of three dimensions": IN_BLOCKS(attending(3), HEADS),
    "attention in blocks with a dropout": IN_BLOCKS(attending(dropout_p=0.3, is_causal=True), HEADS),
    "attention in fp32": Row(
        attending(), HEADS, operators=(FLASH, f"{FLASH}_backward"), calls="fp32_attention_backward"
    ),
    "attention, rounded": ROUNDING(attending(size=32), LARGE_HEADS, calls="attention_backward"),
    "attention with a dropout, rounded": ROUNDING(attending(size=32, dropout_p=0.3), LARGE_HEADS, calls="product"),
    "lookups": Row(looking_up(nn.Embedding), (6,), ("embedding._Rows", "embedding._Root"), ("embedding",), "sum_rows"),
    "bags": Row(looking_up(nn.EmbeddingBag, mode="sum"), (6,), ("embedding._Bags",), ("_embedding_bag",), "sum_rows"),
    "means over pixels": Row(
        lambda: Layer(pooled, nn.Conv2d(16, 16, 1)),
        (4, 16, 6, 5),
        ("pixel_means._Means",),
        ("mean.dim",),
        options={"channels_last": True},
    ),
    "synchronized batch norm": Row(
        normalized(nn.SyncBatchNorm, 16, track_running_stats=False),
        (6, 16),
        ("sync_batch_norm._Normalized", "sync_batch_norm._RankSum"),
        around=norms_of_one_rank,
    ),
    "averaged gradient": Row(
        lambda: Layer(lambda x, _: gradients._Mean.apply(x, x.detach()), nn.Tanh()), (4,), ("gradients._Mean",)
    ),
    "tanh": ACTIVATED(activated(torch.tanh), operators=("tanh",), calls="tanh_forward"),
    "gelu by tanh": ACTIVATED(
        activated(functools.partial(F.gelu, approximate="tanh")),
        operators=("gelu", "gelu_backward"),
        calls="gelu_backward",
    ),
    "products": Row(alone(nn.Linear, 96, 96), (40, 96), operators=("mm", "addmm"), calls="fp32_product"),
    "products in bf16": Row(
        alone(nn.Linear, 96, 96), (40, 96), calls="product", options=BF16 | {"fast_linear": True}, kernel=product.KERNEL
    ),
    "products, rounded": ROUNDING(
        lambda: Layer(multiplied, nn.Linear(32, 32)), (2, 32, 32), operators=("bmm", "baddbmm"), calls="product"
    ),
    "convolution in bf16": CONVOLVED(
        alone(nn.Conv2d, 16, 16, 3, padding=1), options=BF16 | {"channels_last": True}, kernel=weight_gradient.KERNEL
    ),
    "depthwise convolution": CONVOLVED(
        alone(nn.Conv2d, 16, 16, 3, padding=1, groups=16), options=BF16 | {"channels_last": True}
    ),
    "convolution, rounded": CONVOLVED(
        alone(nn.Conv2d, 16, 16, 3, padding=1), options=ROUNDED | {"channels_last": True}, kernel=weight_gradient.KERNEL
    ),
    "dropout": Row(
        lambda: Layer(lambda x, layer: layer(x).tanh(), nn.Dropout(0.3)),
        (64, 3),
        operators=("bernoulli_.float",),
        calls="draw_bernoulli",
    ),
}
