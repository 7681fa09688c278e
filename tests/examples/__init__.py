"""The examples, run at a small size as a user would run them."""
