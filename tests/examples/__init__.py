"""The examples, run small as a person would run them."""
