"""Scripts with a loop under `nano`, for the commands that start a script."""

LOOP = """
import sys, time, torch, nano_loop
from torch import nn

@nano_loop.nano({options})
def train(model, optimizer, batches):
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

model = {model}
train(model, torch.optim.SGD(model.parameters(), lr=0.1), {batches})
"""


def looped(batches, options="num_threads=1, verbose=False", model="nn.Linear(8, 1)"):
    """Return a script that trains a model on batches, all given as code."""
    return LOOP.format(batches=batches, options=options, model=model)
