"""Random draws that match torch's: dropout masks, and noise in NHWC tensors."""
