"""Inductor gets our operators by its options, beside those of the user."""

import pytest
import torch

from nano_loop.compile import inductor
from nano_loop.compile.graphs import ATTENTION, DROPOUT, keeping
from nano_loop.compile.inductor import with_operators


@pytest.fixture(autouse=True)
def known_compiler(monkeypatch):
    monkeypatch.setattr(inductor, "_compiler_has_vectors", lambda: True)


def test_operators_are_kept_and_random_numbers_are_torchs():
    options = with_operators({"fullgraph": True}, [ATTENTION, DROPOUT])
    assert options["fullgraph"]
    assert options["options"].keys() == {"pre_grad_custom_pass", "fallback_random", "cpp.vec_isa_ok"}


def test_options_of_the_user_prevail():
    given = {"options": {"fallback_random": False, "cpp.vec_isa_ok": None, "max_autotune": True}}
    options = with_operators(given, [DROPOUT])["options"]
    assert (options["fallback_random"], options["cpp.vec_isa_ok"], options["max_autotune"]) == (False, None, True)
    assert given["options"].keys() == {"fallback_random", "cpp.vec_isa_ok", "max_autotune"}


def test_a_mode_becomes_its_options():
    arguments = with_operators({"mode": "max-autotune-no-cudagraphs"}, [DROPOUT])
    assert arguments["options"]["max_autotune"]
    assert "mode" not in arguments
    torch.compile(torch.nn.Linear(1, 1), **arguments)


def test_another_backend_gets_the_users_arguments_alone():
    assert with_operators({"backend": "aot_eager"}, [DROPOUT]) == {"backend": "aot_eager"}


def test_what_is_cached_depends_on_the_operators_and_the_autocast():
    one, other = keeping([DROPOUT]), keeping([ATTENTION])
    assert one.uuid() == keeping([DROPOUT]).uuid() != other.uuid()
    with torch.autocast("cpu", torch.bfloat16):
        bf16 = one.uuid()
    with torch.autocast("cpu", torch.float16):
        assert len({one.uuid(), bf16, keeping([DROPOUT]).uuid()}) == 2


@pytest.mark.parametrize(
    ("machine", "compiler", "has"),
    [
        ("x86_64", "true", True),
        ("x86_64", "false", False),
        ("x86_64", "no-such-compiler", False),
        ("arm", "true", False),
    ],
)
def test_compilers_and_processors_without_vectors_are_left_to_inductor(monkeypatch, machine, compiler, has):
    monkeypatch.undo()
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(inductor.platform, "machine", lambda: machine)
    assert inductor._compiler_has_vectors.__wrapped__() is has
