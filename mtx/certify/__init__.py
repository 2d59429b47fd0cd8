"""Whether a run computes what its model says, on its layout and on others: runs of small cases, and
the equations of the step at full size."""
