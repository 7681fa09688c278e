"""Serialization of the call and its arguments for workers, sharing large memory rather than copying it."""
