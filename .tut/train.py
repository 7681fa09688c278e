import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nano_loop import nano


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(128, 2)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens)).mean(dim=1))


@nano(num_processes="auto", split_batches=True)
def train(model, optimizer, loader, epochs):
    losses = []
    for _ in range(epochs):
        for tokens, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


torch.manual_seed(0)
tokens = torch.randint(1000, (2048, 64))
labels = (tokens.float().mean(dim=1) > 500).long()
loader = DataLoader(TensorDataset(tokens, labels), batch_size=64, shuffle=True)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = train(model, optimizer, loader, epochs=2)
print(f"{len(losses)} steps, and the loss has fallen: {sum(losses[-8:]) < sum(losses[:8])}")
