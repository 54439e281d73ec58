"""The flusher: a process of its own that carries slabs from the host cache to storage and commits them."""
