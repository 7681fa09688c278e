"""Communication between ranks: who they are, the channel, and how values travel as bytes."""
