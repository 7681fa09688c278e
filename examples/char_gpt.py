"""Train a character GPT on the source of Python's standard library: a loop moved into `TorchNano.train`.

    python examples/char_gpt.py                                # accelerated
    python examples/char_gpt.py --plain                        # the same loop without nano_loop
    python examples/char_gpt.py --num-processes 2              # two processes, each on half of the cores
    python examples/char_gpt.py --checkpoint gpt.pt            # saves its state in gpt.pt ...
    python examples/char_gpt.py --checkpoint gpt.pt --resume   # ... and continues from there

It needs `pip install ".[examples]"` in the checkout. The text comes with Python, so nothing is downloaded. A run may
be killed at any time: if you resume it, it continues as if it had not been interrupted.
"""

import argparse
import json
import math
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

parser = argparse.ArgumentParser(description="Train a character GPT on Python's standard library.")
parser.add_argument("--plain", action="store_true", help="run the same loop without nano_loop")
parser.add_argument("--precision", default="auto", help="32, bf16 or auto (default: auto)")
parser.add_argument("--num-processes", type=int, metavar="N", help="data-parallel processes (default: 1)")
parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="save to FILE at every evaluation")
parser.add_argument("--resume", action="store_true", help="go on from the --checkpoint file")
parser.add_argument("--sample", type=int, default=400, help="characters to write when trained (default: 400)")
parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
# These settings define the run: a resumed run must use the same ones.
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--context", type=int, default=128, help="characters the model looks back (default: 128)")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--batch-size", type=int, default=16, help="windows per batch, of all processes (default: 16)")
parser.add_argument("--accumulate", type=int, default=2, help="batches per step (default: 2)")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--warmup", type=int, default=20, help="steps to the full rate (default: 20)")
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--eval-every", type=int, default=50, metavar="STEPS")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

run_options = {"plain", "precision", "num_processes", "checkpoint", "resume", "sample", "json"}
settings = {name: value for name, value in vars(args).items() if name not in run_options}
precision = 32 if args.precision == "32" else args.precision
betas, weight_decay, max_norm = (0.9, 0.95), 0.1, 1.0
characters = 128  # ASCII: the token of a character is its code
modules = (  # their source code is the text: every Python since 3.10 has these files
    "argparse difflib doctest enum inspect ipaddress mailbox optparse pickletools pydoc statistics "
    "subprocess tarfile threading typing"
)

processes = args.num_processes or 1
if args.batch_size % processes:
    parser.error(f"--batch-size {args.batch_size} does not divide into {processes} processes")
if args.resume and not (args.checkpoint and args.checkpoint.is_file()):
    parser.error(f"--resume goes on from the file that --checkpoint names, and got {args.checkpoint}")

if args.plain:

    class TorchNano:
        """Replace the base class for `--plain`: set nothing up."""

        is_global_zero = True

        def __init__(self, *arguments, **options):
            pass

        def setup(self, *objects):
            return objects
else:
    from nano_loop import TorchNano


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each with a pre-norm and a residual connection."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(args.width)
        self.queries_keys_values = nn.Linear(args.width, 3 * args.width)
        self.attended = nn.Linear(args.width, args.width)
        self.norm2 = nn.LayerNorm(args.width)
        self.widen = nn.Linear(args.width, 4 * args.width)
        self.narrow = nn.Linear(4 * args.width, args.width)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.queries_keys_values(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, args.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.attended(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.narrow(F.gelu(self.widen(self.norm2(x)))))


class GPT(nn.Module):
    """Map (N, length) character codes to (N, length, 128) logits of the next characters."""

    def __init__(self):
        super().__init__()
        self.character = nn.Embedding(characters, args.width)
        self.position = nn.Embedding(args.context, args.width)
        self.dropout = nn.Dropout(args.dropout)
        self.blocks = nn.Sequential(*[Block() for _ in range(args.layers)])
        self.norm = nn.LayerNorm(args.width)
        self.head = nn.Linear(args.width, characters, bias=False)
        self.apply(self.initialize)
        for block in self.blocks:  # smaller initial weights if more blocks add to the residual stream
            for linear in (block.attended, block.narrow):
                nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * args.layers))
        self.head.weight = self.character.weight

    @staticmethod
    def initialize(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, codes):
        positions = torch.arange(codes.shape[1], device=codes.device)
        x = self.dropout(self.character(codes) + self.position(positions))
        return self.head(self.norm(self.blocks(x)))


