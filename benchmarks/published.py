"""Write stored results as tables of docs/, and as the README's headline and chart.

    python -m benchmarks.published benchmarks/results/*.json
    python -m benchmarks.published benchmarks/results/*.json --page docs/results.md
    python -m benchmarks.published benchmarks/results/NAME.json --picture docs/speed-ups.png

A test checks that the documents and the chart agree with the stored results.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.between import largest_savings, savings_of_models
from benchmarks.chart import SpeedUps, draw_speed_ups
from benchmarks.markdown import table
from benchmarks.shapes import markdown
from benchmarks.summary import set_matmul_shares
from benchmarks.surroundings import heading

WORKLOADS = {
    "resnet50": "ResNet-50, 16 × 224², SGD",
    "vit": "ViT-S, 16 × 224², AdamW",
    "bert": "BERT-base with dropout, 8 × 128, AdamW",
    "gpt2": "GPT-2, 6 layers, 4 × 256, AdamW",
    "lstm": "LSTM language model, 16 × 64, AdamW",
    "unet": "U-Net, 4 × 128², AdamW",
    "mlp": "MLP on tabular data through a `DataLoader`, AdamW",
    "resnet18_folder": "ResNet-18, JPEG files through a `DataLoader`, SGD",
    "mobilenet": "MobileNetV2, 32 × 224², SGD",
    "efficientnet": "EfficientNet-B0, 32 × 224², SGD",
    "convnext": "ConvNeXt-T, 8 × 224², AdamW",
    "distilbert": "DistilBERT with dropout, 8 × 128, AdamW",
    "t5": "T5-small with dropout, 8 × 128, AdamW",
    "group_norm_unet": "U-Net with group norm, 8 × 160², AdamW",
    "tabular": "tabular: pytorch_tabular, 128-64-32",
    "policy": "policy: stable-baselines3, PPO, 64 × 64",
    "critic": "critics: stable-baselines3, SAC, 256 × 256",
    "gru_forecast": "GRU: neuralforecast, 2 × 200",
    "lstm_forecast": "LSTM: neuralforecast, 2 × 200",
    "tcn_forecast": "TCN: neuralforecast, 128 channels",
    "transformer_forecast": "transformer: darts, 3 + 3 layers",
    "nbeats": "N-BEATS: darts, 30 stacks",
    "autoencoder": "autoencoder: pyod, 64-32-64",
    "lenet": "LeNet: PyTorch's tutorial, 4 images",
    "gnn": "GCN: PyG's example, Cora's size",
    "text_cnn": "text CNN: Kim 2014",
    "tabnet": "TabNet: pytorch-tabnet, 1,024 rows",
    "bpr": "BPR: RecBole, 200,000 × 64",
    "wide": "perceptron: Keras' example, 512 × 512",
}
#: Their names in the README's chart.
SHORT_NAMES = {
    "resnet50": "ResNet-50",
    "vit": "ViT-S",
    "bert": "BERT-base",
    "gpt2": "GPT-2",
    "lstm": "LSTM",
    "unet": "U-Net",
    "mlp": "MLP",
    "resnet18_folder": "ResNet-18, JPEGs",
    "mobilenet": "MobileNetV2",
    "efficientnet": "EfficientNet-B0",
    "convnext": "ConvNeXt-T",
    "distilbert": "DistilBERT",
    "t5": "T5-small",
    "group_norm_unet": "U-Net, group norm",
    "tabular": "tabular",
    "policy": "policy",
    "critic": "critics",
    "gru_forecast": "GRU",
    "lstm_forecast": "LSTM",
    "tcn_forecast": "TCN",
    "transformer_forecast": "transformer",
    "nbeats": "N-BEATS",
    "autoencoder": "autoencoder",
    "lenet": "LeNet",
    "gnn": "GCN",
    "text_cnn": "text CNN",
    "tabnet": "TabNet",
    "bpr": "BPR",
    "wide": "perceptron",
}
SYSTEMS = {
    "autocast": "autocast",
    "by_hand": "by hand",
    "expert": "an expert",
    "expert_jemalloc": "an expert, jemalloc",
    "expert_compile": "an expert, compiled",
    "fabric": "Fabric",
    "accelerate": "Accelerate",
    "compile": "`torch.compile`",
    "ipex": "IPEX",
    "plain": "plain",
    "expert_fp32": "an expert, fp32",
    "expert_fp32_1_thread": "an expert, 1 thread",
    "expert_fp32_compile": "an expert, compiled",
    "compiled_step": "the step compiled",
}
Results = dict[str, Any]


def overview(results: Results) -> str:
    """Return a line for each workload, with the best peer."""
    head = ["", "plain fp32", "bf16 autocast by hand", "the best peer", "nano_loop, bf16", "× plain", "× the best peer"]
    rows = []
    for name, each in results["workloads"].items():
        systems, best = each["systems"], each["best_peer"]
        nano = systems["nano"]
        rows.append(
            [
                WORKLOADS[name],
                _ms(systems["plain"]),
                _ms(systems["autocast"]) if "autocast" in systems else "–",
                f"{_ms(systems[best])}, {SYSTEMS[best]}",
                f"**{_ms(nano)}**",
                f"{nano['ratio_to_plain']:.2f}",
                _ratio(nano["ratio_to_best_peer"], nano["ratio_to_best_peer_range"]),
            ]
        )
    return table(head, rows)


def users(results: Results) -> str:
    """Return a line for each workload of the users' suite: the best peer, JAX, the means and the minimum."""
    columns = ["nano_fp32_1_thread", "nano_fp32", "nano_auto_1_thread", "nano_auto"]
    head = ["", "plain, ms", "the best peer, ms", *(f"`{name}`, × best peer" for name in columns), "JAX, ms"]
    rows = []
    for name, each in results["workloads"].items():
        systems, best = each["systems"], each["best_peer"]
        ratios = ("–" if systems[ours]["reason"] else f"{systems[ours]['ratio_to_best_peer']:.2f}" for ours in columns)
        limit = _ms(systems["jax"]) if "jax" in systems else "–"
        rows.append([WORKLOADS[name], _ms(systems["plain"]), f"{_ms(systems[best])}, {SYSTEMS[best]}", *ratios, limit])
    means = [results["geometric_means"][name] for name in columns]
    for words, key in (("geometric mean", "over_best_peer"), ("the least", "least_over_best_peer")):
        rows.append(
            [f"**{words}**", "", "", *("–" if row[key] is None else f"**{row[key]:.2f}**" for row in means), ""]
        )
    return table(head, rows)


