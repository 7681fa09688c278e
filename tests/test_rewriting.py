"""A function that builds its model inside is shown as a `TorchNano`, with the user's own names, in code that runs."""

import argparse
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from watched import seeded  # noqa: F401 - a fixture

import nano_loop
from nano_loop import NanoConfigError, nano

ARGS = argparse.Namespace(lr=0.1, epochs=1)


def main(args, seed=3):
    net = nn.Linear(2, 1)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr)
    train_loader = DataLoader(torch.ones(8, 2), 2)
    for _ in range(args.epochs):
        for _, x in enumerate(train_loader):
            opt.zero_grad()
            net(x).sum().backward()
            opt.step()


def gan(path, *, betas=(0.5, 0.9)):
    generator, critic = nn.Linear(1, 2), nn.Linear(2, 1)
    optimizer_g = torch.optim.Adam(generator.parameters(), betas=betas)
    optimizer_c = torch.optim.Adam(params=critic.parameters())
    both = torch.optim.SGD(itertools.chain(generator.parameters(), critic.parameters()))
    data = torch.utils.data.DataLoader([path])
    test = DataLoader([path])
    return optimizer_g, optimizer_c, both, data, test


def helped(config):
    model, optimizer, data = config.build()
    for _ in range(config.epochs):
        for x in data:
            model(x).sum().backward()
            optimizer.step()


class Experiment:
    """Builds its parts when it runs."""

    def run(self, lr: float = 0.1):
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)


def refusal(function, *args, **options):
    with pytest.raises(NanoConfigError) as caught:
        nano(**options)(function)(*args)
    message, _, code = str(caught.value).partition("\n\n")
    return message, "\n".join(line.removeprefix("    ") for line in code.splitlines())


def test_main_that_builds_its_parts_is_shown_with_its_own_names():
    message, code = refusal(main, ARGS, num_processes=2, precision="bf16", verbose=True)
    assert message.startswith("main(args, seed) was called without a model: nano accelerates the models among")
    assert message.endswith("main builds its model, so write it as the train method of a TorchNano.")
    assert code == (
        "class Main(nano_loop.TorchNano):\n"
        "    def train(self, args, seed=3):\n"
        "        ...  # what builds them, as it is\n"
        "        net, opt, train_loader = self.setup(net, opt, train_loader)\n"
        "        ...  # the loop, as it is\n"
        "\n"
        "Main(num_processes=2, precision='bf16').train(args, seed)"
    )


def test_shown_code_trains():
    _, code = refusal(main, ARGS, verbose=False)
    built = "net = nn.Linear(2, 1); opt = torch.optim.SGD(net.parameters(), lr=args.lr)"
    code = code.replace("...  # what builds them, as it is", f"{built}; train_loader = DataLoader(torch.ones(8, 2), 2)")
    code = code.replace("...  # the loop, as it is", "return opt.param_groups[0]['fused'], len(train_loader)")
    names = {"nano_loop": nano_loop, "nn": nn, "torch": torch, "DataLoader": DataLoader, "args": ARGS, "seed": 3}
    class_, _, call = code.rpartition("\n")
    exec(class_, names)
    assert eval(call, names) == (True, 4)


@pytest.mark.parametrize(
    ("function", "args", "lines"),
    [
        (
            gan,
            ("here",),
            (
                "class Gan(nano_loop.TorchNano):",
                "    def train(self, path, *, betas=...):",
                "Gan().train(path, betas=betas)",
                "        generator, optimizer_g, [data, test] = self.setup(generator, optimizer_g, data, test)",
                "        critic, optimizer_c = self.setup(critic, optimizer_c)",
                "        [generator, critic], both = self.setup([generator, critic], both)",
            ),
        ),
        (helped, (ARGS,), ("        model, optimizer, data = self.setup(model, optimizer, data)",)),
        (
            Experiment.run,
            (Experiment(),),
            (
                "class Experiment(nano_loop.TorchNano):",
                "    def train(self, lr=0.1):",
                "        self.model, self.optimizer = self.setup(self.model, self.optimizer)",
                "Experiment().train(lr)",
            ),
        ),
    ],
    ids=["gan", "helped", "method"],
)
def test_each_way_to_build_is_shown(function, args, lines):
    _, code = refusal(function, *args)
    for line in lines:
        assert line in code.splitlines()


def test_function_without_source_is_shown_with_usual_names(monkeypatch):
    names = {}
    exec("def load_and_fit(path): return path", names)
    monkeypatch.setenv("NANO_LOOP_PRECISION", "32")
    message, code = refusal(names["load_and_fit"], "here")
    assert "Pass the model as an argument. If load_and_fit builds it, write it as the train method" in message
    assert code.splitlines()[0] == "class LoadAndFit(nano_loop.TorchNano):"
    assert "        model, optimizer = self.setup(model, optimizer)" in code.splitlines()
    assert code.splitlines()[-1] == "LoadAndFit().train(path)"


@pytest.mark.parametrize("function", [max, lambda: 3, print], ids=["max", "lambda", "print"])
def test_what_has_no_source_or_signature_is_refused_all_the_same(function):
    args = () if function is not max else (1, 2)
    assert "without a model" in refusal(function, *args)[0]
