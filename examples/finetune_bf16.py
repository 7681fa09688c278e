"""Fine-tune torchvision's ResNet-18 in bf16 from a local checkpoint, on a folder of JPEG images.

    python examples/finetune_bf16.py                          # accelerated, in bf16
    python examples/finetune_bf16.py --use-ipex               # with IPEX's kernels too
    python examples/finetune_bf16.py --plain                  # the same loop without nano_loop, in fp32
    python examples/finetune_bf16.py --folder runs/finetune   # folder of checkpoint and images, created if missing

It needs torchvision and scikit-learn; `make test-ipex` sets up `.venv-ipex`, which has both, and IPEX. Nothing is
downloaded: missing files in the folder are created from scikit-learn's handwritten digits. The checkpoint is a ResNet
trained briefly on the digits 0 to 4. It is then fine-tuned on images of the digits 5 to 9.
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18

parser = argparse.ArgumentParser(description="Fine-tune a ResNet-18 in bf16 on a folder of images.")
parser.add_argument("--plain", action="store_true", help="run the same loop without nano_loop, in fp32")
parser.add_argument("--use-ipex", action="store_true", help="run IPEX's kernels")
parser.add_argument("--precision", default="bf16", help="32, bf16 or auto (default: bf16)")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--image-size", type=int, default=64, help="height and width in pixels (default: 64)")
parser.add_argument("--folder", type=Path, default=Path("runs/finetune"), help="default: runs/finetune")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
args = parser.parse_args()

if args.plain and args.use_ipex:
    parser.error("--use-ipex is an option of nano_loop, which --plain goes without")

if args.plain:

    def nano(*arguments, **options):
        """Replace the decorator for `--plain`: return the function unchanged."""
        return lambda function: function
else:
    from nano_loop import nano

known, new = range(5), range(5, 10)  # the digits of the checkpoint, and the digits of the images


def write_images(folder):
    """Write the new digits as JPEG files to train/<digit>/ and val/<digit>/: every fifth is for validation."""
    pixels, labels = load_digits(return_X_y=True)
    for number in np.flatnonzero(np.isin(labels, new)):
        place = folder / ("train" if number % 5 else "val") / str(labels[number])
        place.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels[number].reshape(8, 8) * 15.9).astype(np.uint8))
        image.resize((64, 64), Image.Resampling.BICUBIC).save(place / f"{number}.jpg", quality=90)


def write_checkpoint(file):
    """Train a ResNet-18 for one epoch on the known digits, and save its weights."""
    pixels, labels = load_digits(return_X_y=True)
    rows = np.isin(labels, known)
    images = torch.tensor(pixels[rows], dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
    images = F.interpolate(images, size=32, mode="bilinear").expand(-1, 3, -1, -1)
    loader = DataLoader(TensorDataset(images, torch.tensor(labels[rows])), 32, shuffle=True)
    model = resnet18(num_classes=len(known))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    unfinished = file.with_suffix(".tmp")
    torch.save(model.state_dict(), unfinished)
    os.replace(unfinished, file)  # a killed run leaves no partial checkpoint


def pretrained(file):
    """Return the ResNet from the checkpoint, with a new last layer for the new digits."""
    model = resnet18(num_classes=len(new))
    weights = {name: value for name, value in torch.load(file).items() if not name.startswith("fc.")}
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert missing == ["fc.weight", "fc.bias"]
    return model


@torch.no_grad()
def validate(model, loader):
    """Return the share of images that the model labels correctly."""
    model.eval()
    correct = sum((model(images).argmax(dim=1) == labels).sum().item() for images, labels in loader)
    model.train()
    return correct / len(loader.dataset)


@nano(
    precision=32 if args.precision == "32" else args.precision,
    use_ipex=args.use_ipex,
    channels_last=True,
    fast_images=True,  # decodes and resizes in the first epoch only; this is the default if torchvision is imported
)
def finetune(model, optimizer, scheduler, train_loader, val_loader, epochs):
    """Train for some epochs, and return the accuracy on the validation images after each."""
    accuracies = []
    for epoch in range(epochs):
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
        scheduler.step()
        accuracies.append(validate(model, val_loader))
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, validation accuracy {accuracies[-1]:.2%}", flush=True)
    return accuracies


torch.manual_seed(args.seed)
args.folder.mkdir(parents=True, exist_ok=True)
checkpoint = args.folder / "resnet18.pt"
if not checkpoint.exists():
    write_checkpoint(checkpoint)
if not (args.folder / "images/val").exists():
    write_images(args.folder / "images")

to_tensor = transforms.Compose(
    [transforms.Resize(args.image_size), transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]
)
train_set, val_set = (ImageFolder(args.folder / "images" / part, to_tensor) for part in ("train", "val"))
torch.manual_seed(args.seed)  # the same seed whether or not the folder had to be created
model = pretrained(checkpoint)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
val_loader = DataLoader(val_set, args.batch_size)

start = time.perf_counter()
accuracies = finetune(model, optimizer, scheduler, train_loader, val_loader, args.epochs)
seconds = time.perf_counter() - start

torch.save(model.state_dict(), args.folder / "finetuned.pt")
print(f"validation accuracy {accuracies[-1]:.2%} after {seconds:.1f} s of training")
if args.json:
    args.json.write_text(json.dumps({"seconds": seconds, "accuracies": accuracies}))
