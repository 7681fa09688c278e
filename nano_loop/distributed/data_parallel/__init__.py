"""Averages gradients over the ranks at the end of each backward."""
