"""Diagnosis: pure functions that look at settings and machine and say what they find. Imports no torch."""
