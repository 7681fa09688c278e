"""A generator and a discriminator, with an optimizer each, that train each other."""

import torch
from torch import nn
from torch.utils.data import DataLoader

from nano_loop import nano
from scripts.data import BATCH, images


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)


torch.manual_seed(999)
netG = nn.Sequential(nn.ConvTranspose2d(4, 8, 4), nn.ReLU(True), nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh())
netD = nn.Sequential(
    nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(8, 1, 4), nn.Sigmoid(), nn.Flatten(0)
)


@nano
def train(netG, netD, optimizerG, optimizerD, dataloader, criterion, epochs):
    G_losses = []
    for _ in range(epochs):
        for real, _ in dataloader:
            netD.zero_grad()
            label = torch.full((len(real),), 1.0)
            criterion(netD(real), label).backward()
            noise = real.flatten(1)[:, :4, None, None]  # not drawn, so that two batches have what one has
            fake = netG(noise)
            label.fill_(0.0)
            criterion(netD(fake.detach()), label).backward()
            optimizerD.step()
            netG.zero_grad()
            label.fill_(1.0)
            errG = criterion(netD(fake), label)
            errG.backward()
            optimizerG.step()
            G_losses.append(errG.item())
    return G_losses


netG.apply(weights_init)
netD.apply(weights_init)
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
losses = train(netG, netD, optimizerG, optimizerD, DataLoader(images(), BATCH), nn.BCELoss(), 2)
RESULT = {"G": netG.state_dict(), "D": netD.state_dict()}
