"""Checks that a run computes what its model says, on its layout and on others, by running small
cases and by walking the equations of the step at full size."""
