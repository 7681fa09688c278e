"""A data pipeline for images that keeps up with the loop: what was decoded and resized once is not done again."""
