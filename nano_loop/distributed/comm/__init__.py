"""Communication between ranks: their identities, the channel, and the serialization of values."""
