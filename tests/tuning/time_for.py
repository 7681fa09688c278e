"""Budgets of tests, which say by themselves whether there is time for a measurement."""


class TimeFor:
    """A budget of some seconds. See `nano_loop.autotune.budget.Budget`."""

    def __init__(self, seconds, asked=None):
        self.seconds = seconds
        self.asked = [] if asked is None else asked
        self.turn = 0

    def left(self, spent):
        self.asked.append(spent)
        return self.seconds - spent


ALWAYS, NEVER = TimeFor(float("inf")), TimeFor(0.0)
