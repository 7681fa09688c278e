"""Names of operators are read as people write them, and a wrong one is answered with the nearest."""

import os

import pytest

from nano_loop.config.op_names import nearest, operators_of, overloads_of, read_names
from nano_loop.config.options import Options
from nano_loop.errors import NanoConfigError


@pytest.mark.parametrize(
    ("name", "operators"),
    [
        *((name, ("softmax",)) for name in ("softmax", "F.softmax", "torch.softmax", "torch.nn.functional.softmax")),
        *((name, ("mul",)) for name in ("mul", "Tensor.mul", "torch.Tensor.mul", "__mul__", "aten::mul")),
        ("aten::mul.Tensor", ("mul.Tensor",)),
        ("aten::addmm", ("addmm",)),
        ("torch.ops.aten.addmm.default", ("addmm.default",)),
        ("torch.linalg.inv", ("linalg_inv",)),
        ("truediv", ("div",)),
        ("iadd", ("add_",)),
        ("__iadd__", ("add_",)),
        ("cross_entropy", ("cross_entropy_loss",)),
        ("dropout2d", ("feature_dropout",)),
        *((name, ()) for name in ("soft_max", "", "aten::", "aten::mul.Tensr", "name", "1", "softmax ", "os.system")),
    ],
)
def test_names_stand_for_operators(name, operators):
    assert operators_of(name) == operators
    for each in operators:
        assert overloads_of(each)


def test_nearest_name_is_told():
    assert (nearest("layernorm"), nearest("F.conv2D")) == ("Write layer_norm", "Write conv2d")
    assert nearest("zzzzzz").startswith("Write a name such as")


def test_file_has_a_name_a_line_and_comments(tmp_path):
    path = tmp_path / "ops.txt"
    path.write_text("# products\n\nlinear\n  addmm  # too\n#softmax\n")
    assert read_names(path) == ("linear", "addmm")


@pytest.mark.parametrize("path", ["/dev/full", "/dev/zero", "/dev/urandom", "large"])
def test_file_that_is_no_list_by_its_length_is_not_read_to_its_end(tmp_path, path):
    path = tmp_path / path  # where it is absolute, it is itself
    if not path.exists():
        path.touch()
        os.truncate(path, 1 << 40)
    with pytest.raises(OSError, match="it has more than 1,048,576 bytes"):
        read_names(path)
    with pytest.raises(NanoConfigError, match="the file cannot be read: it has more than 1,048,576 bytes"):
        Options(bf16_ops=path)
