"""A small student that learns from a large teacher, which is not trained, with a temperature."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from nano_loop import nano
from scripts.data import BATCH, images, small_cnn


@nano
def train_knowledge_distillation(teacher, student, train_loader, epochs, optimizer, T, soft_target_loss_weight):
    teacher.eval()
    student.train()
    for _ in range(epochs):
        for inputs, labels in train_loader:
            optimizer.zero_grad()
            with torch.no_grad():
                teacher_logits = teacher(inputs)
            student_logits = student(inputs)
            soft_targets = F.softmax(teacher_logits / T, dim=-1)
            soft_prob = F.log_softmax(student_logits / T, dim=-1)
            soft_loss = F.kl_div(soft_prob, soft_targets, reduction="batchmean") * T**2
            label_loss = F.cross_entropy(student_logits, labels)
            loss = soft_target_loss_weight * soft_loss + (1 - soft_target_loss_weight) * label_loss
            loss.backward()
            optimizer.step()


torch.manual_seed(42)
teacher, student = small_cnn(), nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
train_knowledge_distillation(teacher, student, DataLoader(images(), BATCH), 3, optimizer, 2, 0.25)
RESULT = {"student": student.state_dict(), "teacher": teacher.state_dict()}
