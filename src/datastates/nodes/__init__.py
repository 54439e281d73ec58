"""Nodes that share no directory: each commits its own part, and all of them know when a checkpoint is whole."""
