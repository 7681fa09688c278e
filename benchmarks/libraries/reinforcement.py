"""Agents of stable-baselines3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.libraries.programs import Fit, Trained, program


@program("stable-baselines3", "MlpExtractor, trained by Adam", "Linear, trained by Adam")
def ppo(small: bool) -> Fit:
    """PPO on CartPole."""
    steps, each = (512, 256) if small else (6144, 2048)
    return _agent("PPO", "CartPole-v1", steps, lambda policy, seen: policy.predict_values(seen), n_steps=each)


@program("stable-baselines3", "QNetwork, trained by Adam")
def dqn(small: bool) -> Fit:
    """DQN on CartPole."""
    return _agent(
        "DQN", "CartPole-v1", 400 if small else 16000, lambda policy, seen: policy.q_net(seen), learning_starts=100
    )


@program(
    "stable-baselines3", "Sequential, trained by Adam", "Linear, trained by Adam", "ContinuousCritic, trained by Adam"
)
def sac(small: bool) -> Fit:
    """SAC on Pendulum."""
    return _agent("SAC", "Pendulum-v1", 250 if small else 900, lambda policy, seen: policy.critic(seen, seen[:, :1])[0])


def _agent(kind: str, environment: str, steps: int, output: Callable[[Any, Any], Any], **settings: Any) -> Fit:
    """Return a function that trains an agent. Its loss is the mean square of the policy's outputs for observations."""
    import stable_baselines3
    from stable_baselines3.common.logger import Logger

    agent = getattr(stable_baselines3, kind)("MlpPolicy", environment, seed=0, device="cpu", **settings)
    agent.set_logger(Logger(None, []))  # the default one leaves a temporary folder behind

    def fit() -> Trained:
        agent.learn(steps)
        seen = torch.linspace(-1, 1, 16 * agent.observation_space.shape[0]).reshape(16, -1)
        with torch.no_grad():
            return Trained([agent.policy], output(agent.policy, seen).square().mean().item())

    return fit
