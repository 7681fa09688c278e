"""Measure training on folders of photographs, epoch by epoch: torchvision's pipelines and fast_images.

.venv-ipex/bin/python -m benchmarks.images
.venv-ipex/bin/python -m benchmarks.images --sizes 500x375 --workers 0 --rounds 3 --output images

Each case is a fresh process, and the systems alternate. All train ResNet-18 with nano_loop in bf16, so that they
differ only in their pipelines. The pipeline without a step, and the step without a pipeline, are measured, too: their
sum over the step bounds the speed-up by any pipeline. It needs torchvision, which `make test-ipex` installs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.names import at_least_one
from benchmarks.surroundings import surroundings
from nano_loop.cpu import peak_memory

ROOT = Path(__file__).resolve().parent.parent
PEERS, OURS = ("torchvision", "torchvision_v2"), ("exact", "scaled")
#: The number of photographs of each size in a round: fewer of the larger ones.
SIZES = {"500x375": 256, "1024x768": 128, "3000x2000": 48}
EPOCHS, BATCH, SIDE = 4, 16, 160
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
#: Different photographs; the others are shifted and mirrored copies, with noise.
_BASES = 4


def photograph(size: tuple[int, int], number: int, base: np.ndarray[Any, Any]) -> Any:
    """Return an image that compresses like a photograph: a 1/f spectrum with sensor noise."""
    from PIL import Image

    draws = np.random.default_rng(number)
    shifted = np.roll(base, draws.integers(0, size[0], 2), axis=(0, 1))[:: draws.choice([-1, 1])]
    noisy = shifted + draws.normal(0, 2.5, (*shifted.shape[:2], 1))
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


def smooth_field(size: tuple[int, int], seed: int) -> np.ndarray[Any, Any]:
    """Return pixels of shape (H, W, 3), with random phases and amplitudes that decrease with frequency."""
    width, height = size
    draws = np.random.default_rng(seed)
    rows, columns = np.fft.fftfreq(height)[:, None] * height, np.fft.rfftfreq(width)[None] * width
    amplitudes = 1 / np.maximum(np.hypot(rows, columns), 1) ** 1.2
    fields = []
    for _ in range(3):
        phases = np.exp(2j * np.pi * draws.random((height, columns.shape[1])))
        field = np.fft.irfft2(amplitudes * phases, (height, width))
        fields.append((field - field.mean()) / field.std())
    grey, *colours = fields
    channels = [grey * 48 + 12 * colours[0], grey * 48 - 6 * colours[0] + 9 * colours[1], grey * 48 - 12 * colours[1]]
    return np.asarray(np.stack(channels, axis=-1) + 118)


def write_photographs(folder: Path, size: tuple[int, int], count: int) -> float:
    """Write JPEG files of two classes, and return their mean size in kB."""
    bases = [smooth_field(size, seed) for seed in range(_BASES)]
    sizes = []
    for number in range(count):
        place = folder / str(number % 2)
        place.mkdir(parents=True, exist_ok=True)
        file = place / f"{number:04}.jpg"
        photograph(size, number, bases[number % _BASES]).save(file, quality=90)
        sizes.append(file.stat().st_size)
    time.sleep(2.1)  # files that were just written are not cached
    return statistics.mean(sizes) / 1e3


def loader_of(system: str, folder: str, workers: int) -> Any:
    """Return the loader of a system."""
    from torchvision import transforms
    from torchvision.datasets import ImageFolder
    from torchvision.io import read_image
    from torchvision.transforms import v2

    if system == "torchvision_v2":
        steps: list[Any] = [v2.Resize(182, antialias=True), v2.RandomCrop(SIDE), v2.RandomHorizontalFlip()]
        steps += [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
        dataset = ImageFolder(folder, v2.Compose(steps), loader=read_image)
    else:
        steps = [transforms.Resize(182), transforms.RandomCrop(SIDE), transforms.RandomHorizontalFlip()]
        steps += [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
        dataset = ImageFolder(folder, transforms.Compose(steps))
    return torch.utils.data.DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, drop_last=True)


def case(system: str, folder: str, workers: int, trains: int) -> dict[str, Any]:
    """Train, or only iterate; return the seconds of each epoch and of a step alone, and this process's peak memory."""
    from torchvision.models import resnet18

    from nano_loop import nano

    torch.manual_seed(0)
    model = resnet18(num_classes=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch = torch.randn(BATCH, 3, SIDE, SIDE), torch.zeros(BATCH, dtype=torch.long)

    def step(model: Any, optimizer: Any, images: Any, labels: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    @nano(
        precision="bf16",
        channels_last=True,
        fast_images=system in OURS,
        exact_images=system != "scaled",
        tune_operators=False,
        verbose=False,
    )
    def train(model: Any, optimizer: Any, loader: Any) -> tuple[list[float], float]:
        for _ in range(4 * trains):  # warms up
            step(model, optimizer, *batch)
        seconds = []
        for _ in range(EPOCHS):
            start = time.perf_counter()
            for images, labels in loader:
                if trains:
                    step(model, optimizer, images, labels)
            seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        for _ in range(8 * trains):
            step(model, optimizer, *batch)
        return seconds, (time.perf_counter() - start) / 8

    seconds, alone = train(model, optimizer, loader_of(system, folder, workers))
    report = train.report.as_dict() if hasattr(train, "report") else {}
    return {"seconds": seconds, "step": alone, "peak_mb": peak_memory() / 1e6, "cache": _cache(report)}


def _cache(report: dict[str, Any]) -> str:
    steps = report.get("steps", [])
    return next((each["detail"] for each in steps if each["name"] == "image_cache"), "")


def fresh(system: str, folder: Path, workers: int, trains: int) -> dict[str, Any]:
    """Run a case in a separate process."""
    command = [sys.executable, "-m", "benchmarks.images", "--case", system, str(folder), str(workers), str(int(trains))]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{system} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(size: str, workers: int, rounds: int) -> dict[str, Any]:
    """Return the rounds of all systems on photographs of one size, with alternating systems."""
    width, height = map(int, size.split("x"))
    systems = [*PEERS, *OURS]
    found: dict[str, Any] = {system: [] for system in systems}
    with tempfile.TemporaryDirectory(prefix="nano_loop-photographs-") as folder:
        kilobytes = write_photographs(Path(folder), (width, height), SIZES[size])
        for number in range(rounds):
            order = systems[number % 4 :] + systems[: number % 4]
            for system in order[:: -1 if number % 2 else 1]:
                run = fresh(system, Path(folder), workers, trains=True)
                run["pipeline"] = fresh(system, Path(folder), workers, trains=False)["seconds"]
                found[system].append(run)
    return {"size": size, "workers": workers, "images": SIZES[size], "kB": kilobytes, "rounds": found}


def summary(measured: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for each system: ms per image, and the speed relative to the best peer in the same round."""
    rounds = measured["rounds"]
    count = measured["images"] // BATCH * BATCH
    for system, each in rounds.items():
        firsts = [_ratio(rounds, number, system, slice(0, 1)) for number in range(len(each))]
        laters = [_ratio(rounds, number, system, slice(1, None)) for number in range(len(each))]
        yield {
            "system": system,
            "first_ms": statistics.median(run["seconds"][0] for run in each) / count * 1e3,
            "later_ms": statistics.median(min(run["seconds"][1:]) for run in each) / count * 1e3,
            "first_ratio": statistics.median(firsts),
            "later_ratio": statistics.median(laters),
            "later_range": [min(laters), max(laters)],
            "step_ms": statistics.median(run["step"] for run in each) / BATCH * 1e3,
            "first_pipeline_ms": statistics.median(run["pipeline"][0] for run in each) / count * 1e3,
            "later_pipeline_ms": statistics.median(min(run["pipeline"][1:]) for run in each) / count * 1e3,
            "peak_mb": statistics.median(run["peak_mb"] for run in each),
        }


def _ratio(rounds: dict[str, Any], number: int, system: str, epochs: slice) -> float:
    # The fastest epoch: other programs can only make one slower.
    times = {name: min(each[number]["seconds"][epochs]) for name, each in rounds.items()}
    return min(times[peer] for peer in PEERS) / times[system]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.images", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="of the photographs")
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 2], help="of the loaders (default: 0 2)")
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--output", metavar="NAME", help="store the results in benchmarks/results/NAME.json")
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(*options.case[:2], *map(int, options.case[2:]))))
        return
    results: dict[str, Any] = {**surroundings(), "quick": False, "images": []}
    for size in options.sizes:
        for workers in options.workers:
            measured = measure(size, workers, options.rounds)
            measured["summary"] = [*summary(measured)]
            results["images"].append(measured)
            print(f"\n{size}, {measured['kB']:.0f} kB, {workers} workers", flush=True)
            for row in measured["summary"]:
                print(
                    f"{row['system']:16} first epoch {row['first_ms']:6.1f} ms per image ({row['first_ratio']:.2f}×), "
                    f"later {row['later_ms']:6.1f} ms ({row['later_ratio']:.2f}×, {row['later_range'][0]:.2f} to "
                    f"{row['later_range'][1]:.2f}); pipeline alone {row['first_pipeline_ms']:.1f} and "
                    f"{row['later_pipeline_ms']:.1f} ms, step alone {row['step_ms']:.1f} ms; {row['peak_mb']:.0f} MB",
                    flush=True,
                )
            if options.output:
                target = ROOT / "benchmarks/results" / f"{options.output}.json"
                target.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
