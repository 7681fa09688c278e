"""Choices are saved in a user's file, which other runs may write to as well, and which may be damaged."""

import json
import shutil

import pytest
import torch

from nano_loop.autotune import choices as module
from nano_loop.autotune.choices import Choice, Choices, choices_for
from nano_loop.cpu import read_machine
from nano_loop.kernels import compiler

FASTER = Choice("fp32", "bf16", {"bf16": 3.0, "fp32": 2.0})


def test_choices_are_there_again_and_those_of_others_too(tmp_path):
    path = tmp_path / "choices.json"
    mine, others = Choices(path), Choices(path)
    mine.put("a", FASTER)
    others.put("b", FASTER._replace(algorithm="bf16"))
    others.save()
    mine.save()
    assert Choices(path).all() == {"a": FASTER, "b": FASTER._replace(algorithm="bf16")}
    assert [each.name for each in tmp_path.iterdir()] == ["choices.json"]


def test_gain_is_that_over_the_guess():
    assert FASTER.gain == 1
    assert FASTER._replace(algorithm="bf16").gain == 0
    assert FASTER._replace(algorithm="bf16", guess="fp32").gain == 0  # other programs slowed down its best run
    assert FASTER._replace(milliseconds={}).gain == 0  # no timing without an alternative


def test_what_was_measured_beside_other_programs_is_for_one_run_and_not_kept(measuring):
    machine = read_machine()
    choices = choices_for(machine)
    choices.put("quiet", FASTER)
    choices.save()
    choices.put("busy", FASTER)
    choices.save(is_busy=True)
    choices.save()
    assert choices.get("busy") == FASTER
    assert choices_for(machine).all() == {"quiet": FASTER}  # the next run of this process
    (path,) = measuring.glob("operators-*.json")
    assert Choices(path).all() == {"quiet": FASTER}


def test_nothing_new_writes_nothing_and_what_was_taken_over_is_not_saved(tmp_path):
    choices = Choices(tmp_path / "choices.json")
    choices.take_over({"a": FASTER})
    choices.save()
    assert choices.get("a") == FASTER
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        "[]",
        json.dumps({"format": 0, "choices": {"a": FASTER}}),
        json.dumps({"format": 6, "choices": [FASTER]}),
        json.dumps({"format": 6, "choices": {"a": ["fp32"], "b": [1, "x", {}], "c": ["x", "x", {"x": "fast"}]}}),
    ],
)
def test_damaged_file_counts_as_empty_and_is_replaced(tmp_path, text):
    path = tmp_path / "choices.json"
    path.write_text(text)
    choices = Choices(path)
    assert len(choices) == 0
    choices.put("b", FASTER)
    choices.save()
    assert Choices(path).all() == {"b": FASTER}


def test_file_that_cannot_be_written_is_left(tmp_path):
    choices = Choices(tmp_path / "absent" / "choices.json")
    choices.put("a", FASTER)
    choices.save()
    assert choices.get("a") == FASTER


def test_other_c_files_have_their_own_choices(measuring, monkeypatch, tmp_path):
    machine = read_machine()
    choices_for(machine).put("a", FASTER)
    sources = shutil.copytree(compiler.SOURCES, tmp_path / "csrc")
    (sources / "product.c").write_text("/* faster */")
    monkeypatch.setattr(compiler, "SOURCES", sources)
    compiler.sources_digest.cache_clear()
    try:
        assert choices_for(machine).get("a") is None
    finally:
        compiler.sources_digest.cache_clear()


def test_each_number_of_threads_and_each_kind_of_kernels_have_their_choices(measuring, monkeypatch):
    machine, threads = read_machine(), torch.get_num_threads()
    choices_for(machine).put("a", FASTER)
    choices_for(machine).save()
    monkeypatch.setattr(module, "_opened", {})  # as in another process
    assert choices_for(machine).get("a") == FASTER
    torch.set_num_threads(threads + 1)
    try:
        assert choices_for(machine).get("a") is None
    finally:
        torch.set_num_threads(threads)
    for name, value in (("NANO_LOOP_KERNELS", "v3"), ("ONEDNN_MAX_CPU_ISA", "AVX2")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert choices_for(machine).get("a") is None


def test_without_a_cache_folder_choices_live_as_long_as_the_process(measuring, monkeypatch):
    monkeypatch.setattr(module, "cache_folder", lambda: None)
    choices_for(read_machine()).put("a", FASTER)
    choices_for(read_machine()).save()
    assert choices_for(read_machine()).get("a") == FASTER
    assert not measuring.exists()
