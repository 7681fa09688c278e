"""An image classifier whose train function is called once per epoch, with the usual evaluation and a schedule."""

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from nano_loop import nano
from scripts.data import BATCH, images, small_cnn


@nano
def train(model, device, train_loader, optimizer, epoch):
    model.train()
    for _batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
    return loss.item()


def test(model, device, test_loader):
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data.to(device))
            test_loss += F.cross_entropy(output, target, reduction="sum").item()
            correct += (output.argmax(1) == target).sum().item()
    return test_loss / len(test_loader.dataset), correct


if __name__ == "__main__":
    torch.manual_seed(1)
    device = torch.device("cpu")
    train_loader, test_loader = DataLoader(images(), BATCH), DataLoader(images(), 32)
    model = small_cnn().to(device)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    RESULT = {}
    for epoch in range(1, 4):
        train(model, device, train_loader, optimizer, epoch)
        RESULT[f"test {epoch}"] = test(model, device, test_loader)
        scheduler.step()
    RESULT["model"] = model.state_dict()
