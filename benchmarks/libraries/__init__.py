"""What users of libraries write to train with them, of two sizes: for tests and for benchmarks."""

from benchmarks.libraries import forecasting, graphs, images, language, reinforcement, tables
from benchmarks.libraries.programs import PROGRAMS, Program, Trained

__all__ = ["PROGRAMS", "Program", "Trained", "forecasting", "graphs", "images", "language", "reinforcement", "tables"]
