"""The content of /proc/cpuinfo: the name, the ids and the instruction sets of each processor."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from nano_loop.cpu.tree import Tree, parse_number

Block = Mapping[str, str]

# /proc/cpuinfo on ARM has no model name, only the numbers of implementer and part. These are common server CPUs.
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
    """Return the fields of each block of /proc/cpuinfo, one block per processor."""
    chunks = re.split(r"\n\s*\n", tree.text("/proc/cpuinfo"))
    return tuple(block for chunk in chunks if (block := _parse_block(chunk)))


def field_by_cpu(blocks: Sequence[Block], field: str) -> dict[int, int]:
    """Return the numeric value of `field` by processor, for the processors that have one."""
    numbers = [(parse_number(block.get("processor")), parse_number(block.get(field))) for block in blocks]
    return {cpu: number for cpu, number in numbers if cpu is not None and number is not None}


def tidy_name(name: str) -> str:
    """Remove the uninformative parts of a model name such as ``Intel(R) Xeon(R) Gold 6338 CPU @ 2.00GHz``."""
    return " ".join(_NOISE.sub(" ", name).split())


def cpu_name(blocks: Sequence[Block]) -> str:
    """Return the processor's short model name, or an empty string."""
    for block in blocks:
        # gVisor writes "unknown" if it has no name.
        if (name := tidy_name(block.get("model name", ""))) and name != "unknown":
            return name
    return next(filter(None, map(_arm_name, blocks)), "")


def cpuinfo_instruction_sets(blocks: Sequence[Block]) -> frozenset[str]:
    """Return the instruction sets that all processors support, since a thread may run on any of them."""
    listed = [set(text.lower().split()) for block in blocks if (text := block.get("flags") or block.get("Features"))]
    return frozenset(set.intersection(*listed)) if listed else frozenset()


def _parse_block(chunk: str) -> dict[str, str]:
    pairs = [line.partition(":") for line in chunk.splitlines()]
    return {field.strip(): value.strip() for field, colon, value in pairs if colon}


def _arm_name(block: Block) -> str:
    try:
        maker, part = (int(block[f"CPU {field}"], 16) for field in ("implementer", "part"))
    except (KeyError, ValueError):
        return ""
    return "Apple silicon" if maker == APPLE else ARM_NAMES.get((maker, part), "")
