"""Actors adopt the variables of the caller's environment that must be equal on all ranks."""

import pytest

from nano_loop.distributed.launch_ray.caller import for_actors


@pytest.mark.parametrize("kernels", ["v3", None])
def test_choice_of_kernels_is_inherited_and_is_no_choice_of_threads(monkeypatch, kernels):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NANO_LOOP_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    if kernels is not None:
        monkeypatch.setenv("NANO_LOOP_KERNELS", kernels)
    setting = for_actors(2, folder_is_shipped=True)
    assert setting["environ"].get("NANO_LOOP_KERNELS") == kernels
    assert setting["environ"]["OMP_NUM_THREADS"] == "2"
    assert not setting["threads_are_chosen"]
