"""What a run needs on a GPU: bytes and FLOPs of a pass, known devices."""
