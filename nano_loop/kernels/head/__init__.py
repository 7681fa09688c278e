"""The head of a language model and its loss, without its logits; and cross-entropy of logits that are there."""
