"""What is computed in torch's place: attention, gradients of convolutions, random masks."""
