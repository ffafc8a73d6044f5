"""Helpers shared by the CPU tests and tests/gpu: sample layers, and checks that take a device."""
