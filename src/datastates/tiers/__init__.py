"""Carries committed checkpoints from the directory that they are saved in to other places: tiers.

Works in the flusher process and in the command line: imports no torch, and the library for object stores only where a
tier is one.
"""
