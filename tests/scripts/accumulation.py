"""A text model with accumulated gradients, clipping, a one-cycle schedule, and the usual lines of mixed precision."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nano_loop import nano
from scripts.data import BATCH, WHOLE_BATCH, text

ACCUMULATE = 2


class TinyTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.position = nn.Parameter(torch.zeros(1, 10, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 12)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        return self.head(self.encoder(self.embed(x) + self.position, mask=mask, is_causal=True))


@nano
def train(model, optimizer, scheduler, scaler, loader, epochs):
    losses = []
    for _ in range(epochs):
        for i, (x, y) in enumerate(loader):
            with torch.autocast("cpu", enabled=False):
                loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / ACCUMULATE
            scaler.scale(loss).backward()
            if (i + 1) % ACCUMULATE == 0:
                scaler.unscale_(optimizer)
                losses.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                scheduler.step()
    return losses


torch.manual_seed(0)
symbols = text(641)
data = TensorDataset(symbols[:-1].view(-1, 10), symbols[1:].view(-1, 10))
loader = DataLoader(data, BATCH)
model = TinyTransformer()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
total = 64 // WHOLE_BATCH // ACCUMULATE * 2
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=total + 1)
norms = train(model, optimizer, scheduler, torch.amp.GradScaler("cpu", enabled=False), loader, 2)
RESULT = {"norms": norms, "model": model.state_dict(), "lr": scheduler.get_last_lr()}
