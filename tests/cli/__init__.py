"""Tests of the command line, mirroring erllama/cli."""
