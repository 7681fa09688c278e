"""A report's title names the compiled kernels, or why there are none: once, and equal on all ranks."""

import os
import subprocess
import sys
import textwrap

import pytest

from nano_loop.patching.operators import gives_kernels

PROGRAM = textwrap.dedent("""
    import torch
    from torch import nn
    import nano_loop
    from nano_loop.kernels import build

    @nano_loop.nano(num_processes=2, precision="bf16", tune_operators=False, auto_lr=False)
    def train(model, optimizer):
        loss = model(torch.randn(4, 3, 8, 8)).square().mean()
        loss.backward()
        optimizer.step()
        return nano_loop.all_gather(torch.tensor(float(build.why_none() is None))).tolist()

    if __name__ == "__main__":
        torch.manual_seed(0)
        layers = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Flatten(), nn.Linear(512, 1000)
        model = nn.Sequential(*layers)
        print(train(model, torch.optim.SGD(model.parameters(), 0.1)), train.report.title.split(" · ")[-1])
        skipped = [result.name for result in train.report.results if result.code == "no_kernel"]
        print(*sorted(skipped))
        try:
            with nano_loop.accelerated(model, precision="bf16", fast_cross_entropy=True, verbose=False):
                pass
        except nano_loop.NanoConfigError as error:
            print(error)
""")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"NANO_LOOP_KERNELS": "compile", "CC": "no-such-cc"}, "no C compiler was found (no-such-cc)"),
        ({"NANO_LOOP_KERNELS": "off"}, "NANO_LOOP_KERNELS=off"),
    ],
)
def test_reason_for_no_kernels_stands_once_in_the_report_and_holds_on_all_ranks(tmp_path, variables, reason):
    (tmp_path / "train.py").write_text(PROGRAM)
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), **variables}
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ranks, skipped, refusal = done.stdout.splitlines()
    assert ranks == f"[0.0, 0.0] no C kernels: {reason}"
    assert {"fast_dropout", "fast_cross_entropy", *(["fast_norm"] if gives_kernels() else [])} <= {*skipped.split()}
    assert done.stderr.count(reason) == 1
    assert reason in refusal  # raised as an error
