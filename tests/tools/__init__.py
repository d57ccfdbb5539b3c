"""Tests of the developer scripts in tools/."""
