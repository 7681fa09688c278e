"""One process on a platform other than Linux: no /proc, no CPU masks, no glibc and no compiler."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, platform, sys, sysconfig
import psutil, torch
import torch._dynamo  # which each optimizer imports
from torch import nn

sysconfig.get_config_vars()

# The hook for what files there are comes after the imports of what needs them on this platform.
def refuse(event, arguments):
    if event in ("open", "os.listdir", "os.scandir", "os.stat") and str(arguments[0]).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "No such file or directory", arguments[0])

def stat(path, *args, original=os.stat, **kwargs):  # which is not audited
    refuse("os.stat", [path])
    return original(path, *args, **kwargs)

os.stat = stat

sys.platform = "darwin"
platform.system, platform.machine, platform.libc_ver = lambda: "Darwin", lambda: "arm64", lambda *_: ("", "")
for name in ("sched_getaffinity", "sched_setaffinity", "sched_getcpu"):
    if hasattr(os, name):
        delattr(os, name)
psutil.cpu_count = lambda logical=True: 2
sys.addaudithook(refuse)

import nano_loop

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(8, 1000)

    def forward(self, x):
        return self.head(self.dropout(self.norm(self.convolution(x)).mean((2, 3))))

def train(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

def weights(**options):
    torch.manual_seed(0)
    model = Net()
    data = torch.utils.data.TensorDataset(torch.rand(32, 3, 8, 8), torch.randint(1000, (32,)))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = torch.utils.data.DataLoader(data, 8)
    function = nano_loop.nano(**options)(train) if options else train
    function(model, optimizer, loader)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return flat, getattr(function, "report", None)

plain, _ = weights()
for options in ({"precision": "auto", "channels_last": "auto"}, {"exact": True}, {"precision": "bf16"}):
    found, report = weights(**options, verbose=False)
    torch.testing.assert_close(found, plain, rtol=0.05, atol=5e-3)
    print(*sorted(result.code for result in report.results if result.name == "allocator"))
assert "no C kernels" in report.title, report.title
torch.manual_seed(0)
with nano_loop.accelerated(verbose=False) as run:
    weights()
print("fused_optimizer" in run.report.applied)
"""


@pytest.mark.slow
def test_one_process_trains(tmp_path):
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "OMP_NUM_THREADS")}
    environ = {**kept, "PATH": "", "HOME": str(tmp_path), "NANO_LOOP_KERNELS": "compile"}
    command = [sys.executable, "-W", "ignore::UserWarning", "-c", PROGRAM]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["not_glibc"] * 3 + ["True"]
