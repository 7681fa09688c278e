"""Calls of the C functions, recorded with exact results, in the format that driver.c reads."""

import ctypes
import functools
import itertools

import torch
import torch.nn.functional as F

from kernels.compared.attention import in_c
from kernels.compared.losses import logits_of
from kernels.compared.norms import EPS, IMAGES, MOMENTUM, case_of
from kernels.compared.oracle import bounded, rms
from nano_loop.kernels import activations, bernoulli
from nano_loop.kernels.head import cross_entropy
from nano_loop.kernels.linear import fp32_product
from nano_loop.kernels.memory import empty
from nano_loop.kernels.norm import norms
from nano_loop.kernels.rnn import recurrence, recurrent_layer

ATEN = torch.ops.aten
#: The C files whose functions the driver calls.
SOURCES = ("norms", "activations", "cross_entropy", "bernoulli", "fp32_product", "fp32_attention", "recurrence")
#: Type letters of the dtypes that are compared as floating-point values.
NUMBERS = {torch.bfloat16: "h", torch.float32: "f"}
#: Functions that return nothing.
VOID = ("tanh", "gelu", "gradient", "recurrence", "fp32")
#: Relative rounding error of a result by its dtype; intermediate results may be rounded several times in fp32.
DIGITS = {torch.bfloat16: 2.0**-9, torch.float32: 2.0**-22}


def bytes_of(tensor):
    """Return the bytes of a tensor in memory order, including those between its elements."""
    behind = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return ctypes.string_at(tensor.data_ptr(), behind * tensor.element_size() if tensor.numel() else 0)


class Recorder:
    """Records calls, and the tensors that they have written.

    Use `call` as ``CompiledKernel.__call__``, of which `original` is the original.
    """

    def __init__(self, original):
        self._original = original
        self._calls, self._expected = [], {}

    def call(self, kernel, function, *arguments):
        """Call a function, and record its arguments before and after the call."""

        def contents():
            return [bytes_of(argument) if isinstance(argument, torch.Tensor) else None for argument in arguments]

        if kernel.name not in SOURCES:
            return self._original(kernel, function, *arguments)
        before, result, after = contents(), self._original(kernel, function, *arguments), contents()
        returns = function != "layer_norm" and not function.startswith(VOID)
        self._calls.append((function, result if returns else 0, arguments, before, after))
        return result

    def expect(self, tensor, exact, bound, is_kept=False):
        """Set the expected values for the first call that uses a tensor; its old contents are passed if `is_kept`."""
        self._expected[tensor.data_ptr(), tensor.numel()] = (exact, bound, is_kept)

    def write(self, path):
        """Write the calls, on one to four threads, to a file, and return their number."""
        threads = itertools.cycle((1, 2, 3, 4))
        with path.open("wb") as file:
            for (function, returned, arguments, before, after), number in zip(self._calls, threads, strict=False):
                file.write(f"call {function} {returned} {number} {len(arguments)}\n".encode())
                dtypes = {argument.dtype for argument in arguments if isinstance(argument, torch.Tensor)}
                digits = max((DIGITS[dtype] for dtype in dtypes & DIGITS.keys()), default=0.0)
                for argument, given, left in zip(arguments, before, after, strict=True):
                    for part in self._parts(function, argument, given, left, digits):
                        file.write(part)
        return len(self._calls)

    def _parts(self, function, argument, given, left, digits):
        if argument is None:
            return [b"null\n"]
        if isinstance(argument, ctypes.Structure):
            return _memory("b", 1, bytes(argument), None)
        if isinstance(argument, int):
            return [b"number %d\n" % argument]
        if isinstance(argument, float):
            return [f"real {argument.hex()}\n".encode()]
        if argument.dtype is torch.uint8 and function != "draw_bernoulli":
            return _memory("s", 1, given, None)
        place = argument.data_ptr(), argument.numel()
        if function.startswith(("recurrence", "fp32_product")) and place not in self._expected:
            return _as_computed(argument, given, left, digits)
        exact, bound, is_kept = self._expected.pop(place, (None, 0.0, True))
        if exact is None or not argument.numel():
            return _memory("b", 1, given, left if function == "draw_bernoulli" else None)
        numbers = torch.empty_like(argument, dtype=torch.float64).copy_(exact)  # with the same strides
        size = argument.element_size()
        return _memory(NUMBERS[argument.dtype], size, given if is_kept else None, bytes_of(numbers), bound)


