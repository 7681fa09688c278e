"""The table of faults, from the modules that commit them."""

from faults import (
    callers,
    damaged_files,
    diverging,
    exceptions_in_a_worker,
    exceptions_in_rank_0,
    exits,
    loaders,
    other_users,
    payloads,
    resources,
    settings_of_the_caller,
    streams,
)

FAULTS = [
    *exceptions_in_a_worker.FAULTS,
    *exceptions_in_rank_0.FAULTS,
    *exits.FAULTS,
    *diverging.FAULTS,
    *loaders.FAULTS,
    *payloads.FAULTS,
    *streams.FAULTS,
    *resources.FAULTS,
    *other_users.FAULTS,
    *damaged_files.FAULTS,
    *settings_of_the_caller.FAULTS,
    *callers.FAULTS,
]
