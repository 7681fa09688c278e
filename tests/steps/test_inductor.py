"""Inductor draws random numbers as the plain loop does, unless the user's options change this."""

import pytest
import torch

from nano_loop.steps.compile import arguments_with

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def test_random_numbers_are_torchs_and_no_header_is_precompiled():
    ours = {"fallback_random": True, "cpp_cache_precompile_headers": False}
    assert arguments_with({"fullgraph": True}) == {"fullgraph": True, "options": ours}
    assert arguments_with({"mode": "default"}) == {"options": ours}


def test_options_of_the_user_prevail():
    given = {"options": {"fallback_random": False, "max_autotune": True}}
    options = arguments_with(given)["options"]
    assert options == {**given["options"], "cpp_cache_precompile_headers": False}
    assert given["options"] == {"fallback_random": False, "max_autotune": True}
    kept = {"options": {"cpp_cache_precompile_headers": True}}
    assert arguments_with(kept)["options"]["cpp_cache_precompile_headers"]


def test_a_mode_becomes_its_options():
    arguments = arguments_with({"mode": "max-autotune-no-cudagraphs"})
    assert arguments["options"]["max_autotune"]
    assert "mode" not in arguments
    torch.compile(torch.nn.Linear(1, 1), **arguments)


def test_another_backend_gets_the_users_arguments_alone():
    assert arguments_with({"backend": "aot_eager"}) == {"backend": "aot_eager"}
