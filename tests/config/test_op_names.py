"""Names of operators are accepted in all common spellings."""

import pytest

from nano_loop.config.op_names import operators_of, overloads_of, read_names


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


def test_file_has_a_name_a_line_and_comments(tmp_path):
    path = tmp_path / "ops.txt"
    path.write_text("# products\n\nlinear\n  addmm  # too\n#softmax\n")
    assert read_names(path) == ("linear", "addmm")
