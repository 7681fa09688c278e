"""The idioms of training scripts for GPUs run on the CPU, compute the same results, and everything is restored."""

import io
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from distributed.launch.started import run_python
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nano_loop import patch_cuda, unpatch_cuda
from nano_loop.integrations import cuda_calls


@pytest.fixture
def patched():
    patch_cuda()
    yield
    unpatch_cuda()


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(torch.rand(24, 8), torch.arange(24) % 4)


def on_the_cpu():
    """Return the parameters after an epoch of the plain loop."""
    model, optimizer, data = parts()
    for x, y in DataLoader(data, 6):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [*model.parameters()]


def quickstart():
    """torch's quickstart tutorial."""
    model, optimizer, data = parts()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert device == "cuda"
    model = model.to(device)
    for x, y in DataLoader(data, 6):
        x, y = x.to(device), y.to(device=torch.device(device))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def imagenet():
    """torch's ImageNet example: GPU indices, DataParallel, pinned memory, a checkpoint."""
    model, optimizer, data = parts()
    gpu = 0
    torch.cuda.set_device(gpu)
    torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark
    model = nn.DataParallel(model).cuda()
    criterion = nn.CrossEntropyLoss().cuda(gpu)
    assert torch.cuda.device_count() == 1
    for images, target in DataLoader(data, 6, pin_memory=True):
        images = images.cuda(gpu, non_blocking=True)
        target = target.cuda(gpu, non_blocking=True)
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save({"state": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for location in (None, f"cuda:{gpu}", {"cuda:0": "cuda:1"}, lambda storage, place: storage.cuda(gpu)):
        file.seek(0)
        model.load_state_dict(torch.load(file, map_location=location)["state"])
    return model.module


def distributed(tmp_path):
    """A script for torchrun, with one process."""
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1, device_id=torch.device("cuda:0")
    )
    try:
        assert torch.distributed.get_backend() == "gloo"
        model, optimizer, data = parts()
        rank = torch.distributed.get_rank()
        torch.cuda.set_device(rank)
        parallel = nn.parallel.DistributedDataParallel(model.to(rank), device_ids=[rank], output_device=rank)
        for x, y in DataLoader(data, 6):
            optimizer.zero_grad()
            F.cross_entropy(parallel(x.to(rank)), y.to(rank)).backward()
            optimizer.step()
        total = torch.tensor([1.0], device=rank)
        torch.distributed.all_reduce(total)
        torch.cuda.synchronize()
    finally:
        torch.distributed.destroy_process_group()
    return model


@pytest.mark.parametrize("script", [quickstart, imagenet])
def test_scripts_compute_what_the_plain_loop_computes(patched, script):
    assert all(map(torch.equal, script().parameters(), on_the_cpu()))


IN_ITS_OWN_PROCESS = """
import json, sys, torch
from integrations.test_cuda_calls import distributed, on_the_cpu, patch_cuda
patch_cuda()
print(json.dumps([*map(torch.equal, distributed(sys.argv[1]).parameters(), on_the_cpu())]))
"""


@pytest.mark.slow
def test_script_for_several_gpus_runs_in_one_process(tmp_path):
    """In a separate process: after importing inductor, torch's gloo and Python's lock may wait for each other."""
    equal = run_python("-c", IN_ITS_OWN_PROCESS, tmp_path, folder=Path(__file__).parents[1])[0]
    assert equal == [True] * 4


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.*:FutureWarning")
@pytest.mark.parametrize(
    "amp",
    [
        lambda: (torch.autocast("cuda"), torch.amp.GradScaler("cuda")),
        lambda: (torch.autocast(device_type="cuda", dtype=torch.float16), torch.amp.GradScaler()),
        lambda: (torch.amp.autocast("cuda", dtype=torch.bfloat16, enabled=True), torch.cuda.amp.GradScaler()),
        lambda: (torch.cuda.amp.autocast(), torch.cuda.amp.GradScaler(init_scale=2.0)),
    ],
)
def test_mixed_precision_is_that_of_the_cpu(patched, amp):
    """torch's recipe, with gradients that are unscaled and clipped."""
    model, optimizer, data = parts()
    model.cuda()
    context, scaler = amp()
    for x, y in DataLoader(data, 6):
        optimizer.zero_grad()
        with context:
            output = model(x.cuda())
            assert output.dtype == torch.bfloat16
            loss = F.cross_entropy(output.float(), y.cuda())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
    by_hand, optimizer, data = parts()
    for x, y in DataLoader(data, 6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(by_hand(x).float(), y)
        loss.backward()
        nn.utils.clip_grad_norm_(by_hand.parameters(), 1e9)
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), by_hand.parameters()))


def test_language_model_asks_about_its_device(patched):
    """The queries of scripts for language models before they train."""
    device = "cuda:0"
    assert torch.cuda.is_bf16_supported()
    assert "CPU" in torch.cuda.get_device_name()
    assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() > 0
    torch.cuda.manual_seed_all(1337)
    one = torch.randn(3, device=device)
    torch.cuda.manual_seed(1337)
    assert torch.equal(one, torch.randn(3, device=device))
    generator = torch.Generator(device="cuda").manual_seed(3)
    assert isinstance(generator, torch.Generator)
    assert torch.rand(2, generator=generator, device="cuda").device.type == "cpu"
    data = torch.arange(10).pin_memory().to(device, non_blocking=True)
    layer = nn.Linear(2, 2, device=device, dtype=torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    assert data.new_zeros(2, device="cuda").device == torch.zeros(1, device=0).device
    assert torch.zeros(2, pin_memory=True).type("torch.cuda.HalfTensor").dtype == torch.half
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.empty_cache()
    assert torch.get_autocast_dtype("cuda") == torch.bfloat16


def test_what_has_no_meaning_on_a_cpu_raises_torchs_error(patched):
    with pytest.raises((RuntimeError, AssertionError)):
        torch.cuda.Stream()


def test_other_devices_are_left_alone(patched):
    assert torch.zeros(2, device="meta").to("meta").is_meta
    with torch.autocast("cpu"):
        assert torch.mm(torch.rand(2, 2), torch.rand(2, 2)).dtype == torch.bfloat16
    assert torch.rand(3).to(torch.float64).dtype == torch.float64
    assert nn.Linear(2, 2).to(torch.half).weight.dtype == torch.half


def test_default_device(patched):
    found = []

    def program():
        torch.set_default_device("cuda")
        found.append(torch.zeros(2).device.type)

    thread = threading.Thread(target=program)  # the device is per thread, and torch 2.8 cannot unset it
    thread.start()
    thread.join()
    assert found == ["cpu"]


def test_function_with_an_own_backward(patched):
    class Double(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx, gradient):
            return gradient * 2

    x = torch.rand(3, device="cuda", requires_grad=True)
    with torch.autocast("cuda"):
        Double.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def places():
    """Return the current values of everything that is replaced."""
    return {f"{owner}.{name}": vars(owner).get(name) for owner, name, _ in cuda_calls._replacements()}


def test_all_is_put_back():
    before = places()
    patch_cuda()
    patch_cuda()
    changed = places()
    unpatch_cuda()
    assert len([name for name, value in before.items() if changed[name] is not value]) > 50
    assert {name: id(value) for name, value in places().items()} == {name: id(value) for name, value in before.items()}
    unpatch_cuda()
    assert not torch.cuda.is_available()


@pytest.mark.slow
def test_compiled_function(patched):
    compiled = torch.compile(lambda x: torch.zeros(2, device="cuda") + x.cuda(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.ones(2))