def times(results: Results) -> str:
    """Return the milliseconds per step of all systems."""
    return _of_all_systems(results, "ms per step", _ms)


def memory(results: Results) -> str:
    """Return the peak memory of all systems, in MB."""
    return _of_all_systems(results, "MB", lambda row: "–" if row["reason"] else f"{row['peak_rss_mb']:.0f}")


def _of_all_systems(results: Results, unit: str, shown: Any) -> str:
    workloads = results["workloads"]
    names = list(next(iter(workloads.values()))["systems"])
    rows = ([name, *(shown(each["systems"][system]) for system in names)] for name, each in workloads.items())
    return table([unit, *(f"`{name}`" for name in names)], rows)


def ratios(results: Results) -> str:
    """Return the speed of nano_loop relative to its peers, and its share of the machine's rate."""
    own = "nano" if all("nano" in each["systems"] for each in results["workloads"].values()) else "nano_products"
    head = ["", "best peer", f"{own} × best peer (rounds)", f"{own} × plain", "nano_fp32 × plain"]
    head += ["nano_ipex × IPEX by hand (rounds)", "share of the matmul rate", "disturbed rounds"]
    rows = []
    for name, each in results["workloads"].items():
        nano, with_ipex = each["systems"][own], each["use_ipex"]
        by_hand = "–"
        if with_ipex:
            by_hand = _ratio(with_ipex["ratio_to_ipex_by_hand"], with_ipex["ratio_to_ipex_by_hand_range"])
        rows.append(
            [
                name,
                each["best_peer"],
                _ratio(nano["ratio_to_best_peer"], nano["ratio_to_best_peer_range"]),
                f"{nano['ratio_to_plain']:.2f}",
                f"{each['systems']['nano_fp32']['ratio_to_plain']:.2f}" if "nano_fp32" in each["systems"] else "–",
                by_hand,
                f"{nano['matmul_share']:.0%}",
                ", ".join(map(str, each["disturbed_rounds"])) or "none",
            ]
        )
    return table(head, rows)


