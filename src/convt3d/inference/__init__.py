"""Layers with what follows them in evaluation mode: ``convt3d.fuse`` and what its layers call."""
