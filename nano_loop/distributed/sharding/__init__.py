"""Assignment of batches to ranks, in an order that all ranks agree on."""
