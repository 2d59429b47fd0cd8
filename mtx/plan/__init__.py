"""A model on a cluster: its FLOPs, memory and communication, published, predicted or compiled."""