class Windows(Dataset):
    """All windows of `context` characters of a text, each with the window one character later as target."""

    def __init__(self, text):
        self.text = text

    def __len__(self):
        return len(self.text) - args.context

    def __getitem__(self, start):
        stretch = self.text[start : start + args.context + 1]
        return stretch[:-1], stretch[1:]


def standard_library():
    """Return the codes of all ASCII characters in the modules' files, as one int64 tensor."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [folder / f"{module}.py" for module in modules.split()]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise SystemExit(f"{folder} has no {', '.join(missing)}: use a Python that comes with its source.")
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    return torch.tensor(list(text.encode("ascii", errors="ignore")))


def learning_rate(step):
    """Return the factor of the learning rate: a linear warm-up, then a cosine decay to a tenth."""
    if step < args.warmup:
        return (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


@torch.no_grad()
def validate(model, loader):
    """Return the mean loss in nats per character."""
    model.eval()
    losses = [F.cross_entropy(model(codes).flatten(0, 1), following.flatten()) for codes, following in loader]
    model.train()
    return torch.stack(losses).mean().item()


def save(file, step, model, optimizer, scheduler):
    """Save the state after a step atomically: if the process is killed meanwhile, the old file is kept."""
    state = {
        "settings": settings,
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
    }
    unfinished = file.with_name(file.name + ".unfinished")
    torch.save(state, unfinished)
    unfinished.replace(file)


class Trainer(TorchNano):
    def train(self, model, optimizer, scheduler, loader, validation, step):
        """Train from a step until the loader is exhausted, and return the final validation loss."""
        model, optimizer, loader = self.setup(model, optimizer, loader)

        bar = tqdm(desc="training", unit="step", initial=step, total=args.steps)
        loss_so_far = 0.0
        for batch, (codes, following) in enumerate(loader, start=1):
            loss = F.cross_entropy(model(codes).flatten(0, 1), following.flatten()) / args.accumulate
            loss.backward()
            loss_so_far += loss.item()
            if batch % args.accumulate:
                continue

            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            bar.update()
            bar.set_postfix(loss=f"{loss_so_far:.3f}")
            loss_so_far = 0.0

            if step % args.eval_every == 0:
                tqdm.write(f"step {step}: validation loss {validate(model, validation):.4f}")
                if args.checkpoint and self.is_global_zero:
                    save(args.checkpoint, step, model, optimizer, scheduler)
        bar.close()
        return validate(model, validation)


@torch.no_grad()
def write(model, length, prompt="def "):
    """Return this many characters that the model generates after the prompt."""
    model.eval()
    codes = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        probabilities = model(codes[:, -args.context :])[:, -1].softmax(dim=-1)
        codes = torch.cat([codes, torch.multinomial(probabilities, 1)], dim=1)
    return bytes(codes[0].tolist()).decode()


torch.manual_seed(args.seed)
text = standard_library()
held_out = len(text) // 10
training, held_out = Windows(text[:-held_out]), Windows(text[-held_out:])

# Draw the start of every window of the run now, so that a resumed run continues with the right windows.
windows_a_step = args.batch_size * args.accumulate
starts = torch.randint(len(training), (args.steps * windows_a_step,)).tolist()

model = GPT()
matrices = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]  # no weight decay for biases and norms
groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=betas)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)

first_step = 0
if args.resume:
    state = torch.load(args.checkpoint)
    changed = [name for name, value in settings.items() if state["settings"].get(name) != value]
    if changed:
        was = ", ".join(f"--{name.replace('_', '-')} {state['settings'].get(name)}" for name in changed)
        parser.error(f"{args.checkpoint} is of a run with {was}: resume it with the same")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"])
    first_step = state["step"]

# A loader draws a number when it is iterated. A separate generator keeps this from changing the model's draws.
loader = DataLoader(
    training, args.batch_size // processes, sampler=starts[first_step * windows_a_step :], generator=torch.Generator()
)
spread = range(0, len(held_out), 32 * args.context)
validation = DataLoader(held_out, args.batch_size, sampler=spread, generator=torch.Generator())

start = time.perf_counter()
# All processes together use the same batches as one, so the learning rate stays unchanged: auto_lr=False.
trainer = Trainer(args.num_processes, precision=precision, auto_lr=False)
final_loss = trainer.train(model, optimizer, scheduler, loader, validation, first_step)
seconds = time.perf_counter() - start

print(write(model, args.sample))
print(f"validation loss {final_loss:.4f} after {seconds:.1f} s of training")
if args.json:
    results = {"seconds": seconds, "loss": final_loss, "first_step": first_step}
    args.json.write_text(json.dumps(results))
