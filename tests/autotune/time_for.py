"""Budgets of tests, which say by themselves whether there is time for a measurement, and clocks."""


class TimeFor:
    """A budget of some seconds. See `nano_loop.autotune.budget.Budget`."""

    def __init__(self, seconds, asked=None):
        self.seconds = seconds
        self.asked = [] if asked is None else asked
        self.turn = 0

    def left(self, spent):
        self.asked.append(spent)
        return self.seconds - spent


ALWAYS = TimeFor(float("inf"))


class Clock:
    """A clock that algorithms put on."""

    now = 0.0

    def __call__(self):
        return self.now
