"""Budgets for tests, which decide themselves whether there is time for a measurement, and clocks."""


class TimeFor:
    """A budget of some seconds. See `nano_loop.autotune.tuner.Budget`."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.asked = []  # the remaining time at each query

    def left(self):
        self.asked.append(self.seconds)
        return self.seconds

    def spend(self, seconds):
        self.seconds -= seconds


ALWAYS = TimeFor(float("inf"))


class Clock:
    """A clock that algorithms advance."""

    now = 0.0

    def __call__(self):
        return self.now
