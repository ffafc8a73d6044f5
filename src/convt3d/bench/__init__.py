"""Measuring: named shapes, peers, hardware limits, timing, numerics and reports."""
