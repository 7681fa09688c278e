"""A graph convolution over a sparse adjacency matrix, trained on the whole graph in each step."""

import torch
import torch.nn.functional as F
from torch import nn

from nano_loop import nano

UNDIVIDED = True


class GraphConv(nn.Module):
    def __init__(self, input_dim, output_dim):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(input_dim, output_dim))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, input_tensor, adj_mat):
        return torch.sparse.mm(adj_mat, input_tensor @ self.kernel)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2 = GraphConv(8, 16), GraphConv(16, 3)

    def forward(self, x, adj_mat):
        return F.log_softmax(self.gc2(F.relu(self.gc1(x, adj_mat)), adj_mat), dim=1)


def load_graph(nodes=30):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(nodes) % 3
    features = torch.rand(nodes, 8, generator=generator) + labels[:, None] * 0.3
    edges = (torch.rand(nodes, nodes, generator=generator) < 0.1) | (labels[:, None] == labels)
    normalized = edges / edges.sum(1, keepdim=True)
    return features, labels, normalized.to_sparse()


@nano
def train_iter(epoch, model, optimizer, criterion, input, target, mask_train, adj_mat):
    model.train()
    optimizer.zero_grad()
    output = model(input, adj_mat)
    loss = criterion(output[mask_train], target[mask_train])
    loss.backward()
    optimizer.step()
    return loss.item()


torch.manual_seed(42)
features, labels, adj_mat = load_graph()
idx_train = torch.arange(0, 20)
gcn = GCN()
optimizer = torch.optim.Adam(gcn.parameters(), lr=0.01, weight_decay=5e-4)
losses = [
    train_iter(epoch + 1, gcn, optimizer, nn.NLLLoss(), features, labels, idx_train, adj_mat) for epoch in range(4)
]
RESULT = {"losses": losses, "model": gcn.state_dict()}
