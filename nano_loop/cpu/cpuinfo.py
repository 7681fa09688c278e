"""What /proc/cpuinfo says of each processor: its name, its ids and its instruction sets."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from nano_loop.cpu.tree import Tree, parse_number

Block = Mapping[str, str]

# ARM's /proc/cpuinfo names no model, only the numbers of its maker and part. These train models.
ARM_NAMES = {
    (0x41, 0xD0C): "Neoverse N1",
    (0x41, 0xD40): "Neoverse V1",
    (0x41, 0xD49): "Neoverse N2",
    (0x41, 0xD4F): "Neoverse V2",
    (0x41, 0xD84): "Neoverse V3",
    (0xC0, 0xAC3): "Ampere-1",
    (0xC0, 0xAC4): "Ampere-1a",
}
APPLE = 0x61

_NOISE = re.compile(r"\((?:R|TM)\)|\bCPU\b|@.*| w/ .*|\b\S+-Cores?( Processor)?\b|\bwith .*", re.IGNORECASE)


def read_cpuinfo(tree: Tree) -> tuple[Block, ...]:
    """Return the fields of each block of /proc/cpuinfo, one block a processor."""
    chunks = re.split(r"\n\s*\n", tree.text("/proc/cpuinfo"))
    return tuple(block for chunk in chunks if (block := _parse_block(chunk)))


def field_by_cpu(blocks: Sequence[Block], field: str) -> dict[int, int]:
    """Return the number that each processor's `field` holds, for those that have one."""
    numbers = [(parse_number(block.get("processor")), parse_number(block.get(field))) for block in blocks]
    return {cpu: number for cpu, number in numbers if cpu is not None and number is not None}


def tidy_name(name: str) -> str:
    """Cut what says nothing from a model name: ``Intel(R) Xeon(R) Gold 6338 CPU @ 2.00GHz``."""
    return " ".join(_NOISE.sub(" ", name).split())


def cpu_name(blocks: Sequence[Block]) -> str:
    """Return the processor's short model name, or an empty string."""
    for block in blocks:
        # gVisor writes "unknown" where it knows no name.
        if (name := tidy_name(block.get("model name", ""))) and name != "unknown":
            return name
    return next(filter(None, map(_arm_name, blocks)), "")


def cpuinfo_instruction_sets(blocks: Sequence[Block]) -> frozenset[str]:
    """Return what every processor can do: a thread may be moved to any of them."""
    listed = [set(text.lower().split()) for block in blocks if (text := _flags(block))]
    return frozenset(set.intersection(*listed)) if listed else frozenset()


def architecture(blocks: Sequence[Block]) -> str:
    """Guess the architecture from the fields that only one of them has, or return an empty string."""
    fields = {field for block in blocks for field in block}
    if "CPU implementer" in fields:
        return "aarch64"
    return "x86_64" if "flags" in fields else ""


def _parse_block(chunk: str) -> dict[str, str]:
    pairs = [line.partition(":") for line in chunk.splitlines()]
    return {field.strip(): value.strip() for field, colon, value in pairs if colon}


def _flags(block: Block) -> str:
    return block.get("flags") or block.get("Features") or ""


def _arm_name(block: Block) -> str:
    try:
        maker, part = (int(block[f"CPU {field}"], 16) for field in ("implementer", "part"))
    except (KeyError, ValueError):
        return ""
    return "Apple silicon" if maker == APPLE else ARM_NAMES.get((maker, part), "")
