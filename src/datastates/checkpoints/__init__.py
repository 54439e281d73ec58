"""The parts of `datastates.Checkpointer`: what its checkpoints hold, which there are, which stay, how one is loaded."""
