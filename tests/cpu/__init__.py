"""The room `cpu`, held against recordings of real machines."""
