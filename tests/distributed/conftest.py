"""Teams of two and of three processes, shared by the tests."""

import pytest

from .team import Team


@pytest.fixture(scope="session")
def teams():
    """By their sizes; a team that a test has broken is made anew."""
    made = {}
    yield made
    for team in made.values():
        team.close()


@pytest.fixture
def team(teams):
    """Give the team of a size: ``team(2)(function, *args)`` calls ``function(ranks, *args)`` in two processes."""

    def of(size):
        if size in teams and teams[size].broken:
            teams.pop(size).close()
        if size not in teams:
            teams[size] = Team(size)
        return teams[size]

    return of
