"""Meshes, schedules and runs as text for the terminal and as pictures for files and notebooks."""