def levers(results: Results) -> str:
    """Return the value of each step: how many times faster nano_loop is with it than without."""
    found = results["levers"]
    names = list(dict.fromkeys(name for rows in found.values() for name in rows if name))
    head = ["", "all steps, ms", *(f"`{name}`" for name in names)]
    rows = ([workload, _ms(rows[""]), *(_worth(rows.get(name)) for name in names)] for workload, rows in found.items())
    return table(head, rows)


def _worth(row: Results | None) -> str:
    return _ratio(row["worth"], row["worth_range"]) if row and not row["reason"] else ""


def scaling(results: Results) -> str:
    """Return how fast more threads and more processes are."""
    rows = []
    for workload, found in results["scaling"].items():
        for name, row in found.items():
            speed = _ratio(row["speed_up"], row["speed_up_range"])
            rows.append([workload, name, _ms(row), speed, f"{row['efficiency']:.0%}"])
    return table(["", "", "ms per step", "batches per second over one core's (rounds)", "efficiency"], rows)


def split(results: Results) -> str:
    """Return how fast processes that share each batch are."""
    rows = [
        [workload, count, _ms(row), row["reason"] or _ratio(row["speed_up"], row["speed_up_range"])]
        for workload, found in results["split"].items()
        for count, row in found.items()
    ]
    return table(["", "processes", "ms per step", "over one process (rounds)"], rows)


def computed(results: Results) -> str:
    """Return the parts of a step of ranks that share each batch, computed from the times of one core."""
    parts = ("compute_ms", "update_ms", "averaging_ms", "step_ms")
    rows = [
        [workload, count, *(f"{row[part]:.0f}" for part in parts)]
        + [f"{row[ratio]:.2f}" for ratio in ("speed_up", "sharded_update_speed_up")]
        for workload, found in results["computed"].items()
        for count, row in found.items()
    ]
    head = ["", "ranks", "compute, ms", "update, ms", "averaging, ms", "step, ms", "over one rank", "update by shards"]
    return table(head, rows)


def _ms(row: Results) -> str:
    if row["reason"]:
        return "–"
    return f"{row['median_ms']:.0f}" if row["median_ms"] >= 10 else f"{row['median_ms']:.2f}"


def _ratio(median: float, bounds: list[float]) -> str:
    return f"{median:.2f} ({bounds[0]:.2f} to {bounds[1]:.2f})"


def headline(results: Results) -> str:
    """Return the README's sentences: the means over the workloads, the workloads' range, and the rounds' range."""
    workloads, means = results["workloads"].values(), results["geometric_means"]
    nano = [each["systems"]["nano"] for each in workloads]
    rounds = [bound for row in nano for bound in row["ratio_to_best_peer_range"]]
    in_bf16 = (
        f"**{means['nano']['over_plain']:.1f}× plain PyTorch** ({_range(nano, 'ratio_to_plain')}) and "
        f"**{means['nano']['over_best_peer']:.2f}× the best peer** ({_range(nano, 'ratio_to_best_peer')}; "
        f"in single rounds {min(rounds):.2f}× to {max(rounds):.2f}×)."
    )
    if not all("nano_fp32" in each["systems"] for each in workloads):
        return in_bf16
    fp32 = [each["systems"]["nano_fp32"] for each in workloads]
    ratio = f"{means['nano_fp32']['over_plain']:.2f}× plain PyTorch ({_range(fp32, 'ratio_to_plain')})"
    return f"{in_bf16} With the default options, in fp32, it is {ratio}."


