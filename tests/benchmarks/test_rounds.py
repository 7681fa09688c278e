"""Systems take turns: each begins some round, and none always follows the same other one."""

from itertools import pairwise

from benchmarks import rounds
from benchmarks.rounds import Plan, in_turn, measure

NAMES = ["plain", "compile", "nano"]


def test_each_begins_and_each_ends_some_round():
    rounds = [in_turn(NAMES, number) for number in range(2 * len(NAMES))]
    assert {each[0] for each in rounds} == {each[-1] for each in rounds} == set(NAMES)


def test_none_always_follows_the_same():
    rounds = [in_turn(NAMES, number) for number in range(2)]
    first, second = (set(pairwise(each)) for each in rounds)
    assert not first & second


def test_a_system_that_has_to_start_with_settings_gets_a_process_with_them(monkeypatch):
    fresh_jobs, forked_jobs = [], []

    def fresh(job, *, python, settings, **_):
        fresh_jobs.append((job["system"], dict(settings)))
        return {"median_ms": 1.0}

    def forked(job, **_):
        forked_jobs.append(job.get("system"))
        return {"median_ms": 1.0}

    monkeypatch.setattr(rounds, "fresh", fresh)
    monkeypatch.setattr(rounds, "settings_of", {"expert_jemalloc": {"LD_PRELOAD": "x"}, "plain": {}}.get)
    monkeypatch.setattr(rounds, "why_not", lambda system: None)
    plan = Plan(["mlp"], ["plain", "expert_jemalloc"], rounds=1, small=True, limit=9, run=forked)
    (measured,) = measure(plan)
    assert fresh_jobs == [("expert_jemalloc", {"LD_PRELOAD": "x"})]
    assert forked_jobs == [None, None, "plain"]  # FLOPs and the rate of products, then the system
    assert set(measured.rounds[0]) == {"plain", "expert_jemalloc"}
