"""Tests of what `doctor` finds: each finding on a recorded machine that provokes it."""
