"""Named asynchronous operations: what is ready on all ranks is agreed by bits, fused into few large exchanges, and handed back."""
