"""An encoder and a decoder with an optimizer each, and teacher forcing in the first epochs."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nano_loop import nano
from scripts.data import BATCH, text


class EncoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru = nn.Embedding(12, 8), nn.GRU(8, 8, batch_first=True)

    def forward(self, input):
        return self.gru(self.embedding(input))


class DecoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.gru, self.out = nn.Embedding(12, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 12)

    def forward(self, input, hidden):
        output, hidden = self.gru(torch.relu(self.embedding(input)), hidden)
        return self.out(output), hidden


@nano
def train_epoch(dataloader, encoder, decoder, encoder_optimizer, decoder_optimizer, criterion, forced):
    for input_tensor, target_tensor in dataloader:
        encoder_optimizer.zero_grad()
        decoder_optimizer.zero_grad()
        _, hidden = encoder(input_tensor)
        decoder_input = torch.zeros(len(input_tensor), 1, dtype=torch.long)
        outputs = []
        for i in range(target_tensor.size(1)):
            output, hidden = decoder(decoder_input, hidden)
            outputs.append(output)
            decoder_input = target_tensor[:, i : i + 1] if forced else output.argmax(-1).detach()
        loss = criterion(torch.cat(outputs, 1).flatten(0, 1), target_tensor.flatten())
        loss.backward()
        encoder_optimizer.step()
        decoder_optimizer.step()


torch.manual_seed(0)
pairs = text(480).view(-1, 6)
loader = DataLoader(TensorDataset(pairs, pairs.flip(1)), BATCH, drop_last=True)
encoder, decoder = EncoderRNN(), DecoderRNN()
encoder_optimizer = torch.optim.Adam(encoder.parameters(), lr=0.01)
decoder_optimizer = torch.optim.Adam(decoder.parameters(), lr=0.01)
for epoch in range(3):
    train_epoch(loader, encoder, decoder, encoder_optimizer, decoder_optimizer, nn.CrossEntropyLoss(), epoch < 2)
RESULT = {"encoder": encoder.state_dict(), "decoder": decoder.state_dict()}