def _memory(kind, size, given, expected, bound=0.0):
    count = len(expected) // 8 if kind in NUMBERS.values() else len(given)
    line = f"memory {kind} {size} {count} {bound!r} {int(given is not None)} {int(expected is not None)}\n"
    return [line.encode(), given or b"", expected or b""]


def _as_computed(tensor, given, left, digits):
    """Return the input and the output written on this machine, which another's output must be close to."""
    if given == left:
        return _memory("b", 1, given, None)
    numbers = torch.frombuffer(bytearray(left), dtype=tensor.dtype).double()
    bound = digits * 8 * max(rms(numbers[numbers.isfinite()]), 1)
    return _memory(NUMBERS[tensor.dtype], tensor.element_size(), given, bytes_of(numbers), bound)


def norm(recorder, kind, shape, **named):
    """Record a norm and its gradients."""
    for place, (found, exact, bound) in enumerate(bounded(IMAGES, case_of(kind, shape, **named))):
        recorder.expect(found, exact, bound, is_kept=kind == "batch_norm" and place in (3, 4))


def rms_norm(recorder, rows, width, dtype, has_weight=True, seed=0):
    """Record an RMS norm of rows, and its gradients."""
    generator = torch.Generator().manual_seed(seed)
    x, gradient = (torch.randn(rows, width, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(width, generator=generator) if has_weight else None
    leaves = [leaf.double().requires_grad_() for leaf in (x, weight) if leaf is not None]
    exact = F.rms_norm(leaves[0], [width], *leaves[1:], eps=EPS)
    gradients = torch.autograd.grad(exact, leaves, gradient.double())
    out, inverses, of_x, of_weight = torch.empty_like(x), empty(rows), torch.empty_like(x), empty(width)
    sizes = rows, width, dtype is torch.bfloat16
    norms.KERNEL("layer_norm", x, *sizes, weight, None, EPS, out, None, inverses)
    arguments = (gradient, x, *sizes, weight, None, inverses, of_x, of_weight if has_weight else None, None)
    norms.KERNEL("layer_norm_backward", *arguments)
    of_rows = (leaves[0].detach().square().mean(1) + EPS).rsqrt()
    for found, numbers in zip((out, inverses, of_x, of_weight), (exact.detach(), of_rows, *gradients), strict=False):
        recorder.expect(found, numbers, DIGITS[found.dtype] * 2 * max(rms(numbers), 1))


def norms_of_nothing(recorder):
    """Record norms of empty tensors: no call may divide by the number of elements, or read one."""
    nothing, numbers = empty(0), functools.partial(empty, 16)
    for nhwc, (segments, rows) in itertools.product((0, 1), ((0, 40), (3, 0))):
        shape = norms._Shape(segments, rows, 16, nhwc)
        empties, statistics = [nothing] * 2, [numbers(), numbers()]
        norms.KERNEL("batch_norm", shape, nothing, *[None] * 4, MOMENTUM, EPS, nothing, *statistics)
        norms.KERNEL("batch_norm_backward", shape, *empties, None, *statistics, nothing, numbers(), numbers())
        statistics = [empty(segments, 4), empty(segments, 4)]
        norms.KERNEL("group_norm", shape, 4, nothing, None, None, EPS, nothing, *statistics)
        norms.KERNEL("group_norm_backward", shape, 4, *empties, None, *statistics, nothing, numbers(), numbers())
    norms.KERNEL("layer_norm", nothing, 0, 16, False, None, None, EPS, *[nothing] * 3)
    norms.KERNEL("layer_norm_backward", *[nothing] * 2, 0, 16, False, None, *[nothing] * 3, numbers(), numbers())


def activation(recorder, count, seed=0):
    """Record tanh, and GELU by tanh with its gradient, in bf16."""
    generator = torch.Generator().manual_seed(seed)
    x, gradient = ((torch.randn(count, generator=generator) * by).bfloat16() for by in (4, 1))
    x[1:2] = torch.nan

    def expect(name, *tensors, exact):
        bound = DIGITS[torch.bfloat16] * max(rms(exact[exact.isfinite()]) if count else 0, 1)
        recorder.expect(activations.computed(name, *tensors), exact, bound)

    of_x, of_gradient = x.double(), gradient.double()
    expect("tanh_forward", x, exact=of_x.tanh())
    expect("gelu_forward", x, exact=F.gelu(of_x, approximate="tanh"))
    expect("gelu_backward", gradient, x, exact=ATEN.gelu_backward(of_gradient, of_x, approximate="tanh"))


def losses(recorder, rows, width, dtype, smoothing=0.0, scale=3.0, seed=0):
    """Record losses over classes, and their gradients."""
    logits, target = logits_of(rows, max(width, 1), dtype, scale, seed)
    logits, exact = logits.detach()[:, :width].contiguous(), logits.detach()[:, :width].double().requires_grad_()
    target[seed % 3 :: 3 if width else 1] = -100
    loss, maxima, sums = cross_entropy.forward(logits, target, -100, smoothing)
    factors = torch.linspace(0.5, 2, rows)
    if width:
        of_rows = F.cross_entropy(exact, target, reduction="none", label_smoothing=smoothing)
        (gradient,) = torch.autograd.grad(of_rows, exact, factors.double())
        largest = exact.detach().amax(1)
        exact_sums = (exact.detach() - largest.unsqueeze(1)).exp().sum(1)
    else:
        of_rows, gradient = torch.zeros(rows), exact.detach()
        largest, exact_sums = torch.full((rows,), -torch.inf), torch.zeros(rows)
    recorder.expect(maxima, largest, 0.0)
    for found, numbers in ((sums, exact_sums), (loss, of_rows.detach())):
        recorder.expect(found, numbers, DIGITS[torch.float32] * max([1.0, *numbers.abs().tolist()]))
    for to in {torch.float32, dtype}:
        into = torch.empty_like(logits, dtype=to)
        found = cross_entropy.backward(factors, maxima, sums, logits, target, -100, smoothing, into)
        recorder.expect(found, gradient, DIGITS[to] * 2)


def products(recorder, sizes, has_bias=True, seed=0):
    """Record products of matrices stored by rows or by columns."""
    rows, depth, columns = sizes
    generator = torch.Generator().manual_seed(seed)
    a, b, bias = (torch.randn(made, generator=generator) for made in ((rows, depth), (depth, columns), (columns,)))
    bias = bias if has_bias else None
    exact = a.double() @ b.double() + (0 if bias is None else bias.double())
    for one, other in itertools.product((a, a.t().contiguous().t()), (b, b.t().contiguous().t())):
        out = fp32_product.product(one, other, bias)
        recorder.expect(out, exact, DIGITS[torch.float32] * max(rms(exact), 1))


def attention(recorder, sizes, is_causal=False, has_mask=False, seed=0):
    """Record attention of two sequences with three heads, and its gradients."""
    rows, keys, size = sizes
    generator = torch.Generator().manual_seed(seed)
    query, key, value, of_out = (
        torch.randn(2, count, 3, size, generator=generator).transpose(1, 2) for count in (rows, keys, keys, rows)
    )
    mask = torch.randn(2, 3, rows, keys, generator=generator) if has_mask else None
    wide = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    scores = wide[0] @ wide[1].mT * 0.3 + (0 if mask is None else mask.double())
    if is_causal:
        scores = scores.masked_fill(torch.ones(rows, keys, dtype=torch.bool).triu(1), -torch.inf)
    exact, before = scores.softmax(-1) @ wide[2], torch.get_num_threads()
    gradients = torch.autograd.grad(exact, wide, of_out.double())
    torch.set_num_threads(4)  # calls are repeated on up to four threads, which need memory
    out, *of_tensors, log_sums = in_c((query, key, value, of_out, mask, is_causal, 0.3))
    torch.set_num_threads(before)
    for found, numbers in zip((out, log_sums, *of_tensors), (exact, scores.logsumexp(-1), *gradients), strict=True):
        recorder.expect(
            found, numbers.detach(), DIGITS[torch.float32] * max(rms(numbers.detach()), (rows * size) ** 0.5)
        )


def draws(recorder, count, dtype, p, skipped=0):
    """Record draws from torch's generator; the expected values are torch's own."""
    ours, torchs = (torch.Generator().manual_seed(count) for _ in range(2))
    for generator in (ours, torchs):
        empty(skipped).uniform_(generator=generator)
    drawn = bernoulli.fill(empty(count, dtype=dtype), p, ours)
    assert torch.equal(drawn, empty(count, dtype=dtype).bernoulli_(p, generator=torchs))
    assert not count or torch.equal(ours.get_state(), torchs.get_state())


def recurrence_of(kind, size, hidden, lengths, *, is_reversed=False, in_bf16=False, seed=0):
    """Record a layer and its gradients. The expected values are those in fp64."""
    generator, gates = torch.Generator().manual_seed(seed), recurrent_layer.GATES[kind]
    sizes = [sum(n > i for n in lengths) for i in range(max(lengths))]

    def normal(*shape):
        return torch.randn(shape, generator=generator).div(max(shape[-1], 9) ** 0.5).requires_grad_()

    tensors = recurrent_layer.Arguments(
        *(normal(sum(lengths), size), normal(gates * hidden, size), normal(gates * hidden, hidden)),
        *(normal(gates * hidden), normal(gates * hidden) if seed % 2 else None),
        *(normal(len(lengths), hidden), normal(len(lengths), hidden) if kind == recurrent_layer.LSTM else None),
    )
    offsets, is_packed = torch.tensor([0, *sizes]).cumsum(0), len(set(lengths)) > 1
    layer = recurrent_layer.Recurrence(kind, offsets, is_packed, is_reversed, in_bf16, (torch.float32,) * 2)

    def computed(compute, tensors):
        leaves = [tensor for tensor in tensors if tensor is not None]
        results = compute(layer, recurrent_layer.Arguments(*tensors))
        return [*results, *torch.autograd.grad(sum(result.square().sum() for result in results), leaves)]

    exact = computed(recurrent_layer.by_operators, [None if tensor is None else tensor.double() for tensor in tensors])
    for ours, right in zip(computed(recurrence.recurrence, tensors), exact, strict=True):
        assert rms(ours.double() - right) <= (0.1 if in_bf16 else 1e-6) * max(rms(right), 1)


#: Sizes that no vector divides: few inputs and many, one sequence, and sequences that start and end within others.
LAYERS = [
    (size, hidden, lengths, is_reversed)
    for size, hidden in ((3, 7), (19, 33), (70, 65))
    for lengths in ([4] * 9, [5, 5, 3, 2, 1, 1, 1, 1], [3])
    for is_reversed in (False, True)
]


def some_recurrences(recorder, in_bf16=False):
    """Record layers of all kinds."""
    for seed, (kind, (size, hidden, lengths, is_reversed)) in enumerate(itertools.product(range(4), LAYERS)):
        recurrence_of(kind, size, hidden, lengths, is_reversed=is_reversed, in_bf16=in_bf16, seed=seed)


def some_calls(recorder):
    """Record every function, with sizes that no vector divides, and with empty tensors."""
    for dtype in (torch.float32, torch.bfloat16):
        for nhwc in (False, True):
            norm(recorder, "batch_norm", (2, 33, 23, 14), dtype=dtype, nhwc=nhwc)
            norm(recorder, "group_norm", (2, 39, 23, 14), dtype=dtype, nhwc=nhwc, groups=3)
        norm(recorder, "layer_norm", (5, 9, 51), dtype=dtype)
        rms_norm(recorder, 45, 51, dtype)
        for rows, width in ((0, 3), (3, 0), (2, 1), (5, 531)):
            losses(recorder, rows, width, dtype, smoothing=0.1)
    for count in (0, 1, 4099):
        activation(recorder, count)
    norm(recorder, "layer_norm", (3, 7, 17), dtype=torch.float32, affine=False)
    rms_norm(recorder, 21, 17, torch.float32, has_weight=False)
    some_recurrences(recorder)
    norms_of_nothing(recorder)
    for place, sizes in enumerate([(1, 1, 1), (7, 300, 65), (13, 5, 130), (110, 40, 270)]):
        products(recorder, sizes, has_bias=bool(place % 2))
    for sizes in ((1, 1, 1), (55, 55, 65), (9, 70, 17)):
        attention(recorder, sizes, is_causal=sizes[0] == sizes[1], has_mask=sizes[0] != sizes[1])
    for dtype, count in itertools.product((torch.bool, torch.bfloat16, torch.float32, torch.float64), (0, 1, 1301)):
        draws(recorder, count, dtype, 0.3, skipped=count % 7)


def random_calls(recorder, random, count):
    """Record random calls, with random functions, sizes and kinds."""
    kinds = [
        "batch_norm",
        "group_norm",
        "layer_norm",
        "rms_norm",
        "activation",
        "losses",
        "draws",
        "products",
        "attention",
    ]
    for seed in range(count):
        dtype, scale, offset = random.choice([*NUMBERS]), random.choice([0.01, 1.0, 30.0]), random.choice([0.0, 3.0])
        named = {"dtype": dtype, "scale": scale, "offset": offset * scale, "seed": seed}
        kind = random.choice(kinds)
        if kind == "layer_norm":
            width = random.choice([16, 17, 63, 64, random.randint(16, 2200)])
            shape = (random.randint(1, 90), random.randint(1, 3), width)
            norm(recorder, kind, shape, affine=dtype is torch.bfloat16 or random.random() < 0.5, **named)
        elif kind == "rms_norm":
            sizes = random.randint(1, 90), random.randint(16, 2200)
            rms_norm(recorder, *sizes, dtype, random.random() < 0.5, seed)
        elif kind.endswith("norm"):
            groups, nhwc = random.randint(1, 5), random.random() < 0.6
            channels = groups * random.randint(-(-16 // groups), 30)
            shape = (random.randint(1, 4), channels, 13 if nhwc else 26, random.randint(5, 40))
            norm(recorder, kind, shape, nhwc=nhwc, groups=groups, **named)
        elif kind == "activation":
            activation(recorder, random.choice([0, 1, 15, 4096, random.randint(0, 20_000)]), seed)
        elif kind == "losses":
            width = random.choice([1, 15, 16, 17, 512, 513, random.randint(1, 3000)])
            losses(recorder, random.randint(0, 20), width, dtype, random.choice([0.0, 0.1, 1.0]), scale, seed)
        elif kind == "attention":
            sizes = tuple(random.choice([1, 16, 64, random.randint(1, 130)]) for _ in range(3))
            attention(recorder, sizes, random.random() < 0.5, random.random() < 0.5, seed)
        elif kind == "products":
            sizes = tuple(random.choice([1, 6, 64, 256, random.randint(1, 400)]) for _ in range(3))
            products(recorder, sizes, random.random() < 0.5, seed)
        else:
            size = random.choice([0, 1, 311, 312, 313, random.randint(0, 5000)])
            draws(recorder, size, random.choice([*bernoulli._ONES]), random.random(), random.randint(0, 1300))
    for seed in range(count // 10):
        lengths = sorted((random.randint(1, 9) for _ in range(random.randint(1, 20))), reverse=True)
        sizes = random.randint(1, 90), random.randint(1, 90), random.choice([lengths, lengths[:1] * len(lengths)])
        recurrence_of(random.randrange(4), *sizes, is_reversed=random.random() < 0.5, seed=seed)
