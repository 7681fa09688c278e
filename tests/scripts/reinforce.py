"""A policy that learns by REINFORCE to keep a pole upright, without a loader; the loss covers its own actions."""

import torch
from torch import nn, optim
from torch.distributions import Categorical

from nano_loop import nano

UNDIVIDED = True


class Pole:
    """Falls to the side that it is not pushed from."""

    def reset(self):
        self.angle, self.steps = 0.1, 0
        return torch.tensor([self.angle, float(self.steps)])

    def step(self, action):
        self.angle = self.angle * 1.2 + (0.05 if action else -0.05)
        self.steps += 1
        return torch.tensor([self.angle, self.steps / 10]), 1.0, abs(self.angle) > 0.5 or self.steps == 10


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1, self.affine2 = nn.Linear(2, 16), nn.Linear(16, 2)
        self.saved_log_probs, self.rewards = [], []

    def forward(self, x):
        return torch.softmax(self.affine2(torch.relu(self.affine1(x))), dim=0)


def log_action(policy, state, action):
    m = Categorical(policy(state))
    policy.saved_log_probs.append(m.log_prob(action))
    return action.item()


def finish_episode(policy, optimizer):
    R, returns = 0, []
    for r in policy.rewards[::-1]:
        R = r + 0.99 * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    policy_loss = torch.stack([-p * R for p, R in zip(policy.saved_log_probs, returns, strict=True)]).sum()
    optimizer.zero_grad()
    policy_loss.backward()
    optimizer.step()
    del policy.rewards[:], policy.saved_log_probs[:]


@nano
def train(policy, optimizer, env, episodes):
    lengths = []
    for i_episode in range(episodes):
        state, done, t = env.reset(), False, 0
        while not done:
            # Exploration uses fixed actions, since ranks draw different random numbers.
            action = log_action(policy, state, torch.tensor((i_episode + t) % 3 % 2))
            state, reward, done = env.step(action)
            policy.rewards.append(reward)
            t += 1
        finish_episode(policy, optimizer)
        lengths.append(t)
    return lengths


torch.manual_seed(543)
policy = Policy()
lengths = train(policy, optim.Adam(policy.parameters(), lr=1e-2), Pole(), 6)
RESULT = {"lengths": lengths, "policy": policy.state_dict()}
