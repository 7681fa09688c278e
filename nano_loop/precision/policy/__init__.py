"""The decision between bf16 and fp32 for each call."""