def _range(rows: list[Results], key: str) -> str:
    ratios = [row[key] for row in rows]
    return f"{min(ratios):.2f}× to {max(ratios):.2f}×"


def speed_ups(results: Results) -> SpeedUps:
    """Return the data of the README's chart: for each workload plain PyTorch, the best peer and nano_loop."""
    of_users, found = _is_of_users(results), {}
    for name, each in results["workloads"].items():
        systems, best = each["systems"], each["best_peer"]
        peer = SYSTEMS[best].strip("`").replace(", ", ",\n")  # if there are others, there is no room for both
        found[f"{SHORT_NAMES[name]}\npeer: {peer}"] = {
            "plain PyTorch, fp32": _over_plain(systems, "plain"),
            f"the best peer, {'fp32' if of_users else 'bf16'}": _over_plain(systems, best),
            f"nano_loop, {'auto' if of_users else 'bf16'}": _over_plain(systems, "nano_auto" if of_users else "nano"),
        }
    return found


def _is_of_users(results: Results) -> bool:
    """Whether results are of the users' suite, which has other systems."""
    return results.get("suite") == "users"


def _over_plain(systems: Results, system: str) -> tuple[float, float, float]:
    """Return the median, the minimum and the maximum of the rounds' ratios; the median is the stored one."""
    rounds = zip(systems["plain"]["rounds"], systems[system]["rounds"], strict=True)
    ratios = [plain["median_ms"] / other["median_ms"] for plain, other in rounds]
    return statistics.median(ratios), min(ratios), max(ratios)


def layers(results: Results) -> str:
    """Return a line for each layer in bf16 and in fp32."""
    return markdown(results["layers"])


#: By key of the results, the tables made from it.
TABLES = {
    "workloads": (times, ratios, memory),
    "levers": (levers,),
    "scaling": (scaling,),
    "split": (split,),
    "computed": (computed,),
    "between": (savings_of_models, largest_savings),
    "layers": (layers,),
}


def tables(results: Results) -> list[str]:
    """Return all tables of some results."""
    set_matmul_shares(results.get("workloads", {}))  # with the best rate of the whole run, and by the current rules
    if _is_of_users(results):
        return [users(results), times(results)]
    return [made(results) for kind, functions in TABLES.items() if kind in results for made in functions]


#: The parts of docs/results.md. docs/layers.md has the layers.
PARTS = {
    "workloads": "Workloads",
    "levers": "Levers",
    "scaling": "Scaling",
    "between": "Between",
    "split": "Processes that share each batch",
    "computed": "Computed from one core",
}
_INTRODUCTION = """\
# Results

`make docs-results` writes this page from `benchmarks/results/`. [Benchmarks](../benchmarks/README.md) describes the
systems, the workloads and the figures, and [Measurements](measurements.md) the conclusions. Memory is the peak of a
process; with `ipex` and `nano_ipex` it includes 500 MB for their libraries."""


def page(stored: Mapping[str, Results]) -> str:
    """Return the text of docs/results.md, with the results by the names of their files."""
    paragraphs = [_INTRODUCTION]
    for kind, title in PARTS.items():
        paragraphs.append(f"## {title}")
        for name, results in sorted(stored.items(), reverse=True):
            if kind in results:
                command = " ".join(results["command"])
                about = f"{heading(results)}, {results['date'][:10]}: `{command}`"
                paragraphs += [f"### {name}", about, *tables(results)]
    return "\n\n".join(paragraphs) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.published", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, help="what benchmarks.run has stored")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw the files' speed-ups to FILE")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the tables to FILE instead")
    args = parser.parse_args()
    stored = {file.stem: json.loads(file.read_text()) for file in args.files}
    if args.page:
        args.page.write_text(page(stored), encoding="utf-8")
        return
    for name, results in stored.items():
        print(f"\n{name}\n", *tables(results), sep="\n\n")
        if "workloads" in results and not _is_of_users(results):
            print(f"\n{overview(results)}\n\n{headline(results)}")
    if args.picture:
        draw_speed_ups([*map(speed_ups, stored.values())], args.picture)


if __name__ == "__main__":
    main()
