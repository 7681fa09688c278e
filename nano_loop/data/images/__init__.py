"""The cache of decoded images, and loaders that fetch through it."""
