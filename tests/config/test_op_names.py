"""Names of operators are accepted in all common spellings."""

import os

import pytest

from nano_loop.config.op_names import operators_of, overloads_of, read_names
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


def test_file_has_a_name_a_line_and_comments(tmp_path):
    path = tmp_path / "ops.txt"
    path.write_text("# products\n\nlinear\n  addmm  # too\n#softmax\n")
    assert read_names(path) == ("linear", "addmm")


@pytest.mark.parametrize("path", ["/dev/full", "/dev/urandom", "/dev/stdin", "large", "pipe", "link"])
def test_file_that_is_no_list_by_its_kind_or_its_length_is_not_read(tmp_path, path):
    path = tmp_path / path  # an absolute path is unchanged
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 40)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    words = "it has more than 1,048,576 bytes" if path.name == "large" else "it is not a regular file"
    with pytest.raises(OSError, match=words):
        read_names(path)
    with pytest.raises(NanoConfigError, match=f"the file cannot be read: {words}"):
        Options(bf16_ops=path)


def test_pipe_is_no_file_to_write_casts_to(tmp_path):
    os.mkfifo(tmp_path / "casts.json")
    with pytest.raises(NanoConfigError, match="the path of a file in a folder that exists"):
        Options(log_casts=tmp_path / "casts.json")
