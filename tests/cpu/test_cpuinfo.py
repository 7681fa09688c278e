"""Names of processors in /proc/cpuinfo on x86 and ARM."""

import pytest

from nano_loop.cpu.cpuinfo import cpu_name, tidy_name


@pytest.mark.parametrize(
    ("raw", "tidy"),
    [
        ("Intel(R) Xeon(R) Gold 6338 CPU @ 2.00GHz", "Intel Xeon Gold 6338"),
        ("Intel(R) Xeon(R) CPU E5-2630 v3 @ 2.40GHz", "Intel Xeon E5-2630 v3"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "Intel Xeon"),
        ("Intel(R) Xeon(R) Platinum 8481C", "Intel Xeon Platinum 8481C"),
        ("12th Gen Intel(R) Core(TM) i7-1260P", "12th Gen Intel Core i7-1260P"),
        ("AMD EPYC 9354 32-Core Processor", "AMD EPYC 9354"),
        ("AMD Ryzen Threadripper PRO 5995WX 64-Cores", "AMD Ryzen Threadripper PRO 5995WX"),
        ("AMD Ryzen 7 7840U w/ Radeon 780M Graphics", "AMD Ryzen 7 7840U"),
        ("AMD Ryzen 5 PRO 4650U with Radeon Graphics", "AMD Ryzen 5 PRO 4650U"),
        ("AMD EPYC", "AMD EPYC"),
        ("", ""),
    ],
)
def test_a_model_name_loses_what_says_nothing(raw, tidy):
    assert tidy_name(raw) == tidy


@pytest.mark.parametrize(
    ("implementer", "part", "name"),
    [
        ("0x41", "0xd0c", "Neoverse N1"),
        ("0x41", "0xd4f", "Neoverse V2"),
        ("0xc0", "0xac3", "Ampere-1"),
        ("0x61", "0x023", "Apple silicon"),
        ("0x41", "0x123", ""),
        ("0xzz", "0xd0c", ""),
    ],
)
def test_an_arm_processor_is_named_by_its_numbers(implementer, part, name):
    assert cpu_name([{"CPU implementer": implementer, "CPU part": part}]) == name
