"""What a step computes and moves is taken from events with shapes, and the time from those without."""

from nano_loop.profiling.kinds import ELEMENTWISE, PRODUCTS
from nano_loop.profiling.rates import Work, flops_of, moves_in, products_in, rate_of
from profiling.events import Event


def test_rate_counts_products_whose_flops_are_known():
    work = products_in([Event("aten::mm", flops=10), Event("aten::add", flops=3), Event("aten::bmm")])
    assert work == Work(10, frozenset({"aten::mm"}))
    timed = [Event("aten::mm", cpu_time_total=2e6), Event("aten::add", cpu_time_total=9e6)]
    assert rate_of(work, PRODUCTS, [timed]) == 5.0
    assert rate_of(work, PRODUCTS, [timed, timed]) == 5.0
    assert rate_of(products_in([Event("aten::add")]), PRODUCTS, [timed]) is None


def test_gradients_of_convolutions_are_counted_once_with_what_is_inside():
    shapes = [[2, 8, 5, 5], [2, 3, 7, 7], [8, 3, 3, 3]]
    backward = Event("aten::convolution_backward", cpu_time_total=4e6, input_shapes=shapes)
    inside = Event("aten::mm", cpu_time_total=1e6, flops=1000, cpu_parent=Event("python", cpu_parent=backward))
    flops = 4 * (2 * 8 * 5 * 5) * (3 * 3 * 3)
    assert rate_of(products_in([backward, inside]), PRODUCTS, [[backward, inside]]) == flops / 4
    transposed = [[2, 3, 9, 9], [2, 8, 5, 5], [8, 3, 3, 3]]
    assert flops_of(Event("aten::convolution_backward", input_shapes=transposed)) == flops


def test_memory_rate_counts_what_elementwise_operators_read_and_write():
    added = Event("aten::add", input_shapes=[[10, 10], [10], []], input_dtypes=["float", "c10::BFloat16", "Scalar"])
    copied = Event("aten::copy_", input_shapes=[[10]], input_dtypes=["float"])
    view = Event("aten::t", input_shapes=[[10, 10]], input_dtypes=["float"])
    inside = Event("aten::add", cpu_parent=added, input_shapes=[[10, 10]], input_dtypes=["float"])
    timed = [Event("aten::add", cpu_time_total=2e6), Event("aten::mul", cpu_time_total=5e6)]
    assert rate_of(moves_in([added, view, inside, copied]), ELEMENTWISE, [timed]) == (400 + 20 + 400) / 2
    assert rate_of(moves_in([copied, Event("aten::mul")]), ELEMENTWISE, [timed]) is None
