"""Programs that train with libraries as their users do, in two sizes: for tests and for benchmarks."""

from benchmarks.libraries import forecasting, graphs, images, language, reinforcement, tables
from benchmarks.libraries.programs import PROGRAMS, Program, Trained

__all__ = ["PROGRAMS", "Program", "Trained", "forecasting", "graphs", "images", "language", "reinforcement", "tables"]
