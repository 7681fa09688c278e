"""The head of a language model and its loss, without storing its logits; and cross-entropy of existing logits."""
