"""Lightning's Trainer trains on Ray actors, and a loop joins the processes that Ray Train has started."""

import datetime
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest
import torch
from distributed import small
from torch import distributed

import nano_loop
from clusters.nodes import processes_of
from nano_loop import nano

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("connected", "nothing_left_on_the_cluster")]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

TRAINER = """
import sys, warnings
warnings.simplefilter("ignore")
import ray, torch
ray.init(sys.argv[1], log_to_driver=False)
pl = __import__("pytorch_lightning" if sys.argv[2] == "pytorch_lightning" else "lightning.pytorch", fromlist=["x"])
Trainer = __import__(f"nano_loop.{sys.argv[2]}", fromlist=["Trainer"]).Trainer
from torch.utils.data import DataLoader, TensorDataset
class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 1)
        torch.nn.init.constant_(self.linear.weight, 0.5)
        torch.nn.init.zeros_(self.linear.bias)
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.linear(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)
x = torch.rand(32, 8, generator=torch.Generator().manual_seed(0))
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
for backend in ("ray", "subprocess"):
    lit = module = Lit()
    if sys.argv[3] == "compiled":
        module = Trainer.compile(lit.linear, torch.nn.MSELoss(), torch.optim.SGD(lit.linear.parameters(), 0.05))
    trainer = Trainer(num_processes=2, distributed_backend=backend, auto_lr=False, verbose=False, max_epochs=2, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4))
    print(trainer.world_size, lit.linear.weight.tolist())
"""


@pytest.mark.parametrize(
    ("package", "kind"),
    [("pytorch_lightning", "of the user's own"), ("lightning", "compiled")],
    ids=["own", "compiled"],
)
def test_trainer_trains_on_ray_as_in_subprocesses(connected, package, kind):
    code, out, err = processes_of([sys.executable, "-c", TRAINER, connected.address, package, kind])
    assert code == 0, err
    on_ray, in_subprocesses = out.splitlines()[-2:]
    assert on_ray == in_subprocesses
    assert on_ray.startswith("2 [[")
    assert str([0.5] * 8) not in on_ray  # the initial weights


def train_here(rank, size, address, port, has_group):
    """Train as in a `TorchTrainer`'s function: with Ray Train's variables and process group, and in a thread."""
    own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "NODE_RANK": 0}
    os.environ.update({name: str(value) for name, value in own.items()}, MASTER_ADDR=address, MASTER_PORT=str(port))
    if has_group:
        waiting = datetime.timedelta(seconds=60)
        distributed.init_process_group("gloo", init_method="env://", rank=rank, world_size=size, timeout=waiting)

    def loop(model, optimizer, loader):
        small.fit(model, optimizer, loader)
        return nano_loop.world_size()

    def train_func():
        model, optimizer, loader = small.parts()
        train = nano(auto_lr=False, verbose=False, timeout=60)(loop)
        counts = [train(model, optimizer, loader) for _ in range(2)]  # a loop that is called once per epoch
        return counts, small.weights(model), train.report["threads"].status

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(train_func).result()
    left = distributed.is_initialized()
    if left:  # Ray Train uses its process group after the function
        ones = torch.ones(1)
        distributed.all_reduce(ones)
        left = int(ones) == size
        distributed.destroy_process_group()
    return *found, left


@pytest.mark.parametrize("has_group", [False, True], ids=["variables", "process group"])
def test_loop_inside_ray_train_joins_the_processes_that_are_there(has_group):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    task = ray.remote(num_cpus=1, max_calls=1)(train_here)
    found = ray.get([task.remote(rank, 2, "127.0.0.1", port, has_group) for rank in range(2)])
    model, optimizer, loader = small.parts(batch_size=8)
    for _ in range(2):
        small.fit(model, optimizer, loader)
    for counts, weights, threads, left in found:
        assert counts == [2, 2]
        torch.testing.assert_close(weights, small.weights(model), rtol=1e-6, atol=1e-6)
        assert threads == "applied"  # Ray's OMP_NUM_THREADS is not the user's choice, nor below a rank's share
        assert left == has_group
