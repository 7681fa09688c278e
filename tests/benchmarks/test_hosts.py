"""The benchmark of two hosts compares its ways round by round, and says where there can be no network."""

import pytest

from benchmarks import hosts


def test_table_has_medians_and_the_ratios_of_each_round():
    times = {way: [100.0, 200.0, 300.0] for way in hosts.WAYS} | {"buckets at the end": [150.0, 400.0, 300.0]}
    rows = hosts.table({"lstm": times}).splitlines()
    assert rows[0] == "| | lstm |"
    assert "| buckets at the end | 300 ms, 1.50× (1.00 to 2.00) |" in rows
    assert "| buckets | 200 ms, 1.00× (1.00 to 1.00) |" in rows


def test_without_root_it_says_so(monkeypatch):
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match="no two hosts here: network namespaces need root"):
        hosts.main([])
