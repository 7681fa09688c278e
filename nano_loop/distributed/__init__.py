"""Several processes: how they are started, how they find each other, and what travels between them."""
