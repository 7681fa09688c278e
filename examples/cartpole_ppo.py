"""Balance poles on carts by reinforcement learning (PPO), with the whole program inside `with accelerated():`.

    python examples/cartpole_ppo.py                     # accelerated
    python examples/cartpole_ppo.py --plain             # the same loop without nano_loop
    python examples/cartpole_ppo.py --updates 5 --carts 8

The agent and its optimizer are created inside, and set up when they are trained. The carts are simulated in this file.
"""

import argparse
import contextlib
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser(description="Balance poles on carts by reinforcement learning.")
parser.add_argument("--plain", action="store_true", help="run the same loop without nano_loop")
parser.add_argument("--precision", default="auto", help="32, bf16 or auto (default: auto)")
parser.add_argument("--updates", type=int, default=30, help="of the agent, each after 128 moves of each cart")
parser.add_argument("--carts", type=int, default=32)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
args = parser.parse_args()

precision = 32 if args.precision == "32" else args.precision
moves, epochs, batch_size = 128, 4, 256
discount, trace, clip = 0.99, 0.95, 0.2


class Carts:
    """Poles on carts that are pushed to the left or to the right (Barto, Sutton and Anderson, 1983), many at a time."""

    def __init__(self, count):
        self.state = torch.zeros(count, 4)
        self.age = torch.zeros(count)
        self.restart(torch.ones(count, dtype=torch.bool))

    def restart(self, chosen):
        """Reset carts to the centre, with almost upright poles."""
        self.state[chosen] = 0.1 * torch.rand(int(chosen.sum()), 4) - 0.05
        self.age[chosen] = 0

    def push(self, actions):
        """Push each cart for 20 ms, to the left (0) or to the right (1), and return which episodes have ended."""
        _, speed, angle, spin = self.state.unbind(1)
        sine, cosine = angle.sin(), angle.cos()
        force = (20.0 * actions - 10.0 + 0.05 * spin**2 * sine) / 1.1
        turn = (9.8 * sine - cosine * force) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        change = torch.stack([speed, force - 0.05 * turn * cosine / 1.1, spin, turn], dim=1)
        self.state = self.state + 0.02 * change
        self.age += 1
        over = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21) | (self.age >= 500)
        self.restart(over)
        return over


class Agent(nn.Module):
    """Map states to the logits of the two actions, and to the discounted number of moves that a pole will stay up."""

    def __init__(self, width):
        super().__init__()
        self.policy, self.value = (
            nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs))
            for outputs in (2, 1)
        )

    def forward(self, states):
        return F.log_softmax(self.policy(states), dim=-1), self.value(states).squeeze(-1)


@torch.no_grad()
def play(agent, carts):
    """Return states, actions, log-probabilities, advantages and returns of a rollout, and its number of episodes."""
    states, actions, chances, values, overs = [], [], [], [], []
    for _ in range(moves):
        logits, value = agent(carts.state)
        action = torch.multinomial(logits.exp(), 1).squeeze(1)
        states.append(carts.state)
        actions.append(action)
        chances.append(logits.gather(1, action[:, None]).squeeze(1))
        values.append(value)
        overs.append(carts.push(action))
    following, advantage, advantages = agent(carts.state)[1], torch.zeros(args.carts), []
    for value, over in zip(reversed(values), reversed(overs), strict=True):
        goes_on = 1 - over.float()
        advantage = 1 + discount * following * goes_on - value + discount * trace * advantage * goes_on
        advantages.append(advantage)
        following = value
    columns = torch.cat(states), torch.cat(actions), torch.cat(chances), torch.cat(advantages[::-1])
    return *columns, columns[-1] + torch.cat(values), int(torch.stack(overs).sum())


def train():
    """Train an agent, and return the mean number of moves per episode."""
    agent, carts = Agent(args.width), Carts(args.carts)
    optimizer = torch.optim.Adam(agent.parameters(), 1e-3)
    length = 0.0
    for update in range(args.updates):
        states, actions, chances, advantages, returns, attempts = play(agent, carts)
        advantages = (advantages - advantages.mean()) / advantages.std()
        for _ in range(epochs):
            for rows in torch.randperm(len(states)).split(batch_size):
                logits, value = agent(states[rows])
                ratio = (logits.gather(1, actions[rows, None]).squeeze(1) - chances[rows]).exp()
                gain = torch.minimum(ratio * advantages[rows], ratio.clamp(1 - clip, 1 + clip) * advantages[rows])
                entropy = -(logits.exp() * logits).sum(dim=1)
                loss = -gain.mean() + 0.5 * F.smooth_l1_loss(value, returns[rows]) - 0.01 * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        length = len(states) / max(attempts, 1)
        print(f"update {update + 1}: {length:.0f} moves an attempt", flush=True)
    return length


if args.plain:
    around = contextlib.nullcontext()
else:
    from nano_loop import accelerated

    around = accelerated(precision=precision)

torch.manual_seed(args.seed)
start = time.perf_counter()
with around:
    length = train()
seconds = time.perf_counter() - start

print(f"{length:.0f} moves an attempt after {seconds:.1f} s of training")
if args.json:
    args.json.write_text(json.dumps({"seconds": seconds, "moves": length}))
